"""What observed gradients say about clipping: which radius, whether to carry, in words and as one line to paste.

A radius and a carry policy are hard to guess and easy to read off a few hundred gradients: how large they are, where
their mean lies, and what plain clipping would take from it. A front end collects the gradients, or a sample of their
coordinates, and ``advise`` judges them, so that the judgement is the same whatever framework they came from.

The mean is what matters and noise hides it, so that it is estimated from pairs of different steps, whose noise has
nothing to do with each other; an estimate that could as well be 0 is said to be lost rather than given.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from carryclip.carry import Gated
from carryclip.diagnosis import LAST_STEP
from carryclip.regions import Component, Norm, Region

LEAST_STEPS = 20
QUANTILES = (0.5, 0.9, 0.99, 1.0)
NEGLIGIBLE_BIAS = 0.01
LARGE_CARRY = 10.0
CAVEAT = "Numbers cannot tell signal from corruption: if large gradients are bad data, take carry=False."


@dataclass(frozen=True)
class Advice:
    """What observed gradients say about clipping. Printing it gives the words; ``line`` is what to paste.

    Sizes are Euclidean norms of the whole gradient for a ``Norm`` and those of single coordinates otherwise.
    """

    steps: int
    skipped: int
    quantiles: dict[float, float]
    """Of the gradient's size."""
    mean_size: float
    """Size of the mean gradient (of 99 % of the coordinates: at most this); NaN if it is lost in the noise."""
    radius: float | None
    """Radius of the observed region, None if it is not a constant."""
    clipped: float
    """Share of gradients (norm) or of their coordinates that are larger than it."""
    bias: float
    """Plain clipping's bias at that radius, relative to the mean gradient: 0 if none shows, NaN if of unknown size."""
    carry_ratio: float
    """Largest carry, in radii, that the observed rule would have built up in the later half of the steps."""
    suggested_radius: float | None
    suggested_bias: float
    """Plain clipping's bias at the suggested radius, as ``bias``."""
    line: str
    reason: str

    def __str__(self) -> str:
        observed = f"Observed {self.steps} steps"
        observed += f", {self.skipped} more were not finite." if self.skipped else "."
        seen = ", ".join(f"{_share(q)} {value:.3g}" for q, value in self.quantiles.items())
        what, mean = "|gradient| per coordinate", f"at most {self.mean_size:.3g} in 99% of the coordinates"
        if "Norm(" in self.line:
            what, mean = "gradient norm", f"norm {self.mean_size:.3g}"
        mean += "; the carry drains only where the radius is above it"
        if math.isnan(self.mean_size):
            mean = "lost in the noise of these steps"
        lines = [observed, f"  {what}: {seen}", f"  mean gradient: {mean}"]
        reached = f"the carry reached {self.carry_ratio:.3g} radii"
        if self.radius is None:
            lines.append(f"  the observed region clips {self.clipped:.1%} of the coordinates; {reached}")
        else:
            lines.append(
                f"  radius {self.radius:.3g} (observed): clips {self.clipped:.1%}; {_words(self.bias)}; {reached}"
            )
        if self.suggested_radius is not None:
            lines.append(f"  radius {self.suggested_radius:.3g} (suggested): {_words(self.suggested_bias)}")
        return "\n".join([*lines, f"Advice: {self.reason}", f"    {self.line}", CAVEAT])


def advise(
    samples: np.ndarray,
    metrics: np.ndarray,
    skipped: int,
    region: Region,
    step: Any,
    *,
    coordinates: int,
    divides: bool,
) -> Advice:
    """Judge the gradients of some steps.

    Args:
        samples: float64, one row per usable step, one column per remembered coordinate; NaN where a step had no
            gradient.
        metrics: of the same steps, one column for each name in ``LAST_STEP``.
        skipped: how many steps are left out because their gradients were not finite.
        region: what they were observed with, for the whole gradient.
        step: for which a radius that is a schedule is read.
        coordinates: how many the gradient has, of which ``samples`` may hold a part.
        divides: whether the optimizer divides gradients by their own size.

    Raises:
        RuntimeError: there are fewer than ``LEAST_STEPS`` usable steps.
    """
    if len(samples) < LEAST_STEPS:
        raise RuntimeError(
            f"advise() has seen {len(samples)} usable steps and needs at least {LEAST_STEPS}; a few hundred are "
            "better. Train on with the clipper attached, then ask again."
        )
    # A gradient of 0, or a coordinate that never had one, divides by 0 on the way; what comes of it is dealt with.
    with np.errstate(all="ignore"):
        return _judge(samples, metrics, skipped, region, step, coordinates=coordinates, divides=divides)


def _judge(
    samples: np.ndarray,
    metrics: np.ndarray,
    skipped: int,
    region: Region,
    step: Any,
    *,
    coordinates: int,
    divides: bool,
) -> Advice:
    view: _NormView | _CoordinateView = _CoordinateView(samples)
    if isinstance(region, Norm):
        view = _NormView(samples, metrics[:, LAST_STEP.index("grad_norm")], coordinates)
    quantiles = {q: view.size_quantile(q) for q in QUANTILES}
    mean_size = view.mean_size()
    # The carry starts at 0, so that only the later half tells where it goes.
    carry_ratio = float(metrics[len(samples) // 2 :, LAST_STEP.index("carry_ratio")].max())
    radius = suggested = None
    suggested_bias = bias = math.nan
    if isinstance(region, (Norm, Component)):
        constant = region.sizes(step)[0]
        radius = constant if isinstance(constant, float) else None
        usual = view.size_quantile(0.9 if isinstance(region, Norm) else 0.99)
        suggested = _two_digits_up(max(usual, 0.0 if math.isnan(mean_size) else 2 * mean_size))
        suggested_bias = view.bias(suggested)
        choice, reason = _choose_policy(mean_size, suggested, suggested_bias, quantiles[1.0], divides)
        call = f"{type(region).__name__}({suggested:g})"
    else:
        call = repr(region)
        choice, reason = "", "Keep the region; the full carry stays small."
        if carry_ratio > LARGE_CARRY:
            choice, reason = ", carry=Gated()", "Keep the region; the carry grows, so gate it."
    if radius is None:
        clipped = float(metrics[:, LAST_STEP.index("clipped_fraction")].mean())
    else:
        clipped, bias = view.clipped(radius), view.bias(radius)
    return Advice(
        steps=len(samples),
        skipped=skipped,
        quantiles=quantiles,
        mean_size=mean_size,
        radius=radius,
        clipped=clipped,
        bias=bias,
        carry_ratio=carry_ratio,
        suggested_radius=suggested,
        suggested_bias=suggested_bias,
        line=f"clipper = UClip(optimizer, {call}{choice})",
        reason=reason,
    )


def _choose_policy(mean: float, radius: float, bias: float, largest: float, divides: bool) -> tuple[str, str]:
    """(argument to paste, why), for the suggested radius."""
    if bias < NEGLIGIBLE_BIAS:
        return ", carry=False", "At the suggested radius plain clipping has next to no bias, so a carry buys nothing."
    if divides:
        return (
            ", carry=False",
            "This optimizer divides gradients by their own size, so that shorter ones cost it little; a carry helped "
            "it in no trial.",
        )
    if largest > Gated().cap * radius:
        return ", carry=Gated()", f"There are spikes of {largest / radius:.3g} radii; Gated bounds what is paid back."
    # A mean that is lost in the noise (NaN) is not known to be below the radius.
    if not radius > 2.1 * mean:
        return (
            ", carry=Gated()",
            "The mean gradient is not far below the radius; Gated keeps the carry from winding up.",
        )
    return (
        ", carry=Gated()",
        "The radius is well above the mean gradient, so the carry drains and removes the bias; Gated bounds what a "
        "spike can do.",
    )


class _View:
    """Means and biases from the remembered gradients; NaN marks a coordinate that had no gradient in a step.

    <E g, E g> is the mean of <g_s, g_t> over pairs of different steps, so that noise does not count as signal.
    """

    def __init__(self, gradients: np.ndarray) -> None:
        self.gradients = gradients
        self.signal = _squared_mean(gradients)
        """||E g||², or 0 if the mean gradient cannot be told from 0."""

    def cut(self, radius: float) -> np.ndarray:
        """G - clip(g) by plain clipping."""
        raise NotImplementedError

    def bias(self, radius: float) -> float:
        """Norm of E[g - clip(g)] relative to that of E[g]; 0 if none shows; NaN if only E[g] is lost in the noise."""
        lost = _squared_mean(self.cut(radius))
        if lost == 0.0:
            return 0.0
        if self.signal == 0.0:
            return math.nan
        return math.sqrt(lost / self.signal)


class _NormView(_View):
    """Gradient norms are known exactly; directions from the sampled coordinates."""

    def __init__(self, gradients: np.ndarray, norms: np.ndarray, coordinates: int) -> None:
        super().__init__(gradients)
        self.norms = norms
        self.blow_up = coordinates / gradients.shape[1]

    def size_quantile(self, q: float) -> float:
        return float(np.quantile(self.norms, q))

    def mean_size(self) -> float:
        return math.sqrt(self.signal * self.blow_up) if self.signal else math.nan

    def clipped(self, radius: float) -> float:
        return float((self.norms > radius).mean())

    def cut(self, radius: float) -> np.ndarray:
        kept = np.minimum(radius / self.norms, 1.0)
        # 0/0: a gradient of 0 is kept as it is by a radius of 0 too.
        kept[np.isnan(kept)] = 1.0
        return self.gradients * (1.0 - kept)[:, np.newaxis]


class _CoordinateView(_View):
    """Every coordinate by itself."""

    def __init__(self, gradients: np.ndarray) -> None:
        super().__init__(gradients)
        self.sizes = np.sort(np.abs(gradients[~np.isnan(gradients)]))

    def size_quantile(self, q: float) -> float:
        return _from_below(self.sizes, q)

    def mean_size(self) -> float:
        """99 % of the coordinates have a mean below this; the estimate's own noise is taken out."""
        if not self.signal:
            return math.nan
        steps = (~np.isnan(self.gradients)).sum(0)
        # Not nanmean, which warns of coordinates that never had a gradient: their NaN is left out below.
        mean = np.nansum(self.gradients, 0) / steps
        variance = np.nansum(np.square(self.gradients - mean), 0) / np.maximum(steps - 1, 1)
        signal = np.sqrt(np.maximum(np.square(mean) - variance / np.maximum(steps, 1), 0.0))
        return _from_below(np.sort(signal[~np.isnan(signal)]), 0.99)

    def clipped(self, radius: float) -> float:
        return float((self.sizes > radius).mean())

    def cut(self, radius: float) -> np.ndarray:
        return self.gradients - np.clip(self.gradients, -radius, radius)


def _squared_mean(rows: np.ndarray) -> float:
    """Estimate of ||E[row]||² from all pairs of different rows; 0 if within 2.5 standard errors of it."""
    rows = np.nan_to_num(rows, nan=0.0)
    pairs = rows.shape[0] * (rows.shape[0] - 1)
    products = rows @ rows.T
    np.fill_diagonal(products, 0.0)
    estimate, error = products.sum() / pairs, np.sqrt(2.0 * np.square(products).sum() / pairs / pairs)
    return float(estimate) if estimate > 2.5 * error else 0.0


def _from_below(ascending: np.ndarray, q: float) -> float:
    """The entry that a share ``q`` of the others lies below."""
    return float(ascending[min(len(ascending) - 1, int(q * len(ascending)))])


def _two_digits_up(value: float) -> float:
    if not 0.0 < value < math.inf:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


def _share(q: float) -> str:
    return "max" if q == 1 else f"{q:.0%}"


def _words(bias: float) -> str:
    if math.isnan(bias):
        return "plain clipping would be biased"
    if bias == 0.0:
        return "plain clipping shows no bias"
    return f"plain clipping would be off by {bias:.1%} of the mean gradient"
