"""A run's data, network and loss in memory, as the trainer sees them: hooks with what is usual for them.

The batch of a step is a function of seed and step, so that methods are compared on the same data in the same order, and
a run that goes on from a checkpoint sees what it would have seen.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from carryclip_lab.engine.methods import Samples, attach, gradient_norm, measure_next, optimizer_of, sampling
from carryclip_lab.spec import Spec
from carryclip_lab.task import Place

Step = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """What a plan times: a step on some examples, and what an epoch adds to its steps.

    An example that is only evaluated takes a third of one that is trained on, where ``evaluate`` is None.
    """

    step: Step
    examples: int
    evaluate: Step | None
    share: float = 1.0
    """How many times ``evaluate`` fits into what an epoch evaluates, or how many examples that are."""


class Problem:
    """One run's data, network and loss. A trial of your own has ``build``, ``loss`` and ``measure``.

    Args:
        spec: of the run.
        steps: of an epoch.
    """

    floor: ClassVar[float | None] = None
    """The share of the learning rate that it falls to by a cosine over the run; None if it stays as it is."""
    warmup: ClassVar[float] = 0.0
    """The share of the steps in which it rises before it falls."""

    def __init__(self, spec: Spec, steps: int) -> None:
        self.spec, self.steps = spec, steps
        self.total = torch.zeros((), dtype=torch.float64)
        """The losses of this epoch, added up."""
        self.broken: set[str] = set()
        """Files that could not be read."""

    # ------------------------------------------------------------------ to be written for every problem

    def build(self, generator: torch.Generator) -> nn.Module:
        """A network with fresh weights; the same generator state gives the same weights."""
        raise NotImplementedError

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """The loss of a step's batch, which the generator draws."""
        raise NotImplementedError

    def measure(self, net: Any) -> dict[str, Any]:
        """Metrics by name, after an epoch; lists are for the mean over seeds."""
        raise NotImplementedError

    # ------------------------------------------------------------------ hooks of the trainer

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0 over the whole run."""
        if self.floor is None:
            return self.spec.lr
        return self.spec.lr * cosine(step, self.spec.epochs * self.steps, warmup=self.warmup, floor=self.floor)

    def begin(self, step: int) -> None:
        """An epoch begins, or goes on at one of its steps."""
        self.total = torch.zeros((), dtype=torch.float64)

    def backward(self, net: nn.Module, step: int) -> None:
        """The gradients of a step, and its loss added to the epoch's."""
        loss = self.loss(net, generator_of(self.spec.seed, step), step)
        loss.backward()
        self.total += loss.detach()

    def around(self, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        """What is done just before and just after the optimizer's step."""
        return contextlib.nullcontext()

    def agree(self, *, pause: bool) -> bool:
        """After a step of a lasting run: whether one of the processes that train it wants a pause."""
        return pause

    def closed(self, net: nn.Module, *, last: bool) -> dict[str, Any]:
        """What an epoch has come to, as fields of its record; ``last`` if the run may not have another one."""
        mean = self.total.item() / self.steps
        finite = math.isfinite(mean) and all(bool(parameter.isfinite().all()) for parameter in net.parameters())
        net.eval()
        with torch.no_grad():
            return {"loss": mean if finite else None, "metrics": self.measure(net) if finite else {}}

    def evaluate(self, net: nn.Module) -> tuple[float, int]:
        """For ``carryclip evaluate``, of runs that last: accuracy on all validation data, and how many these are."""
        raise NotImplementedError(f"{type(self).__name__} needs a method evaluate(net).")

    def message(self) -> str | None:
        """What else is to be said of a run that is done."""
        return None

    def state(self) -> dict[str, Any]:
        """What must be saved besides network and optimizer."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""

    # ------------------------------------------------------------------ what it costs

    def timing(self, spec: Spec, place: Place) -> Timing:
        """A step as the trainer takes it, and what comes with an epoch."""
        run = Run(spec, self)
        self.begin(0)
        steps = iter(range(1 << 60))
        return Timing(lambda: run.train(next(steps)), spec.batch, lambda: self.closed(run.net, last=False))


class Run:
    """A network that is trained: what changes from step to step.

    Args:
        spec: of the run.
        problem: what is trained.
        device: where.
    """

    def __init__(self, spec: Spec, problem: Problem, device: str = "cpu") -> None:
        torch.manual_seed(spec.seed)  # nothing here draws from it, but a method of one's own may
        self.problem, self.samples = problem, Samples()
        self.net = problem.build(torch.Generator().manual_seed(2 * spec.seed)).to(device)
        self.optimizer = optimizer_of(spec, self.net.parameters())
        self.every = sampling(problem.steps)
        self.clipper = attach(spec, self.optimizer, self.every)

    def train(self, step: int) -> None:
        """One step."""
        self.net.train()
        self.optimizer.zero_grad()
        self.problem.backward(self.net, step)
        norm = gradient_norm(self.net.parameters()) if step % self.every == 0 else None
        measure_next(self.clipper, wanted=norm is not None)
        for group in self.optimizer.param_groups:
            group["lr"] = self.problem.rate(step)
        with self.problem.around(self.optimizer):
            self.optimizer.step()
        if norm is not None:
            self.samples.take(norm, self.clipper)


def generator_of(seed: int, step: int) -> torch.Generator:
    """What draws the batch of a step."""
    return torch.Generator().manual_seed((seed + 1) * 1_000_003 + 7919 * step)


def cosine(step: int, steps: int, *, warmup: float = 0.0, floor: float = 0.0) -> float:
    """A factor that rises over a share of the steps, then falls by a cosine to a share of its peak.

    >>> [round(cosine(step, 101, warmup=0.1, floor=0.1), 3) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    warm = round(warmup * steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - 1 - warm)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


class Weights(nn.Module):
    """A network that is one vector."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(start)
