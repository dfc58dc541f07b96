"""One cell against another: ratio of median epochs and chance of needing fewer, with bootstrap intervals over seeds.

A seed fixes weights and order of the data, so two methods with the same seeds are resampled in pairs. The learning
rate is chosen anew in every resample: the intervals include the luck of tuning. Everything takes infinity: a method
that reaches the target where the other does not has ratio 0, the other way round it is infinite.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from carryclip_lab.analysis.summary import Cell

DRAWS = 1000
LEVEL = 0.95


@dataclass(frozen=True)
class Effect:
    """What one method is against another, with its interval, and how many seeds stand behind it.

    A ratio of epochs (below 1 is faster, NaN if neither reached the target), or a difference (above 0 is better,
    infinite if one came to nothing, NaN if both did).
    """

    value: float
    low: float
    high: float
    seeds: int

    @property
    def as_ratio(self) -> str:
        """In words, if it is a ratio of epochs."""
        if math.isnan(self.value):
            return "neither reached"
        if self.seeds < 2:
            return f"{number(self.value)} (one seed)"
        return f"{number(self.value)} [{number(self.low)}, {number(self.high)}]"

    @property
    def as_gain(self) -> str:
        """In words, if it is a difference."""
        if math.isnan(self.value):
            return "both came to nothing"
        if math.isinf(self.value):
            return "came to nothing" if self.value < 0 else "the other came to nothing"
        if self.seeds < 2:
            return f"{self.value:+.3g}"
        return f"{self.value:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


@dataclass(frozen=True)
class Comparison:
    """A cell against another one of the same optimizer and batch size."""

    cell: Cell
    base: Cell
    effect: Effect
    """Median epochs divided by the other's."""
    fewer: tuple[float, float, float]
    """Chance that a run needs fewer epochs than one of the other's, ties counted half: (value, low, high)."""
    draws: np.ndarray = field(repr=False)

    @property
    def more_missed(self) -> float:
        """Share of seeds that did not reach the target, less the other's."""
        return self.cell.missed / len(self.cell.chosen) - self.base.missed / len(self.base.chosen)


def number(value: float) -> str:
    """A ratio, short."""
    return "∞" if value == math.inf else f"{value:.2f}"


def compare(cell: Cell | None, base: Cell | None) -> Comparison | None:
    """Compare two cells; None if one is not there or has no run that is done."""
    if cell is None or base is None or not cell.chosen or not base.chosen:
        return None
    paired = cell.table[0] == base.table[0]
    draws = _ratio(_medians(cell, 0), _medians(base, 0 if paired else 1))
    both = cell.median == base.median == math.inf
    ratio = math.nan if both else float(_ratio(np.array(cell.median), np.array(base.median)))
    effect = Effect(ratio, *interval(draws), min(len(cell.chosen), len(base.chosen)))
    return Comparison(cell, base, effect, _fewer(cell, base, paired), draws)


def pooled(comparisons: Sequence[Comparison]) -> Effect | None:
    """The median ratio of several cells; the same seeds are drawn in all of them."""
    if not comparisons:
        return None
    ratios = [each.effect.value for each in comparisons if not math.isnan(each.effect.value)]
    known = [each.draws for each in comparisons if not math.isnan(each.effect.value)]
    seeds = min(each.effect.seeds for each in comparisons)
    if not ratios:
        return Effect(math.nan, 0.0, math.inf, seeds)
    return Effect(float(np.median(ratios)), *interval(np.median(known, axis=0)), seeds)


def interval(draws: np.ndarray) -> tuple[float, float]:
    """The middle 95 % of draws, some of which may be infinite (NumPy's quantiles would interpolate those to NaN)."""
    ordered = np.sort(draws)
    cut = round((1 - LEVEL) / 2 * (len(ordered) - 1))
    return float(ordered[cut]), float(ordered[-1 - cut])


@functools.cache
def _indices(seeds: int, stream: int) -> np.ndarray:
    """Which seeds are drawn, (draws, seeds): the same in every figure and on every machine."""
    return np.random.default_rng([seeds, stream]).integers(seeds, size=(DRAWS, seeds))


@functools.lru_cache(maxsize=8192)  # a cell is compared many times
def _medians(cell: Cell, stream: int) -> np.ndarray:
    """The median at the best learning rate of each resample."""
    seeds, epochs = cell.table
    return np.median(epochs[:, _indices(len(seeds), stream)], axis=-1).min(axis=0)


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Quotient; 1 where neither reached."""
    neither = np.isinf(ours) & np.isinf(theirs)
    return np.divide(ours, theirs, where=~neither, out=np.ones_like(ours))


def _fewer(cell: Cell, base: Cell, paired: bool) -> tuple[float, float, float]:
    ours, theirs = (np.array([each.chosen[seed] for seed in sorted(each.chosen)]) for each in (cell, base))
    wins = (ours[:, None] < theirs) + 0.5 * (ours[:, None] == theirs)
    left, right = _weights(len(ours), 0), _weights(len(theirs), 0 if paired else 1)
    return (float(wins.mean()), *interval(((left @ wins) * right).sum(axis=1)))


@functools.cache
def _weights(seeds: int, stream: int) -> np.ndarray:
    """How often each seed is drawn, as a share: (draws, seeds)."""
    return (_indices(seeds, stream)[:, :, None] == np.arange(seeds)).mean(axis=1)
