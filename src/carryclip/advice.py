"""What observed gradients say about clipping: the figures, what to do, and one line to paste.

A region and a carry are hard to guess and easy to judge by a few hundred gradients. A front end collects them, or a
sample of their coordinates; ``carryclip.bias`` says what clipping would have done to them, ``carryclip.judgement``
whether that is right, and this module puts it into words, so that the advice is the same whatever framework they came
from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from carryclip.bias import BLOCK, Effect, Tail, observed_effect, view_of
from carryclip.diagnosis import AT_A_CONSTANT, LAST_STEP, clipped_before, near
from carryclip.judgement import UNKNOWN, Case, Judgement, Traits, Verdict, cut, judge, times
from carryclip.regions import Component, Norm, Region

LEAST_STEPS = 20
QUANTILES = (0.5, 0.9, 0.99, 1.0)
LONG_DELAY = 2.0
CAVEAT = "Numbers cannot tell signal from corruption: if large gradients are bad data, take carry=False instead."
NO_CLIPPING = "# remove the clipping"
ASK_AGAIN = "# take the other clipping out, watch anew, then ask again"
LIMITED = 0.02
"""Share of steps whose norm must be the largest one, to be taken for clipped by somebody else."""
OTHER_WAY = 0.05
"""How far gradients of the same norm must be apart, relative to the largest entry, not to be the same gradient."""


@dataclass(frozen=True)
class Advice:
    """What observed gradients say about clipping. Printing it gives the words; ``line`` is what to paste.

    Sizes are Euclidean norms of the whole gradient for a ``Norm`` and those of single coordinates otherwise.
    """

    verdict: Verdict
    """What to do with the observed region: keep it, take a larger radius, or train without clipping. "unknown" where
    the steps were too few to tell, or somebody has clipped the gradients before they were seen."""
    carry: bool
    """Whether to have the carry; if not, plain clipping does as well or better. True where the steps were too few to
    tell."""
    enough: int | None
    """About how many steps would tell, where those seen were too few; None otherwise."""
    line: str
    reason: str
    steps: int
    skipped: int
    optimizer: Traits
    unit: str
    """What ``clipped`` is a share of: steps or coordinates."""
    quantiles: dict[float, float]
    """Of the gradient's size."""
    tail: Tail
    """How much larger than usual gradients get."""
    mean_size: float
    """Size of the mean gradient (of 99 % of the coordinates: at most this); NaN if it is lost in the noise."""
    observed: Effect
    suggested: Effect | None
    """What the suggested radius would do, if another one is suggested."""

    def __str__(self) -> str:
        if self.verdict == "unknown" and self.enough is None:  # all other figures are of what somebody has clipped
            return "\n".join([self._heading(), self._sizes(), f"Advice: {self.reason}", f"    {self.line}"])
        lines = [self._heading(), *self._gradients(), _figures("observed", self.observed, self.unit)]
        if self.suggested is not None:
            lines.append(_figures("suggested", self.suggested, self.unit))
        lines += self._biases()
        lines.append(f"Advice: {self.reason}")
        if self.carry:
            lines.append(CAVEAT)
        return "\n".join([*lines, f"    {self.line}"])

    def _heading(self) -> str:
        skipped = ""
        if self.skipped:
            skipped = f", {self.skipped} more were not finite"
        whose = ""
        if self.optimizer.divides is not None:
            whose = f" of {self.optimizer}"
        return f"Observed {self.steps} steps{whose}{skipped}."

    def _sizes(self) -> str:
        seen = ", ".join(f"{_share(q)} {value:.3g}" for q, value in self.quantiles.items())
        return f"  {'|gradient| per coordinate' if self.unit == 'coordinates' else 'gradient norm'}: {seen}"

    def _gradients(self) -> list[str]:
        mean = f"norm {self.mean_size:.3g}"
        if self.unit == "coordinates":
            mean = f"at most {self.mean_size:.3g} in 99% of the coordinates"
        if math.isnan(self.mean_size):
            mean = "lost in the noise of these steps"
        weight = "light, no gradient stands out"
        if self.tail.heavy:
            weight = "heavy, some gradients are far larger than most"
        return [
            self._sizes(),
            f"  tail: 99% quantile over median, {BLOCK} steps at a time: {times(self.tail.ratio)}; {weight}",
            f"  mean gradient: {mean}",
        ]

    def _biases(self) -> list[str]:
        lines = []
        if self.observed.clipped > 0.0:
            lines.append(f"  {_what_matters(self.optimizer)}")
        feels_delay = self.optimizer.divides is not False or self.optimizer.momentum > 0.0
        if feels_delay and self.observed.delay >= LONG_DELAY:
            lines.append(
                f"  carry=True is not for {self.optimizer} here: by rule of thumb a gradient would wait "
                f"{times(self.observed.delay)} steps."
            )
        return lines


def advise(
    samples: np.ndarray,
    metrics: np.ndarray,
    skipped: int,
    region: Region,
    step: Any,
    *,
    coordinates: int,
    optimizer: Traits = UNKNOWN,
    stock: Mapping[type[Region], str] | None = None,
) -> Advice:
    """Judge the gradients of some steps.

    Args:
        samples: float64, one row per usable step, one column per remembered coordinate; NaN where a step had no
            gradient.
        metrics: of the same steps, one column for each name in ``LAST_STEP``.
        skipped: how many steps are left out because their gradients were not finite.
        region: what they were observed with, for the whole gradient.
        step: for which the radius of a ``Component`` that is a schedule is read.
        coordinates: how many the gradient has, of which ``samples`` may hold a part.
        optimizer: what will be given the updates.
        stock: for kinds of region, the framework's own call that clips as ``carry=False`` does, with ``{radius}``.

    Raises:
        RuntimeError: there are fewer than ``LEAST_STEPS`` usable steps.
    """
    if len(samples) < LEAST_STEPS:
        remedy = "Train on with the watcher attached, then ask again."
        if len(samples) + skipped == 0:
            remedy = "Is the watcher attached to the optimizer that steps?"
        raise RuntimeError(
            f"advise() has seen {len(samples)} usable steps and needs at least {LEAST_STEPS}; a few hundred are "
            f"better. {remedy}"
        )
    norms, radii = (metrics[:, LAST_STEP.index(name)] for name in ("grad_norm", "radius_norm"))
    # A gradient of 0, or a coordinate that never had one, divides by 0 on the way; what comes of it is dealt with.
    with np.errstate(all="ignore"):
        view = view_of(region, samples, norms, coordinates, rescaled=bool(optimizer.divides))
        case = Case(
            region=region,
            view=view,
            tail=view.tail(),
            mean_size=view.mean_size(view.whole),
            optimizer=optimizer,
            observed=observed_effect(view, region, _number(region, step), radii),
            stock=stock or {},
        )
        limit = _limit(samples, norms)
        judgement = (
            judge(case) if limit is None else Judgement("unknown", None, False, _why_unknown(*limit, len(norms)))
        )
        quantiles = {q: view.size_quantile(q) for q in QUANTILES}
    return Advice(
        verdict=judgement.verdict,
        carry=judgement.carry,
        enough=judgement.enough,
        line=_line(case, judgement),
        reason=judgement.reason,
        steps=len(samples),
        skipped=skipped,
        optimizer=optimizer,
        unit=view.unit,
        quantiles=quantiles,
        tail=case.tail,
        mean_size=case.mean_size,
        observed=case.observed,
        suggested=judgement.suggested,
    )


def _limit(samples: np.ndarray, norms: np.ndarray) -> tuple[float, int] | None:
    """The norm to which somebody has clipped what was seen, and in how many steps; None if nothing shows that.

    Many norms are the largest one but for rounding, and they are not of one and the same gradient: those point
    elsewhere, or the number is a round one.
    """
    top = float(norms.max())
    if not top > 0.0:
        return None
    here = np.array([near(float(norm), top) for norm in norms])
    count = int(here.sum())
    if count < max(AT_A_CONSTANT, LIMITED * len(norms)) or len(set(norms[here].tolist())) == 1:
        return None
    rows = np.nan_to_num(samples[here], nan=0.0)
    largest = float(np.abs(rows).max(initial=0.0))
    if bool(np.any(np.abs(rows - rows[0]) > OTHER_WAY * largest)):
        return top, count
    limit = clipped_before(norms.tolist(), None)
    return None if limit is None else (limit, count)


def _why_unknown(limit: float, count: int, steps: int) -> str:
    return (
        f"None yet. The largest norms are all exactly {limit:.5g} ({count} of {steps} steps): something clips the "
        "gradients before they are seen here (clip_grad_norm_, max_grad_norm, gradient_clip_val), and these figures "
        "are of what that leaves. Take it out while you watch, with a new watcher, then ask again."
    )


def _number(region: Region, step: Any) -> float | None:
    """The radius if it is one number for all steps, or, for a ``Component``, what its schedule says for ``step``."""
    if not isinstance(region, (Norm, Component)):
        return None
    if isinstance(region.radius, Real):
        return float(region.radius)
    if isinstance(region, Component):
        now = region.sizes(step)[0]
        return float(now) if isinstance(now, Real) else None
    return None


def _line(case: Case, judgement: Judgement) -> str:
    if judgement.verdict == "remove":
        return NO_CLIPPING
    if judgement.verdict == "unknown" and judgement.enough is None:
        return ASK_AGAIN
    region, kind = repr(case.region), type(case.region).__name__
    if judgement.suggested is not None:
        region = f"{kind}({judgement.suggested.radius:.15g})"
    elif isinstance(getattr(case.region, "radius", None), Real):
        region = f"{kind}({case.observed.radius:.15g})"
    elif "<" in region:
        region = "region"  # a schedule is a function, which cannot be pasted
    policy = "" if judgement.carry else ", carry=False"
    return f"clipper = UClip(optimizer, {region}{policy})"


def _figures(which: str, effect: Effect, unit: str) -> str:
    what = f"the {which} region"
    if effect.radius is not None:
        what = f"radius {effect.radius:g} ({which})"
    if effect.clipped == 0.0:
        return f"  {what}: cuts nothing"
    return f"  {what}: cuts {cut(effect, unit)}; {_bias(effect.bias, effect.scaled_bias)}"


def _what_matters(optimizer: Traits) -> str:
    if optimizer.divides is None:
        return (
            "Adam and its like notice only the bias left after the best scale; for SGD a change of scale is a change "
            "of the learning rate."
        )
    if optimizer.divides:
        return f"{optimizer} divides gradients by their size, so it notices only the bias left after the best scale."
    return (
        f"For {optimizer} a change of scale is only a change of the learning rate; the bias left after the best scale "
        "is not."
    )


def _share(q: float) -> str:
    return "max" if q == 1 else f"{q:.0%}"


def _bias(bias: float, scaled: float) -> str:
    """Both biases in words: 0 is one that cannot be told from noise, NaN one that is seen but cannot be measured."""
    if bias == 0.0 and scaled == 0.0:
        return "bias: too small to tell from noise"
    if bias == 0.0 and math.isnan(scaled):
        return "bias: seen after the best scale only, of unknown size"
    if bias == 0.0:
        return f"bias: its size is lost in the noise; after the best scale {scaled:.1%}"
    words = "bias: seen, of unknown size" if math.isnan(bias) else f"bias {bias:.1%}"
    if math.isnan(scaled):
        return words if math.isnan(bias) else f"{words}, after the best scale seen, of unknown size"
    return f"{words}, after the best scale {'too small to tell from noise' if scaled == 0.0 else f'{scaled:.1%}'}"
