"""Is the carry worth having? Methods on one trial, each at its best learning rate, against plain clipping.

A seed fixes weights and data, so that methods are compared seed by seed: an effect is the mean of the differences with
Student's 95 % interval, positive where the method is better.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from carryclip_lab.analysis.compare import LEVEL, Effect, interval
from carryclip_lab.analysis.naming import CLIP, Method, region_name
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.spec import OPTIMIZERS
from carryclip_lab.store.records import last
from carryclip_lab.task import Judged

DRAWS = 2000


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
    """One method in one region, at its best learning rate."""

    cell: Cell
    subject: Judged
    times: float
    """Its batch size in those of the smallest: a larger batch is a method of its own."""
    bias: Bias | None

    @property
    def method(self) -> Method:
        """As the cell's setting has it."""
        return self.cell.setting.method

    @property
    def name(self) -> str:
        """In words."""
        return row_name(self.method, self.times)

    @property
    def is_plain(self) -> bool:
        """Whether it is what the others are compared with: plain clipping."""
        return self.method == CLIP and self.times == 1.0

    @property
    def scores(self) -> Mapping[int, float]:
        """By seed; less is better."""
        return self.cell.chosen

    @property
    def seen(self) -> list[float]:
        """The metric of every seed that did not come to nothing."""
        return [self.subject.shown(score) for score in self.scores.values() if math.isfinite(score)]

    @property
    def lost(self) -> int:
        """How many seeds came to nothing."""
        return len(self.scores) - len(self.seen)


def row_name(method: Method, times: float = 1.0) -> str:
    """A method and, if it is larger than the others', its batch."""
    return method.words + (f", batch × {times:g}" if times > 1 else "")


@dataclass(frozen=True, eq=False)
class Block:
    """All methods with one optimizer in one region, and those without: the optimizer alone, radii of their own."""

    region: str
    subject: Judged
    rows: Sequence[Row]
    optimizer: str = "sgd"

    @property
    def label(self) -> str:
        """The region in words."""
        return region_name(self.region).label

    @property
    def stepped_by(self) -> str:
        """The optimizer in words."""
        return OPTIMIZERS[self.optimizer]

    def find(self, method: Method, times: float = 1.0) -> Row | None:
        """A row that has runs."""
        found = (row for row in self.rows if (row.method, row.times) == (method, times) and row.scores)
        return next(found, None)

    def over(self, method: Method, other: Method = CLIP, times: float = 1.0) -> Effect | None:
        """How much better one method is than another; None if one is not there yet."""
        ours, theirs = self.find(method, times), self.find(other)
        return None if ours is None or theirs is None else effect(ours.scores, theirs.scores)

    def drop_in(self, method: Method, times: float = 1.0) -> Effect | None:
        """How much better a method is than plain clipping where plain clipping has its best learning rate."""
        ours, plain = self.find(method, times), self.find(CLIP)
        if ours is None or plain is None or plain.cell.lr not in ours.cell.runs:
            return None
        return effect(ours.cell.epochs_at(plain.cell.lr), plain.scores)


def blocks(summary: Summary) -> list[Block]:
    """One for each optimizer and region of a trial; none where weights stay where they are."""
    subject = summary.subject
    if subject is None or subject.kind == "frozen":
        return []
    found = []
    for region, optimizer in itertools.product(summary.regions, summary.optimizers):
        mine = [cell for cell in summary.cells if cell.setting.optimizer == optimizer]
        if all(cell.setting.region != region for cell in mine):
            continue
        cells = [cell for cell in mine if cell.setting.region in (None, region)]
        least = min(summary.batches)
        rows = [Row(cell, subject, cell.batch / least, _bias(summary, cell, subject)) for cell in cells]
        rows.sort(key=lambda row: (row.method.order, row.name))
        found.append(Block(region, subject, rows, optimizer))
    return found


def effect(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Effect | None:
    """How much smaller our scores are, seed by seed.

    >>> effect({0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 1: 3.1, 2: 3.9}).as_gain
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


def _bias(summary: Summary, cell: Cell, subject: Judged) -> Bias | None:
    if subject.bias is None or cell.lr is None:
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

    method: Method
    radius: float
    """In lengths of the mean gradient."""
    share: Effect
    optimizer: str = "sgd"
    astray: float | None = None
    """What goes astray at right angles to the mean step, as a share of it, if that was measured."""


def stills(summary: Summary) -> list[Still]:
    """Where weights stay where they are: the bias of every method in every region, the smallest radius first."""
    if summary.subject is None or summary.subject.kind != "frozen":
        return []
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
            radius = cell.setting.name.sizes[0] / length
            across = [last(summary.epochs(record.spec.id), "bias_across") for record in cell.records]
            known = [each for each in across if each is not None]
            astray = statistics.fmean(known) if known else None
            found.append(Still(cell.setting.method, radius, share, cell.setting.optimizer, astray))
    places = summary.optimizers
    return sorted(found, key=lambda still: (places.index(still.optimizer), still.radius, still.method.order))
