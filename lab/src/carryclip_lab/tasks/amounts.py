"""Expected amounts by squared error, where single amounts are skewed: most are 0 and a few are large."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from carryclip_lab.checks import check_choice, check_whole
from carryclip_lab.problem import Problem
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Kind, Place, Task
from carryclip_lab.tasks._network import Dense

CHANCE, MEAN = 0.15, 20.0
"""Chance of an amount, and its mean, for average features."""
SPREAD = 1.2
"""Deviation of the amount's logarithm."""
LAWS: dict[str, tuple[str, str, Kind]] = {
    "claims": ("Skewed amounts", "85 % are 0, the others lognormal", "signal"),
    "symmetric": ("Symmetric amounts", "the same means with normal noise", "ordinary"),
}


@dataclass(frozen=True, kw_only=True)
class Amounts(Task):
    """Claims of an insurance, as far as features tell; the learning rate falls by a cosine to a tenth.

    Args:
        law: ``"claims"``, most of which are 0, or ``"symmetric"``: the same means, with normal noise.
        features: of each example.
        hidden: units of the network.
        steps: of an epoch.
    """

    weights = (1e-6, 8e-4)

    law: str = "claims"
    features: int = 8
    hidden: int = 32
    steps: int = 200

    def __post_init__(self) -> None:
        check_choice("law", self.law, tuple(LAWS))
        check_whole(self, features=1, hidden=1, steps=1)

    def judged(self) -> Judged:
        """By the error of the expected amounts, which are known; the total tells the bias."""
        title, setting, kind = LAWS[self.law]
        return Judged(
            title,
            setting,
            "relative_rmse",
            "error of expected amounts (relative RMSE)",
            higher=False,
            little=0.01,
            kind=kind,
            bias="calibration",
            unbiased=1.0,
            also=(("calibration", "predicted total, by the true one"),),
        )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """Fresh examples at every step; the truth is known."""
        return _Amounts(spec, self)


class _Amounts(Problem):
    floor = 0.1

    def __init__(self, spec: Spec, task: Amounts) -> None:
        super().__init__(spec, task.steps)
        self.task = task
        fixed = torch.Generator().manual_seed(7)  # one truth for all runs
        self.lean, self.size = (torch.randn(task.features, generator=fixed) / part for part in (4.0, 6.0))
        self.test = torch.randn(4000, task.features, generator=fixed)
        chance, mean = self._truth(self.test)
        self.wanted = (chance * mean).double()

    def _truth(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chance of an amount, and its mean."""
        logit = math.log(CHANCE / (1.0 - CHANCE))
        return torch.sigmoid(logit + x @ self.lean), MEAN * torch.exp(x @ self.size)

    def build(self, generator: torch.Generator) -> nn.Module:
        """A network with fresh weights."""
        return Dense(self.task.features, self.task.hidden, generator)

    def loss(self, net: nn.Module, generator: torch.Generator, step: int) -> Tensor:
        """Mean squared error of a batch."""
        x = torch.randn(self.spec.batch, self.task.features, generator=generator)
        chance, mean = self._truth(x)
        noise = torch.randn(self.spec.batch, generator=generator)
        if self.task.law == "symmetric":
            amounts = chance * mean + MEAN / 2 * noise
        else:
            happens = torch.rand(self.spec.batch, generator=generator) < chance
            amounts = torch.where(happens, mean * torch.exp(SPREAD * noise - SPREAD**2 / 2), 0.0)
        return mse_loss(net(x), amounts)

    def measure(self, net: nn.Module) -> dict[str, Any]:
        """Error of the expected amounts by their size, and the total by the true one."""
        found = net(self.test).double()
        error = (found - self.wanted).square().mean().sqrt() / self.wanted.square().mean().sqrt()
        return {"relative_rmse": float(error), "calibration": float(found.sum() / self.wanted.sum())}
