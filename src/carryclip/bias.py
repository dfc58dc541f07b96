"""What plain clipping would have done to observed gradients: how much it cuts, and what that takes from their mean.

The mean is what matters and noise hides it, so that means are estimated from pairs of different steps, whose noise has
nothing to do with each other; an estimate that could as well be 0 counts as 0.

Clipping shortens the mean gradient c = E[clip(g)] and may turn it away from m = E[g]. Being shorter is a smaller
learning rate, and nothing at all to an optimizer that divides gradients by their size, so that both are measured: the
plain bias |m - c| and what is left of it after the best scale, min over a of |m - a·c|. Gradients shrink and grow as
training goes on; the scale may follow, as a learning rate would: m is first given the factor that clipping usually has
in the same stretch of steps.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from carryclip.reference import UClip
from carryclip.regions import Component, Norm, Region

BLOCK = 25
"""Steps over which gradients are taken to be of one kind."""
SURE = 2.5
"""Standard errors above 0 from which an estimate counts."""
ROUNDING = 1e-12
"""What is left of a squared mean by rounding alone, where it should be 0."""


@dataclass(frozen=True)
class Effect:
    """What plain clipping by one region does to the observed gradients.

    A bias is relative to the mean gradient: 0 if none shows, NaN if one shows but the mean gradient is lost in noise.
    """

    radius: float | None
    """None if it is not one number."""
    clipped: float
    """Share of gradients (``Norm``) or of their coordinates that are cut."""
    shrink: float
    """The usual factor: mean of |clip(g)|/|g| over steps, or over coordinates too."""
    bias: float
    """|m - c|/|m|."""
    scaled_bias: float
    """After the best scale: min over a of |m - a·c|/|m|; a common a, or one of each coordinate if the optimizer has."""
    floor: float
    """The smallest ``scaled_bias`` that would have shown; NaN where the mean gradient is lost in the noise."""
    unseen: float
    """The smallest |f·m - a·c| that would have shown, relative to the root mean square of f·|g|."""
    reach: float
    """Size of f·m: the mean that updates must have to be free of bias, so that the radius must be above it."""
    delay: float
    """Steps that a gradient would wait if all that is cut were carried (``carry=True``): (1 + (RMS/radius)²)/2."""


class Mean(NamedTuple):
    """Squared norm of a mean, estimated from pairs, and the estimate's standard error were the mean 0."""

    square: float
    error: float

    @property
    def found(self) -> bool:
        """Whether the mean can be told from 0."""
        return self.square > SURE * self.error

    def over(self, whole: "Mean") -> float:
        """The norm relative to that of ``whole``; 0 if it cannot be told from 0, NaN if only the other cannot."""
        if not self.found or self.square <= ROUNDING * abs(whole.square):
            return 0.0
        if not whole.found:
            return math.nan
        return math.sqrt(self.square / whole.square)


class Tail(NamedTuple):
    """How much larger than usual gradients get."""

    ratio: float
    """99 % quantile over median."""
    largest: float
    """The largest over the median."""
    heavy: bool
    """Whether some gradients are far larger than most."""
    steps: int
    """How many steps had a gradient, or a coordinate of it, that was."""


class View:
    """Observed gradients as one kind of region sees them.

    Rows, one for each step, are arrays of a form that each view chooses; NaN marks a coordinate that had no gradient.
    """

    unit: str
    """What there is a share of."""
    heavy: float
    """From which ratio of the 99 % quantile to the median on a tail is heavy."""
    heavy_largest: float
    """From which ratio of the largest to the median on it is heavy too, as for events rarer than one in a hundred."""
    usual_quantile: float
    """Share of sizes that a radius should leave alone."""

    def __init__(self, gradients: np.ndarray, whole: np.ndarray, sizes: np.ndarray) -> None:
        self.gradients = gradients
        self.whole = whole
        """The gradients as rows."""
        self.sizes = sizes
        """Euclidean norms of whole gradients, or the size of each coordinate."""
        count = max(1, len(sizes) // BLOCK)
        self.blocks = np.array_split(np.arange(len(sizes)), count)
        self.mean = self.squared_mean(whole)

    def inner(self, x: np.ndarray, y: np.ndarray) -> float:
        """Mean of <x_s, y_t> over pairs of different steps."""
        raise NotImplementedError

    def squared_mean(self, rows: np.ndarray) -> Mean:
        """||E[row]||² and how sure it is."""
        raise NotImplementedError

    def mean_size(self, rows: np.ndarray) -> float:
        """How large the mean row is, by the measure of the radius; NaN if it is lost in the noise."""
        raise NotImplementedError

    def usual_size(self, rows: np.ndarray) -> float:
        """Root mean square of a row's Euclidean norm."""
        raise NotImplementedError

    def clip(self, radius: float) -> Effect:
        """What plain clipping to ``radius`` does."""
        raise NotImplementedError

    def size_quantile(self, q: float) -> float:
        """A quantile of the gradient's size."""
        return _quantile(self.sizes, q)

    def tail(self) -> Tail:
        """How much larger than usual gradients are, each relative to the median of its own block.

        Within blocks, because gradients that shrink as training goes on are no tail; for each coordinate by itself,
        because neither are layers whose gradients are larger than others'.
        """
        blocks = [self.sizes[block] / _column_medians(self.sizes[block]) for block in self.blocks]
        relative = np.concatenate(blocks)
        ratio, largest = _quantile(relative, 0.99), _quantile(relative, 1.0)
        far = (relative >= self.heavy).reshape(len(relative), -1).any(axis=1)
        return Tail(ratio, largest, ratio >= self.heavy or largest >= self.heavy_largest, int(far.sum()))

    def effect(self, clipped: np.ndarray, usual: np.ndarray, radius: float | None, share: float) -> Effect:
        """What a clipping does that turns ``whole`` into ``clipped`` and has the usual factor ``usual``."""
        aim = usual * self.whole
        goal = self.squared_mean(aim)
        turned = self.squared_mean(aim - self.best_scale(aim, goal, clipped) * clipped)
        least = math.sqrt(SURE * turned.error)
        size = self.usual_size(aim)
        floor = delay = math.nan
        if goal.found:
            floor = least / math.sqrt(goal.square)
        if radius is not None:
            present = self.sizes[~np.isnan(self.sizes)]
            delay = max(1.0, (1.0 + float(np.mean(np.square(present / radius)))) / 2.0)
        bias = self.squared_mean(self.whole - clipped).over(self.mean)
        return Effect(
            radius=radius,
            clipped=share,
            shrink=float(np.mean(usual)),
            bias=bias,
            scaled_bias=_at_most(turned.over(goal), bias),
            floor=floor,
            unseen=least / size if size > 0.0 else 0.0,
            reach=self.mean_size(aim),
            delay=delay,
        )

    def best_scale(self, aim: np.ndarray, goal: Mean, clipped: np.ndarray) -> float:
        """The a for which a·E[clipped] comes nearest to E[aim]."""
        left, inner = self.squared_mean(clipped), self.inner(aim, clipped)
        if goal.found and left.found:
            return max(0.0, inner / left.square)
        # The ratio of two numbers that may be 0 could be anything and explain everything away. So stay between the
        # scale that the factor makes already and that by which the sizes differ.
        sizes = math.sqrt(np.nansum(np.square(aim)) / max(np.nansum(np.square(clipped)), 1e-300))
        least, most = 0.9 * min(1.0, sizes), 2.0 * max(1.0, sizes)
        scales = [least, most]
        if left.square > 0.0:
            scales.append(min(max(inner / left.square, least), most))
        return min(scales, key=lambda a: a * a * left.square - 2.0 * a * inner)


class NormView(View):
    """One size for each step. A row is a multiple of that step's gradient, and is kept as the factor alone."""

    unit, heavy, heavy_largest, usual_quantile = "steps", 4.0, 12.0, 0.9

    def __init__(self, gradients: np.ndarray, norms: np.ndarray, coordinates: int) -> None:
        rows = np.nan_to_num(gradients, nan=0.0)
        self.products = rows @ rows.T
        self.squares = self.products.diagonal().copy()
        np.fill_diagonal(self.products, 0.0)
        self.pairs = len(rows) * (len(rows) - 1)
        self.sample = gradients.shape[1] / coordinates
        super().__init__(gradients, np.ones(len(rows)), norms)

    def inner(self, x: np.ndarray, y: np.ndarray) -> float:
        """Mean of <x_s, y_t> over pairs of different steps."""
        return float(x @ self.products @ y) / self.pairs

    def squared_mean(self, rows: np.ndarray) -> Mean:
        """||E[row]||² and how sure it is."""
        products = self.products * np.outer(rows, rows)
        return _from_products(products.sum(), products, self.pairs)

    def mean_size(self, rows: np.ndarray) -> float:
        """Its Euclidean norm; NaN if it is lost in the noise."""
        mean = self.squared_mean(rows)
        return math.sqrt(mean.square / self.sample) if mean.found else math.nan

    def usual_size(self, rows: np.ndarray) -> float:
        """Root mean square of a row's Euclidean norm."""
        return math.sqrt(np.mean(np.square(rows) * self.squares))

    def clip(self, radius: float | np.ndarray) -> Effect:
        """What clipping to ``radius``, one number or one for each step, does."""
        kept = np.minimum(radius / self.sizes, 1.0)
        kept[np.isnan(kept)] = 1.0  # 0/0: a gradient of 0 stays as it is, also by a radius of 0
        usual = np.concatenate([np.full(len(block), kept[block].mean()) for block in self.blocks])
        number = None if isinstance(radius, np.ndarray) else radius
        return self.effect(kept, usual, number, float((kept < 1.0).mean()))


class CoordinateView(View):
    """Every coordinate by itself. A row has an entry for each.

    Args:
        gradients: one row per step, one column per coordinate.
        rescaled: whether the optimizer makes up for a factor of each coordinate, rather than for a common one alone.
    """

    # The coordinates of normal noise have a ratio of 3.8, the norms of long vectors hardly more than 1. Of millions of
    # coordinates the largest says nothing.
    unit, heavy, heavy_largest, usual_quantile = "coordinates", 8.0, math.inf, 0.99

    def __init__(self, gradients: np.ndarray, *, rescaled: bool) -> None:
        self.rescaled = rescaled
        super().__init__(gradients, np.nan_to_num(gradients, nan=0.0), np.abs(gradients))

    def inner(self, x: np.ndarray, y: np.ndarray) -> float:
        """Mean of <x_s, y_t> over pairs of different steps."""
        different = x.sum(0) @ y.sum(0) - np.sum(x * y)
        return float(different) / (len(x) * (len(x) - 1))

    def squared_mean(self, rows: np.ndarray) -> Mean:
        """||E[row]||² and how sure it is."""
        # Single precision does for the error, and takes half the time of what takes the longest here.
        unit = max(float(np.abs(rows).max(initial=0.0)), 1e-300)
        narrow = (rows / unit).astype(np.float32)
        products = narrow @ narrow.T
        np.fill_diagonal(products, 0.0)
        pairs = len(rows) * (len(rows) - 1)
        error = _from_products(0.0, products, pairs).error * unit**2
        return Mean(self.inner(rows, rows), error)

    def mean_size(self, rows: np.ndarray) -> float:
        """99 % of the coordinates have a mean below this; the estimate's own noise is taken out."""
        if not self.squared_mean(rows).found:
            return math.nan
        absent = np.isnan(self.gradients)
        steps = np.maximum((~absent).sum(0), 1)
        mean = rows.sum(0) / steps
        deviation = np.where(absent, 0.0, rows - mean)
        variance = np.square(deviation).sum(0) / np.maximum(steps - 1, 1)
        signal = np.sqrt(np.maximum(np.square(mean) - variance / steps, 0.0))
        return _quantile(signal[~absent.all(0)], 0.99)

    def usual_size(self, rows: np.ndarray) -> float:
        """Root mean square of a row's Euclidean norm."""
        return math.sqrt(np.sum(np.square(rows)) / len(rows))

    def clip(self, radius: float) -> Effect:
        """What clipping each coordinate to ±radius does."""
        return self.replace(np.clip(self.whole, -radius, radius), radius)

    def replace(self, clipped: np.ndarray, radius: float | None) -> Effect:
        """What putting ``clipped`` in the place of the gradients does."""
        kept = np.clip(clipped / self.whole, 0.0, 1.0)  # NaN where a coordinate is 0: it has no factor
        kept[clipped == self.whole] = 1.0
        usual = np.concatenate([self._usual(kept[block]) for block in self.blocks])
        present = ~np.isnan(self.gradients)
        share = float((clipped != self.whole)[present].mean())
        return self.effect(clipped, usual, radius, share)

    def _usual(self, kept: np.ndarray) -> np.ndarray:
        """The mean factor of a block, of each coordinate where the optimizer rescales each."""
        axis = 0 if self.rescaled else None
        counts = (~np.isnan(kept)).sum(axis)
        # Not nanmean, which warns of coordinates that were never anything but 0.
        factor = np.where(counts > 0, np.nansum(kept, axis) / np.maximum(counts, 1), 1.0)
        return np.broadcast_to(factor, kept.shape)


def view_of(region: Region, gradients: np.ndarray, norms: np.ndarray, coordinates: int, *, rescaled: bool) -> View:
    """The observed gradients as ``region`` sees them."""
    if isinstance(region, Norm):
        return NormView(gradients, norms, coordinates)
    return CoordinateView(gradients, rescaled=rescaled)


def observed_effect(view: View, region: Region, number: float | None, radii: np.ndarray) -> Effect:
    """What ``region`` would have done; ``number`` is its radius if that is one, ``radii`` a norm's at each step."""
    if isinstance(view, NormView):
        return view.clip(radii if number is None else number)
    assert isinstance(view, CoordinateView)
    if isinstance(region, Component) and number is not None:
        return view.clip(number)
    judge = UClip(region, carry=False)
    clipped = [judge.step([row])[0] for row in view.whole]
    return view.replace(np.array(clipped), number)


def _at_most(scaled: float, bias: float) -> float:
    """What is left after the best scale, which no scale at all (a = 1, or a = 0) bounds by ``bias`` and by 1.

    Its estimate may exceed both: each figure has noise of its own, and the best scale is held within limits where the
    means are lost in the noise. A bias of 0 is one that does not show, and bounds nothing.
    """
    if not scaled > 0.0:  # nothing shows, or of unknown size
        return scaled
    limit = bias if bias > 0.0 else 1.0
    return min(scaled, limit, 1.0)


def _from_products(total: float, products: np.ndarray, pairs: int) -> Mean:
    error = math.sqrt(2.0 * float(np.square(products).sum(dtype=np.float64))) / pairs
    return Mean(float(total) / pairs, error)


def _column_medians(sizes: np.ndarray) -> np.ndarray:
    """The median of each column's entries that are not 0; 1 where there are none."""
    ascending = np.sort(np.where(sizes > 0.0, sizes, np.nan), axis=0)  # NaN goes last
    counts = np.asarray((~np.isnan(ascending)).sum(0))
    middle = np.expand_dims(np.maximum(counts - 1, 0) // 2, 0)
    medians = np.take_along_axis(ascending, middle, axis=0)[0]
    return np.where(counts > 0, medians, 1.0)


def _quantile(values: np.ndarray, q: float) -> float:
    """The entry that a share ``q`` of the others lies below; NaN is left out."""
    present = values[~np.isnan(values)]
    place = min(len(present) - 1, int(q * len(present)))
    return float(np.partition(present, place)[place])
