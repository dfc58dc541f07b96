"""Is the carry worth having? Methods on one trial, each at its best learning rate, against plain clipping.

A seed fixes weights and data, so that methods are compared seed by seed: an effect is the mean of the differences with
Student's 95 % interval, positive where the method is better.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from carryclip_lab.analysis.compare import LEVEL, interval
from carryclip_lab.analysis.naming import method_order, region_name
from carryclip_lab.analysis.subjects import Subject, last
from carryclip_lab.analysis.summary import Cell, Summary

DRAWS = 2000
PLAIN, FULL, GATED = "clip", "U-Clip", "U-Clip, Gated"


@dataclass(frozen=True)
class Effect:
    """How much better, with its interval; infinite where one of the two came to nothing."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "both came to nothing"
        if math.isinf(self.mean):
            return "came to nothing" if self.mean < 0 else "the other came to nothing"
        if self.seeds < 2:
            return f"{self.mean:+.3g}"
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


@dataclass(frozen=True)
class Bias:
    """How far the mean over seeds is from where it should be, noise taken out, with its interval."""

    size: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.size:.2g} [{self.low:.2g}, {self.high:.2g}]"


@dataclass(frozen=True, eq=False)
class Row:
    """One method in one region."""

    cell: Cell
    name: str
    scores: Mapping[int, float]
    """By seed, at the best learning rate; less is better."""
    bias: Bias | None

    @property
    def method(self) -> str:
        """As the cell's setting has it."""
        return self.cell.setting.method


@dataclass(frozen=True, eq=False)
class Block:
    """All methods in one region, and those that have none: the optimizer alone, radii of their own."""

    region: str
    rows: Sequence[Row]

    @property
    def label(self) -> str:
        """The region in words."""
        return region_name(self.region).label

    def find(self, name: str) -> Row | None:
        """A row by its name."""
        return next((row for row in self.rows if row.name == name and row.scores), None)

    def over(self, name: str, other: str = PLAIN) -> Effect | None:
        """How much better one method is than another; None if one is not there yet."""
        ours, theirs = self.find(name), self.find(other)
        return None if ours is None or theirs is None else effect(ours.scores, theirs.scores)


def blocks(summary: Summary) -> list[Block]:
    """One for each region of a trial."""
    found = []
    for region in summary.regions:
        cells = [cell for cell in summary.cells if cell.setting.region in (None, region)]
        rows = [_row(summary, cell, min(summary.batches)) for cell in cells]
        found.append(Block(region, sorted(rows, key=lambda row: (method_order(row.method), row.name))))
    return found


def _row(summary: Summary, cell: Cell, batch: int) -> Row:
    larger = f", batch × {cell.batch / batch:g}" if cell.batch > batch else ""
    name = (cell.setting.method if cell.setting.method != "none" else "no clipping") + larger
    return Row(cell, name, cell.chosen, _bias(summary, cell))


def effect(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Effect | None:
    """How much smaller our scores are, seed by seed.

    >>> str(effect({0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 1: 3.1, 2: 3.9}))
    '+1 [+0.752, +1.25]'
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    lost = [[math.isinf(side[seed]) for seed in seeds] for side in (ours, theirs)]
    if any(lost[0]) or any(lost[1]):
        both = math.nan if any(lost[0]) and any(lost[1]) else -math.inf if any(lost[0]) else math.inf
        return Effect(both, both, both, len(seeds))
    differences = np.array([theirs[seed] - ours[seed] for seed in seeds])
    mean = float(differences.mean())
    if len(seeds) < 2:
        return Effect(mean, -math.inf, math.inf, 1)
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, len(seeds) - 1) * differences.std(ddof=1) / math.sqrt(len(seeds)))
    return Effect(mean, mean - half, mean + half, len(seeds))


def _bias(summary: Summary, cell: Cell) -> Bias | None:
    subject: Subject | None = summary.subject
    if subject is None or subject.bias is None or cell.lr is None:
        return None
    ends = [last(summary.epochs(record.spec.id), subject.bias) for record in cell.runs[cell.lr].values()]
    known = [np.atleast_1d(np.asarray(end, dtype=float)) - subject.unbiased for end in ends if end is not None]
    return bias(np.array(known)) if len(known) == len(ends) > 2 else None


def bias(errors: np.ndarray) -> Bias:
    """Length of the mean of (seeds, dimensions), its own noise taken out, with a bootstrap interval over seeds."""
    seeds = len(errors)
    noise = float(errors.var(axis=0, ddof=1).sum()) / seeds
    size = float((errors.mean(axis=0) ** 2).sum()) - noise
    drawn = np.random.default_rng(seeds).integers(seeds, size=(DRAWS, seeds))
    # A resample's mean has the noise of the sample and as much again of its own.
    sizes = (errors[drawn].mean(axis=1) ** 2).sum(axis=1) - 2 * noise
    low, high = interval(np.sqrt(np.maximum(sizes, 0.0)))
    return Bias(math.sqrt(max(size, 0.0)), low, high)


@dataclass(frozen=True)
class Still:
    """A method's bias at weights that do not move: as a share of the mean gradient, with its interval over seeds."""

    method: str
    region: str
    radius: float
    """In lengths of the mean gradient."""
    share: Effect


def stills(summary: Summary) -> list[Still]:
    """Where weights stay where they are: the bias of every method in every region, the smallest radius first."""
    found = []
    for cell in summary.cells:
        if cell.setting.region is None or not cell.setting.name.sizes:
            continue
        length = cell.records[0].spec.recipe.start
        shares = {}
        for record in cell.records:
            seen = [epoch.metrics["bias_along"] for epoch in summary.epochs(record.spec.id) if epoch.metrics]
            if seen and record.state == "done":
                shares[record.spec.seed] = -statistics.fmean(seen) / length  # less than nothing is what is missing
        share = effect(shares, dict.fromkeys(shares, 0.0))
        if share is not None:
            found.append(Still(cell.setting.method, cell.setting.region, cell.setting.name.sizes[0] / length, share))
    return sorted(found, key=lambda still: (still.radius, method_order(still.method)))
