"""What a trial is, and one run of it: steps on data that depends on the seed alone, metrics after each epoch.

The batch of a step is a function of seed and step, so that methods are compared on the same data in the same order, and
a run that goes on from a checkpoint sees what it would have seen.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from carryclip_lab.engine.methods import Samples, attach, gradient_norm, measure_next, optimizer_of, sampling, unwarned
from carryclip_lab.spec import Spec
from carryclip_lab.store import checkpoints
from carryclip_lab.store.records import End, Epoch
from carryclip_lab.trials import classify, known, text
from carryclip_lab.trials.frozen import Held


class Trial(Protocol):
    """Data, network and what is measured."""

    steps: int
    """Of an epoch."""

    def build(self, generator: torch.Generator) -> nn.Module:
        """A network with fresh weights."""
        ...

    def loss(self, net: nn.Module, generator: torch.Generator, step: int) -> Tensor:
        """The loss of a step's batch, which the generator draws."""
        ...

    def measure(self, net: nn.Module) -> dict[str, Any]:
        """Metrics by name; lists are for the mean over seeds."""
        ...

    def rate(self, step: int) -> float:
        """Factor of the learning rate at a step."""
        ...


def made(spec: Spec, data: str | None = None) -> Trial:
    """The trial of a spec."""
    if spec.task == "text":
        return text.Text(spec, data)
    kinds: dict[str, Any] = {
        "softmax": known.Softmax,
        "regression": known.Regression,
        "bandit": known.Bandit,
        "classify": classify.Classify,
    }
    return kinds[spec.task](spec)


def train(
    spec: Spec, checkpoint: Path | None = None, *, every: float = 0.0, data: str | None = None
) -> Iterator[Epoch | End]:
    """Train to the last epoch, yielding each when it is over and the end at last.

    Args:
        spec: what to train.
        checkpoint: file to go on from, written every so often.
        every: seconds between two checkpoints; 0 for one after each epoch.
        data: a text of one's own.
    """
    trial = made(spec, data)
    found = None if checkpoint is None else checkpoints.read(checkpoint, spec, "cpu")
    run = checkpoints.resumed(lambda: _start(spec, trial), checkpoint, found)
    yield from run.history
    saved = time.monotonic()
    while len(run.history) < spec.epochs and not (run.history and run.history[-1].loss is None):
        run.history.append(_epoch(spec, trial, run))
        yield run.history[-1]
        if checkpoint is not None and time.monotonic() - saved >= every:
            checkpoints.save(checkpoint, spec, "cpu", run.state())
            saved = time.monotonic()
    if run.history[-1].loss is None:
        yield End("diverged", message=f"The loss was not finite in epoch {len(run.history)}.")
    else:
        yield End("reached", reached=len(run.history))


def _start(spec: Spec, trial: Trial) -> checkpoints.Run:
    torch.manual_seed(spec.seed)  # nothing here draws from it, but a method of one's own may
    net = trial.build(torch.Generator().manual_seed(2 * spec.seed))
    optimizer = optimizer_of(spec, net.parameters())
    return checkpoints.Run(net, optimizer, attach(spec, optimizer, sampling(trial.steps)))


def _epoch(spec: Spec, trial: Trial, run: checkpoints.Run) -> Epoch:
    begun, number = time.perf_counter(), len(run.history)
    net, optimizer = run.net, run.optimizer
    samples, every = Samples(), sampling(trial.steps)
    held = Held(net) if getattr(spec.recipe, "frozen", False) else None
    total = torch.zeros((), dtype=torch.float64)
    net.train()
    with unwarned():
        for step in range(number * trial.steps, (number + 1) * trial.steps):
            optimizer.zero_grad()
            loss = trial.loss(net, generator_of(spec.seed, step), step)
            loss.backward()
            total += loss.detach()
            norm = gradient_norm(net.parameters()) if step % every == 0 else None
            measure_next(run.clipper, wanted=norm is not None)
            for group in optimizer.param_groups:
                group["lr"] = spec.lr * trial.rate(step)
            if held is not None:
                held.before()
            optimizer.step()
            if held is not None:
                held.after(spec.lr)
            if norm is not None:
                samples.take(norm, run.clipper)
        figures = samples.means()
    mean = total.item() / trial.steps
    finite = math.isfinite(mean) and all(bool(parameter.isfinite().all()) for parameter in net.parameters())
    net.eval()
    with torch.no_grad():
        measured = trial.measure(net) if finite else {}
        if held is not None:
            measured |= held.measured()
    return Epoch(
        epoch=number + 1,
        loss=mean if finite else None,
        **figures,
        seconds=time.perf_counter() - begun,
        metrics=measured,
    )


def generator_of(seed: int, step: int) -> torch.Generator:
    """What draws the batch of a step."""
    return torch.Generator().manual_seed((seed + 1) * 1_000_003 + 7919 * step)
