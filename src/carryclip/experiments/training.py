"""One run: train as its spec says, tell what happened after every epoch, and go on where a checkpoint left off."""

import contextlib
import math
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carryclip import __version__
from carryclip.diagnosis import CarryClipWarning
from carryclip.experiments import tasks
from carryclip.experiments.records import End, Epoch
from carryclip.experiments.spec import Spec, load_method, parse, policy_of
from carryclip.torch import UClip

SAMPLES = 10
"""Steps per epoch, or a few more, whose metrics are averaged."""


@dataclass
class _Run:
    """Everything that changes while a run goes on."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    order: torch.Generator
    clipper: Any = None
    history: list[Epoch] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        own = {"clipper": self.clipper.state_dict()} if _keeps_own_state(self.clipper) else {}
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.get_state(),
            "random": torch.get_rng_state(),
            "history": [asdict(epoch) for epoch in self.history],
            **own,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"])
        torch.set_rng_state(state["random"])
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        if "clipper" in state:
            self.clipper.load_state_dict(state["clipper"])


def train(
    spec: Spec, checkpoint: Path | None = None, *, every: float = 0.0, device: str = "cpu"
) -> Iterator[Epoch | End]:
    """Train, yielding each epoch when it is over and the end at last.

    Epochs that a checkpoint remembers come first, so that whoever listens always hears the whole run.

    Args:
        spec: what to train.
        checkpoint: file to go on from, written every so often and removed by whoever has kept the result.
        every: seconds between two checkpoints; 0 for one after each epoch.
        device: where to train.
    """
    task = tasks.load(spec.task, spec.examples, device)
    run = start(spec, task, device)
    if checkpoint is not None:
        run = _resumed(run, spec, checkpoint, device) or start(spec, task, device)
    yield from run.history
    saved = time.perf_counter()
    while True:
        if (end := _end(spec, run.history)) is not None:
            yield end
            return
        run.history.append(_epoch(spec, task, run))
        yield run.history[-1]
        if checkpoint is not None and time.perf_counter() - saved >= every:
            _save(run, spec, checkpoint, device)
            saved = time.perf_counter()


def _end(spec: Spec, history: list[Epoch]) -> End | None:
    if not history:
        return None
    last = history[-1]
    if last.loss is None:
        return End("diverged", message=f"The loss was not finite in epoch {last.epoch}.")
    if last.train_accuracy is not None and last.train_accuracy >= spec.target:
        return End("reached", reached=last.epoch)
    return End("not_reached") if last.epoch >= spec.epochs else None


def start(spec: Spec, task: tasks.Task, device: str = "cpu") -> _Run:
    """A run at its beginning."""
    torch.manual_seed(spec.seed)  # nothing here draws from it, but a method of one's own may
    weights, order = (torch.Generator().manual_seed(2 * spec.seed + which) for which in (0, 1))
    net = task.build(weights).to(device)
    optimizer = _optimizer(spec, net)
    return _Run(net, optimizer, order, _attach(spec, optimizer, math.ceil(len(task.labels) / spec.batch)))


def _optimizer(spec: Spec, net: nn.Module) -> torch.optim.Optimizer:
    if spec.optimizer == "adam":
        return torch.optim.Adam(net.parameters(), lr=spec.lr, betas=(0.9, 0.999))
    return torch.optim.SGD(net.parameters(), lr=spec.lr, momentum=0.9 if spec.optimizer == "momentum" else 0.0)


def _attach(spec: Spec, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """The spec's method on the optimizer: a clipper, whatever a method of one's own returns, or None."""
    if spec.method is not None:
        clipper = load_method(spec.method)(optimizer, spec)
        if isinstance(clipper, UClip):
            clipper.metrics_every = _sampling(steps)
        return clipper
    if spec.region is None:
        return None
    return UClip(optimizer, parse(spec.region), policy_of(spec.carry), metrics_every=_sampling(steps))


def _sampling(steps: int) -> int:
    """Steps between two samples; counted over the whole run, as the clipper counts, so that a resumed run agrees."""
    return max(1, steps // SAMPLES)


def _keeps_own_state(clipper: Any) -> bool:
    """A clipper's state is in the optimizer's; what a method of one's own returns may have some of its own."""
    return clipper is not None and not isinstance(clipper, UClip) and hasattr(clipper, "state_dict")


def _epoch(spec: Spec, task: tasks.Task, run: _Run) -> Epoch:
    start = time.perf_counter()
    batches = torch.randperm(len(task.labels), generator=run.order).split(spec.batch)
    loss, right, figures = steps(task, run, batches, first=len(run.history) * len(batches))
    loss /= len(task.labels)
    finite = math.isfinite(loss)
    accuracy = accuracy_of(run.net, task.images, task.labels, task.chunk) if finite else None
    over = (finite and (accuracy or 0.0) >= spec.target) or len(run.history) + 1 >= spec.epochs
    return Epoch(
        epoch=len(run.history) + 1,
        loss=loss if finite else None,
        running_accuracy=right / len(task.labels),
        train_accuracy=accuracy,
        # Only the last is of interest, and on a subset the test set would take longer than the epoch.
        test_accuracy=accuracy_of(run.net, task.test_images, task.test_labels, task.chunk) if over and finite else None,
        **figures,
        seconds=time.perf_counter() - start,
    )


def steps(
    task: tasks.Task, run: _Run, batches: Sequence[Tensor], first: int = 0
) -> tuple[float, float, dict[str, float | None]]:
    """One step for each batch: summed loss, number of right answers on the way, means of the sampled metrics."""
    loss, right = torch.zeros(2, device=task.images.device, dtype=torch.float64).unbind()
    sampled: list[Any] = []
    every = _sampling(len(batches))
    run.net.train()
    with warnings.catch_warnings():
        # What it would warn of is in the metrics of every epoch.
        warnings.simplefilter("ignore", CarryClipWarning)
        for number, batch in enumerate(batches, first):
            run.optimizer.zero_grad()
            for part in batch.to(task.labels.device).split(task.chunk):
                out = run.net(task.images[part])
                summed = nn.functional.cross_entropy(out, task.labels[part], reduction="sum")
                (summed / len(batch)).backward()
                loss += summed.detach()
                right += (out.detach().argmax(1) == task.labels[part]).sum()
            norm = torch.nn.utils.get_total_norm(_gradients(run.net)) if number % every == 0 else None
            run.optimizer.step()
            if norm is not None:
                sampled.append((norm, run.clipper.metrics() if hasattr(run.clipper, "metrics") else {}))
        return loss.item(), right.item(), _means(sampled)


def _gradients(net: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def _means(sampled: list[Any]) -> dict[str, float | None]:
    """Means over the sampled steps; None for what there is not."""
    means: dict[str, float | None] = {"grad_norm": math.fsum(norm.item() for norm, _ in sampled) / len(sampled)}
    for name in ("carry_norm", "radius_norm", "clipped_fraction", "carry_feed"):
        values = [metrics[name] for _, metrics in sampled if name in metrics]
        means[name] = math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else None
    return {name: value if value is not None and math.isfinite(value) else None for name, value in means.items()}


@torch.no_grad()
def accuracy_of(net: nn.Module, images: Tensor, labels: Tensor, chunk: int) -> float:
    """Share of images that the network classifies rightly."""
    net.eval()
    parts = zip(images.split(chunk), labels.split(chunk), strict=True)
    return float(sum((net(x).argmax(1) == y).sum() for x, y in parts)) / len(labels)


def _save(run: _Run, spec: Spec, path: Path, device: str) -> None:
    """Whole or not at all: written aside, then put in its place. That it cannot be is no reason to stop."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"made": _made(spec, device), **run.state()}, aside)
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError when the disk is full
        warnings.warn(f"The checkpoint {path} cannot be written: {error}.", stacklevel=2)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _resumed(run: _Run, spec: Spec, path: Path, device: str) -> _Run | None:
    """The run as a checkpoint has it, or as it is if there is none of this very run; None if it cannot be read."""
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        if state.pop("made") == _made(spec, device):
            run.restore(state)
    except (FileNotFoundError, NotADirectoryError):
        return run
    except Exception as error:  # torch names many kinds for a damaged file
        warnings.warn(f"The checkpoint {path} cannot be read, so the run starts anew: {error}.", stacklevel=2)
        return None
    return run


def _made(spec: Spec, device: str) -> str:
    """What must agree, or a resumed run would be neither the one nor the other."""
    return f"{spec.canonical} {__version__} {torch.__version__} {device} {torch.get_num_threads()}"
