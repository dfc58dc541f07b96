"""Real numbers about real people, from data that come with a dependency: visits to the doctor, and diabetes."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import huber_loss, mse_loss, poisson_nll_loss

from carryclip_lab.checks import check_choice, check_whole
from carryclip_lab.problem import Problem
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Kind, Place, Task
from carryclip_lab.tasks._network import Dense

BLOCKS = 100
"""A person's years stand side by side, so that blocks of records are held out, every fifth of so many."""
TITLES: dict[tuple[str, bool], tuple[str, str, Kind]] = {
    ("visits", False): ("Visits to the doctor", "RAND health insurance, 20,190 records", "signal"),
    ("visits", True): ("Made-up visits", "the same people, visits by a line with normal noise", "ordinary"),
    ("diabetes", False): ("Diabetes", "442 patients", "ordinary"),
    ("diabetes", True): ("Made-up diabetes", "the same patients, a line with normal noise", "ordinary"),
}


@dataclass(frozen=True, kw_only=True)
class People(Task):
    """What is expected of a person, by squared error; the learning rate falls by a cosine to a tenth.

    Args:
        source: ``"visits"`` (statsmodels' ``randhie``) or ``"diabetes"`` (scikit-learn's).
        made: replace what was seen by a line through it with normal noise of the same size.
        loss: ``"squared"``, or what one might take instead: ``"Huber"`` or ``"Poisson"``.
        hidden: units of the network.
        steps: of an epoch.
    """

    weights = (1e-6, 8e-4)

    source: str = "visits"
    made: bool = False
    loss: str = "squared"
    hidden: int = 16
    steps: int = 200

    def __post_init__(self) -> None:
        check_choice("source", self.source, ("visits", "diabetes"))
        check_choice("loss", self.loss, ("squared", "Huber", "Poisson"))
        check_whole(self, hidden=1, steps=1)
        if not isinstance(self.made, bool):
            raise ValueError(f"made must be true or false, got {self.made!r}.")

    def judged(self) -> Judged:
        """By the total that is predicted for people who were held out; where all is symmetric, by the error."""
        title, setting, kind = TITLES[self.source, self.made]
        metric, words, little = "relative_rmse", "error for those held out (RMSE, in deviations)", 0.01
        if self.source == "visits":
            metric, words, little = "total_error", "error of the total of those held out (share)", 0.02
        return Judged(
            title,
            setting,
            metric,
            words,
            higher=False,
            little=little,
            kind=kind,
            bias="calibration",
            unbiased=1.0,
            also=(("calibration", "predicted total, by the true one"), ("relative_rmse", "RMSE, in deviations")),
        )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """The records are in memory."""
        return _People(spec, self)


@functools.lru_cache(maxsize=4)
def _records(source: str, made: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standardised features and targets, for training and held out."""
    if source == "visits":
        from statsmodels.datasets import randhie

        read: Any = randhie.load_pandas()
        table = read.data.to_numpy(dtype=float)
        target, features = table[:, 0], table[:, 1:]
    else:
        from sklearn.datasets import load_diabetes

        found: Any = load_diabetes()
        features, target = found.data, found.target / found.target.std()
    held = np.arange(len(target)) * BLOCKS // len(target) % 5 == 4
    features = (features - features[~held].mean(0)) / features[~held].std(0)
    if made:
        target = _made(features, target)
    x, y = torch.tensor(features, dtype=torch.float32), torch.tensor(target, dtype=torch.float32)
    there = torch.from_numpy(held)
    return x[~there], y[~there], x[there], y[there]


def _made(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The least-squares line, with normal noise of the size of what it leaves."""
    inputs = np.column_stack([np.ones(len(features)), features])
    line = inputs @ np.linalg.lstsq(inputs, target, rcond=None)[0]
    return line + (target - line).std() * np.random.default_rng(0).standard_normal(len(line))


class _People(Problem):
    floor = 0.1

    def __init__(self, spec: Spec, task: People) -> None:
        super().__init__(spec, task.steps)
        self.task = task
        self.x, self.y, self.test_x, self.test_y = _records(task.source, task.made)

    def build(self, generator: torch.Generator) -> nn.Module:
        """A network with fresh weights."""
        return Dense(self.x.shape[1], self.task.hidden, generator)

    def loss(self, net: nn.Module, generator: torch.Generator, step: int) -> Tensor:
        """Of a batch drawn at random."""
        chosen = torch.randint(len(self.y), (self.spec.batch,), generator=generator)
        found, seen = net(self.x[chosen]), self.y[chosen]
        if self.task.loss == "Huber":
            return huber_loss(found, seen)
        if self.task.loss == "Poisson":  # of the logarithm, as is usual
            return poisson_nll_loss(found, seen)
        return mse_loss(found, seen)

    def measure(self, net: nn.Module) -> dict[str, Any]:
        """Of those held out: the total by the true one, and the error by the deviation of what was seen."""
        found = net(self.test_x).double()
        if self.task.loss == "Poisson":
            found = found.exp()
        seen = self.test_y.double()
        calibration = float(found.sum() / seen.sum())
        error = (found - seen).square().mean().sqrt() / seen.std()
        return {"total_error": abs(calibration - 1.0), "calibration": calibration, "relative_rmse": float(error)}
