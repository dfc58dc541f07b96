"""Bias where nothing moves, in the optimizer's own geometry: its steps with clipping against its steps without."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from carryclip_lab.checks import check_choice, check_whole, make_float
from carryclip_lab.engine.methods import optimizer_of
from carryclip_lab.problem import Problem
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Place, Task
from carryclip_lab.tasks.regression import TITLES, Line, Regression


@dataclass(frozen=True, kw_only=True)
class Drift(Task):
    """A line through noisy points, held where it is, while two optimizers of one kind look at the same gradients.

    One has them clipped, the other as they are. What counts is how far the one's mean step is from the other's. Adam
    divides by the size of what it gets, so that this is not the bias of the gradients.

    Args:
        law: of the noise: ``"normal"``, ``"skewed"`` or ``"heavy"``.
        dimension: of the inputs, the constant among them.
        start: norm of the mean gradient.
        steps: of an epoch.
    """

    law: str = "skewed"
    dimension: int = 10
    start: float = 1.0
    steps: int = 200

    def __post_init__(self) -> None:
        check_choice("law", self.law, tuple(TITLES))
        check_whole(self, dimension=1, steps=1)
        make_float(self, "start", above=0.0)

    def judged(self) -> Judged:
        """By what the mean step lacks, along the mean step of the optimizer alone."""
        return Judged(
            "Bias of the steps at a frozen point",
            f"{self.law} noise, {self.dimension} dimensions, mean gradient of norm {self.start:g}",
            "bias_along",
            "mean step less the mean step without clipping, along the latter",
            higher=False,
            little=0.0,
            kind="frozen",
            also=(("bias_across", "what goes astray, as a share"),),
        )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """Both optimizers are given back where they stood."""
        line = Regression(law=self.law, dimension=self.dimension, start=self.start, frozen=True, steps=self.steps)
        return _Twins(spec, line)


class _Twins(Line):
    def __init__(self, spec: Spec, task: Regression) -> None:
        super().__init__(spec, task)
        self._twin = nn.Parameter(torch.zeros(len(self.truth)))
        self._alone = optimizer_of(spec, [self._twin])

    def begin(self, step: int) -> None:
        """Nothing is added up yet."""
        super().begin(step)
        self._moved, self._free = (torch.zeros(len(self.truth), dtype=torch.float64) for _ in range(2))

    @contextlib.contextmanager
    def around(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The twin's step is taken first, from the gradient as it came."""
        parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
        place = parameters_to_vector(parameters).detach().clone()
        with torch.no_grad():
            self._twin.copy_(place)
        self._twin.grad = torch.cat([each.grad.flatten() for each in parameters if each.grad is not None]).clone()
        self._alone.step()
        self._free += (place - self._twin.detach()).double()
        yield
        with torch.no_grad():
            self._moved += (place - parameters_to_vector(parameters)).double()
            vector_to_parameters(place, parameters)  # which become views of what they are given

    def measure(self, net: Any) -> dict[str, Any]:
        """Of this epoch: how far the mean step is from the twin's, by the length of the latter."""
        along = self._free / self._free.norm()
        bias = (self._moved - self._free) / self._free.norm()
        astray = bias - (bias @ along) * along
        return {
            "bias_along": float(bias @ along) * self.task.start,
            "bias_across": float(astray.norm()),
            "steps_alone": float(self._free.norm()) / self.steps,
        }

    def state(self) -> dict[str, Any]:
        """The twin's moments."""
        return {"alone": self._alone.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._alone.load_state_dict(state["alone"])
