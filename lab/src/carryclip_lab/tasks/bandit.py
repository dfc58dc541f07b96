"""One arm pays much and rarely, and is the best; the others pay a little always. A policy by its gradient."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from carryclip_lab.checks import check_whole, make_float
from carryclip_lab.problem import Problem, Weights
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Place, Task

OFTEN = 0.5
"""From this chance on the best arm's reward is nothing rare."""


@dataclass(frozen=True, kw_only=True)
class Bandit(Task):
    """One arm that is the best and pays rarely.

    Args:
        arms: how many.
        rare: chance that it pays.
        steps: of an epoch.
    """

    arms: int = 10
    rare: float = 0.01
    steps: int = 200

    def __post_init__(self) -> None:
        check_whole(self, arms=2, steps=1)
        make_float(self, "rare", above=0.0, below=1.0)

    def judged(self) -> Judged:
        """By the reward that the policy can expect."""
        rare = self.rare < OFTEN
        return Judged(
            "Bandit with rare rewards" if rare else "Bandit with steady rewards",
            f"{self.arms} arms, the best pays once in {1 / self.rare:g} pulls",
            "reward",
            "expected reward",
            higher=True,
            little=0.01,
            kind="signal" if rare else "ordinary",
            also=(("best_arm", "chance of the best arm"),),
        )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """The means of all arms are known."""
        return _Arms(spec, self)


class _Arms(Problem):
    def __init__(self, spec: Spec, task: Bandit) -> None:
        super().__init__(spec, task.steps)
        self.rare = task.rare
        self.means = torch.full((task.arms,), 1.0, dtype=torch.float64)
        self.means[0] = 2.0

    def build(self, generator: torch.Generator) -> Weights:
        """All arms alike."""
        return Weights(torch.zeros(len(self.means)))

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Whose gradient is that of the expected reward, by the pulls of a batch; 1 is taken off as a baseline."""
        batch = self.spec.batch
        chances = net.values.log_softmax(0)
        pulls = torch.multinomial(chances.detach().exp(), batch, replacement=True, generator=generator)
        lucky = torch.rand(batch, generator=generator) < self.rare
        rewards = torch.where(pulls == 0, torch.where(lucky, 2.0 / self.rare, 0.0), 1.0)
        return -((rewards - 1.0) * chances[pulls]).mean()

    def measure(self, net: Any) -> dict[str, Any]:
        """Expected reward and the best arm's chance."""
        policy = net.values.double().softmax(0)
        return {"reward": float(policy @ self.means), "best_arm": float(policy[0])}
