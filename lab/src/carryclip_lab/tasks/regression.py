"""A line through points with noise that is skewed, heavy-tailed, or fine but for one batch."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from carryclip_lab.checks import check_choice, check_whole, make_float
from carryclip_lab.problem import Problem, Weights
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Kind, Place, Task

FAR = 10.0
"""A start this far from the optimum makes the mean gradient larger than a usual radius."""
TITLES: dict[str, tuple[str, Kind]] = {
    "skewed": ("Skewed noise", "signal"),
    "heavy": ("Symmetric heavy tails", "corruption"),
    "normal": ("Normal noise", "ordinary"),
}


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """A line through noisy points.

    Args:
        law: of the noise: ``"normal"``, ``"skewed"`` or ``"heavy"``.
        dimension: of the inputs, the constant among them.
        start: distance from the truth at the start, which is the norm of the mean gradient there.
        spike: step whose targets are off by 1000; -1 for none.
        frozen: whether the weights stay where they are, to see what a method makes of the gradients there.
        steps: of an epoch.
    """

    law: str = "normal"
    dimension: int = 10
    start: float = 1.0
    spike: int = -1
    frozen: bool = False
    steps: int = 200

    def __post_init__(self) -> None:
        check_choice("law", self.law, tuple(TITLES))
        check_whole(self, dimension=1, steps=1, spike=-1)
        make_float(self, "start")
        if not isinstance(self.frozen, bool):
            raise ValueError(f"frozen must be true or false, got {self.frozen!r}.")

    def judged(self) -> Judged:
        """By the distance from the true line; where weights stay, by the bias of the updates."""
        size = f"{self.dimension} dimensions"
        if self.frozen:
            return Judged(
                "Bias at a frozen point",
                f"{self.law} noise, {size}, mean gradient of norm {self.start:g}",
                "bias_along",
                "mean update less mean gradient, along the mean gradient",
                higher=False,
                little=0.0,
                kind="frozen",
            )
        title, kind = TITLES[self.law]
        if self.spike >= 0:
            title, kind = "One spiked batch", "corruption"
        elif self.start >= FAR:
            title, kind = "Radius below the mean gradient", "corruption"
        return Judged(
            title,
            f"linear regression in {size}, {self.law} noise, from a distance of {self.start:g}",
            "distance",
            "distance from the optimum",
            higher=False,
            little=0.01,
            kind=kind,
            bias="iterate",
        )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """The noise has mean 0 in each case, so that the optimum of the squared error is the true line."""
        return _Held(spec, self) if self.frozen else Line(spec, self)


class Line(Problem):
    """Its data, network and loss."""

    def __init__(self, spec: Spec, task: Regression) -> None:
        super().__init__(spec, task.steps)
        self.task, self.truth = task, torch.ones(task.dimension) / math.sqrt(task.dimension)

    def build(self, generator: torch.Generator) -> Weights:
        """Somewhere at the given distance; to stay there, where noise and mean gradient have their tail on one side."""
        direction = torch.randn(len(self.truth), generator=generator)
        if self.task.frozen:
            direction = torch.zeros(len(self.truth))
            direction[0] = -1.0
        return Weights(self.truth + self.task.start * direction / direction.norm())

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Half of the mean squared error of a batch."""
        inputs = torch.randn(self.spec.batch, len(self.truth), generator=generator)
        inputs[:, 0] = 1.0  # the constant, which skewed noise pulls at
        targets = inputs @ self.truth + self._noise(generator)
        if step == self.task.spike:
            targets = targets + 1000.0
        return (inputs @ net.values - targets).square().mean() / 2

    def _noise(self, generator: torch.Generator) -> Tensor:
        batch = self.spec.batch
        uniform = torch.rand(batch, generator=generator).clamp_min(1e-12)
        match self.task.law:
            case "skewed":  # Pareto with tail 2.5, its mean taken off
                return uniform ** (-1 / 2.5) - 2.5 / 1.5
            case "heavy":  # Student's t with 1.5 degrees of freedom: no variance
                normal = torch.randn(batch, generator=generator)
                gamma = torch._standard_gamma(torch.full((batch,), 0.75), generator=generator)
                return normal / (gamma / 0.75).sqrt()
        return torch.randn(batch, generator=generator)

    def measure(self, net: Any) -> dict[str, Any]:
        """Distance to the true line, and the way there."""
        error = (net.values - self.truth).double()
        return {"distance": float(error.norm()), "iterate": error.tolist()}


class _Held(Line):
    """Takes every step of plain SGD back, and adds up what it was and what the gradient was."""

    def begin(self, step: int) -> None:
        """Nothing is added up yet."""
        super().begin(step)
        self._updates, self._gradients = (torch.zeros(len(self.truth), dtype=torch.float64) for _ in range(2))

    @contextlib.contextmanager
    def around(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The gradient is as it came; how far a step went, by its learning rate, is what the optimizer was given."""
        parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
        gradients = [each.grad.flatten() for each in parameters if each.grad is not None]
        self._gradients += torch.cat(gradients).double()
        place = parameters_to_vector(parameters).detach().clone()
        yield
        with torch.no_grad():
            self._updates += (place - parameters_to_vector(parameters)).double() / self.spec.lr
            vector_to_parameters(place, parameters)  # which become views of what they are given

    def measure(self, net: Any) -> dict[str, Any]:
        """Of this epoch: means of gradients and of updates less gradients."""
        bias = (self._updates - self._gradients) / self.steps
        mean = self._gradients / self.steps
        return {
            **super().measure(net),
            "bias": bias.tolist(),
            "gradient": mean.tolist(),
            "bias_norm": float(bias.norm()),
            "bias_along": float(bias @ mean / mean.norm()),
        }
