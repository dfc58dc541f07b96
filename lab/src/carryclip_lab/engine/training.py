"""One run: train as its spec says, tell what happened after every epoch, and go on where a checkpoint left off."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carryclip_lab.engine.methods import Samples, attach, gradient_norm, measure_next, optimizer_of, sampling, unwarned
from carryclip_lab.spec import Spec
from carryclip_lab.store import checkpoints
from carryclip_lab.store.records import End, Epoch
from carryclip_lab.tasks import old as tasks


@dataclass
class _Run(checkpoints.Run):
    """A run, and what draws the order of its examples."""

    order: torch.Generator = field(default_factory=torch.Generator)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "order": self.order.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.order.set_state(state["order"])


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
    found = None if checkpoint is None else checkpoints.read(checkpoint, spec, device)
    run = checkpoints.resumed(lambda: start(spec, task, device), checkpoint, found)
    yield from run.history
    saved = time.perf_counter()
    while True:
        if (end := _end(spec, run.history)) is not None:
            yield end
            return
        run.history.append(_epoch(spec, task, run))
        yield run.history[-1]
        if checkpoint is not None and time.perf_counter() - saved >= every:
            checkpoints.save(checkpoint, spec, device, run.state())
            saved = time.perf_counter()


def _end(spec: Spec, history: list[Epoch]) -> End | None:
    if not history:
        return None
    last = history[-1]
    if last.loss is None:
        return End("diverged", message=f"The loss was not finite in epoch {last.epoch}.")
    if last.train_accuracy is not None and last.train_accuracy >= spec.goal:
        return End("reached", reached=last.epoch)
    return End("not_reached") if last.epoch >= spec.epochs else None


def start(spec: Spec, task: tasks.Task, device: str = "cpu") -> _Run:
    """A run at its beginning."""
    torch.manual_seed(spec.seed)  # nothing here draws from it, but a method of one's own may
    weights, order = (torch.Generator().manual_seed(2 * spec.seed + which) for which in (0, 1))
    net = task.build(weights).to(device)
    optimizer = optimizer_of(spec, net.parameters())
    every = sampling(math.ceil(len(task.labels) / spec.batch))
    return _Run(net, optimizer, attach(spec, optimizer, every), order=order)


def _epoch(spec: Spec, task: tasks.Task, run: _Run) -> Epoch:
    start = time.perf_counter()
    batches = torch.randperm(len(task.labels), generator=run.order).split(spec.batch)
    loss, right, figures = steps(task, run, batches, first=len(run.history) * len(batches))
    loss /= len(task.labels)
    finite = math.isfinite(loss)
    accuracy = accuracy_of(run.net, task.images, task.labels, task.chunk) if finite else None
    over = (finite and (accuracy or 0.0) >= spec.goal) or len(run.history) + 1 >= spec.epochs
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
) -> tuple[float, float, dict[str, Any]]:
    """One step for each batch: summed loss, number of right answers on the way, means of the sampled metrics."""
    loss, right = torch.zeros(2, device=task.images.device, dtype=torch.float64).unbind()
    samples = Samples()
    every = sampling(len(batches))
    run.net.train()
    with unwarned():
        for number, batch in enumerate(batches, first):
            run.optimizer.zero_grad()
            for part in batch.to(task.labels.device).split(task.chunk):
                out = run.net(task.images[part])
                summed = nn.functional.cross_entropy(out, task.labels[part], reduction="sum")
                (summed / len(batch)).backward()
                loss += summed.detach()
                right += (out.detach().argmax(1) == task.labels[part]).sum()
            norm = gradient_norm(run.net.parameters()) if number % every == 0 else None
            measure_next(run.clipper, wanted=norm is not None)
            run.optimizer.step()
            if norm is not None:
                samples.take(norm, run.clipper)
        return loss.item(), right.item(), samples.means()


@torch.no_grad()
def accuracy_of(net: nn.Module, images: Tensor, labels: Tensor, chunk: int) -> float:
    """Share of images that the network classifies rightly."""
    net.eval()
    parts = zip(images.split(chunk), labels.split(chunk), strict=True)
    return float(sum((net(x).argmax(1) == y).sum() for x, y in parts)) / len(labels)
