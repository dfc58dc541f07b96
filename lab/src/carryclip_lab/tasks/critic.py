"""A critic that learns the values of states by temporal differences, where returns are rare and large."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from carryclip_lab.checks import check_whole, make_float
from carryclip_lab.problem import Problem, Weights
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Place, Task

DISCOUNT = 0.5
"""Of the next state's value."""
OFTEN = 0.5
"""From this chance on rewards are nothing rare."""


@dataclass(frozen=True, kw_only=True)
class Critic(Task):
    """A walk on a ring of states, each with a reward of its own that comes rarely; one value for each state.

    Whatever the chance, the expected rewards are the same, and so are the true values. The learning rate falls by a
    cosine to a tenth.

    Args:
        states: on the ring.
        rare: chance that a state pays; 1 for always, in which case rewards have normal noise.
        steps: of an epoch.
    """

    weights = (1e-6, 6e-4)

    states: int = 10
    rare: float = 0.02
    steps: int = 200

    def __post_init__(self) -> None:
        check_whole(self, states=3, steps=1)
        make_float(self, "rare", above=0.0)
        if self.rare > 1.0:
            raise ValueError(f"rare must be at most 1, got {self.rare:g}.")

    def judged(self) -> Judged:
        """By the error of the values, which are known; their sum tells the bias."""
        rare = self.rare < OFTEN
        return Judged(
            "Critic with rare rewards" if rare else "Critic with steady rewards",
            f"a ring of {self.states} states"
            + (f", each pays once in {1 / self.rare:g} visits" if rare else ", normal noise"),
            "relative_rmse",
            "error of the values (relative RMSE)",
            higher=False,
            little=0.01,
            kind="signal" if rare else "ordinary",
            bias="calibration",
            unbiased=1.0,
            also=(("calibration", "sum of the values, by the true one"),),
        )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """The values solve a linear equation."""
        return _Ring(spec, self)


class _Ring(Problem):
    floor = 0.1

    def __init__(self, spec: Spec, task: Critic) -> None:
        super().__init__(spec, task.steps)
        self.task, count = task, task.states
        self.pay = 1.0 + torch.arange(count) / count
        """Expected reward of each state."""
        there = torch.eye(count, dtype=torch.float64)
        walk = (there.roll(1, 1) + there.roll(-1, 1)) / 2
        self.truth = torch.linalg.solve(there - DISCOUNT * walk, self.pay.double())

    def build(self, generator: torch.Generator) -> Weights:
        """All values 0."""
        return Weights(torch.zeros(self.task.states))

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Half of the mean squared difference to reward and next value, which is held."""
        batch, count = self.spec.batch, self.task.states
        state = torch.randint(count, (batch,), generator=generator)
        move = 2 * torch.randint(2, (batch,), generator=generator) - 1
        if self.task.rare < 1.0:
            pays = torch.rand(batch, generator=generator) < self.task.rare
            reward = torch.where(pays, self.pay[state] / self.task.rare, 0.0)
        else:
            reward = self.pay[state] + torch.randn(batch, generator=generator)
        target = reward + DISCOUNT * net.values.detach()[(state + move) % count]
        return (net.values[state] - target).square().mean() / 2

    def measure(self, net: Any) -> dict[str, Any]:
        """Error of the values by their size, and their sum by the true one."""
        values = net.values.double()
        error = (values - self.truth).norm() / self.truth.norm()
        return {"relative_rmse": float(error), "calibration": float(values.sum() / self.truth.sum())}
