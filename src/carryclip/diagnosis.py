"""The numbers behind the metrics, as sums that add up to those of the whole model; and warnings that name a remedy.

They answer how much is clipped, how large the carry is against the radius, and whether it is winding up.
"""

import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from carryclip.precision import ratio

LAST_STEP = (
    "grad_norm",
    "sum_norm",
    "update_norm",
    "carry_norm",
    "radius_norm",
    "clipped_fraction",
    "carry_ratio",
    "carry_feed",
)
"""Metrics of the last measured step, in every backend."""

RUNNING = ("skipped_steps", "dropped_norm")
"""Metrics that add up over the run."""


FEED_MEMORY = 0.9
"""Decay, per measured step, of the feed average behind the wind-up warning."""
WINDUP_FEED, WINDUP_RADII, WINDUP_SAMPLES = 0.5, 10.0, 5
SPIKE_RADII = 1e3
UNDRAINABLE_RADII = 1e6
SKIPS_IN_A_ROW = 10


class CarryClipWarning(UserWarning):
    """Something that carryclip noticed and that a person should look at; the message names the remedy."""


FRAMEWORKS = {"carryclip", "torch", "jax", "_collections_abc", "collections", "contextlib", "copy", "copyreg"}
"""Packages at whose lines no warning points; the front ends add the trainers they know."""


def warn_user(message: str) -> None:
    """Warn, pointing at the innermost line outside of carryclip and the frameworks it is called from."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in FRAMEWORKS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, CarryClipWarning, stacklevel=level + 1)


def dangers(carried: float, feed: float, weight: float, streak: float, look: str) -> Iterator[tuple[str, str]]:
    """Kind and message of each danger that the figures show.

    Args:
        carried: the largest carry in radii; 0 under a policy that bounds it.
        feed: exponential average of the feed over the measured steps.
        weight: exponential average of 1 over the same steps: how much of the past ``feed`` has seen.
        streak: skipped steps in a row.
        look: where to see which gradients were bad.
    """
    feed = feed / weight if weight > 0.0 else 0.0
    enough = weight >= 0.999 * (1.0 - FEED_MEMORY**WINDUP_SAMPLES)
    if carried > WINDUP_RADII and feed >= WINDUP_FEED and enough:
        yield (
            "wind-up",
            f"the carry is winding up: it holds up to {carried:.3g} radii and gradients keep feeding it "
            f"(average feed {feed:.2f}). The radius is below the mean gradient, so the debt grows and "
            "will overshoot when it is paid. Use carry=Gated(), or a larger radius.",
        )
    elif carried > SPIKE_RADII:
        yield (
            "spike",
            f"the carry holds up to {carried:.3g} radii, as after a very large gradient, and paying it back takes "
            "as many steps. Use carry=Gated() or Capped(100), and look for the batch that caused it.",
        )
    if carried > UNDRAINABLE_RADII:
        yield (
            "undrainable",
            f"the carry holds up to {carried:.3g} radii; a float32 buffer cannot pay that back one radius at a "
            "time. Use carry=Gated() or Capped(100), or a larger radius, and look for the batch that caused it.",
        )
    if streak >= SKIPS_IN_A_ROW:
        yield (
            "skips",
            f"the last {int(streak)} steps were all skipped because gradients were not finite: nothing is "
            f"being learned. {look}; a lower learning rate or loss scale usually helps.",
        )


class Step(NamedTuple):
    """One array at one step: raw gradient, g + carry, its projection, the rounded update, carry before and after."""

    raw: Any
    total: Any
    aim: Any
    update: Any
    carry: Any
    kept: Any
    radius: Any


class Diagnosis(NamedTuple):
    """Sums of one array, or of a scope, or of all. They add, except ``ratio``, of which the largest counts.

    ``fed`` is the sum of feed·|carry| and ``weight`` that of |carry|: fed/weight is the feed where the debt is. Of an
    array under a ``Norm`` they are <g, carry> and ||carry||², until ``of_scopes`` has seen the whole vector.
    """

    grad_sq: Any
    total_sq: Any
    update_sq: Any
    carry_sq: Any
    radius_sq: Any
    clipped: Any
    size: Any
    fed: Any
    weight: Any
    ratio: Any


def diagnose(xp: Any, step: Step, *, joint: bool) -> Diagnosis:
    """The sums of one array; entries may be Python numbers where they need no look at the array.

    ``xp.sums`` adds up each of several arrays, or products of two, and takes the largest of the last if told so; a
    compiler can do all of them in one pass, and another namespace makes the arrays one after the other.
    """
    size = xp.size(step.raw)
    owes = step.carry is not None
    if joint:
        pairs = [(x, x) for x in (step.raw, step.total, step.update)]
        pairs += [(step.kept, step.kept)] if step.kept is not None else []
        pairs += [(step.raw, step.carry), (step.carry, step.carry)] if owes else []
        grad_sq, total_sq, update_sq, *rest = xp.sums(pairs, largest=False)
        carry_sq = rest.pop(0) if step.kept is not None else 0.0
        fed, weight = rest if owes else (0.0, 0.0)
        return Diagnosis(grad_sq, total_sq, update_sq, carry_sq, 0.0, 0.0, size, fed, weight, 0.0)
    radius_sq = step.radius * step.radius * size
    if hasattr(step.radius, "shape") and step.radius.shape != ():
        # One radius may stand for both parts of a complex number.
        radius_sq = xp.sum(step.radius * step.radius) * (size / xp.size(step.radius))
    grad_sq, total_sq, update_sq, clipped, *rest = xp.sums(_coordinates(xp, step), largest=owes)
    carry_sq, fed, weight, worst = rest if owes else (0.0, 0.0, 0.0, 0.0)
    return Diagnosis(grad_sq, total_sq, update_sq, carry_sq, radius_sq, clipped, size, fed, weight, worst)


def _coordinates(xp: Any, step: Step) -> Iterator[Any]:
    """What is added up of a coordinate-wise step; the last term, there only with a carry, is for its maximum."""
    yield from ((x, x) for x in (step.raw, step.total, step.update))
    yield xp.astype(step.aim != step.total, step.raw.dtype)
    if step.carry is not None:
        yield step.kept, step.kept
        # The same as clamp(g·sign(carry)/radius)·|carry|: a clamp around 0 lets the sign pass.
        yield xp.clip(ratio(xp, step.raw, step.radius), -1.0, 1.0), step.carry
        yield xp.abs(step.carry)
        yield ratio(xp, xp.abs(step.kept), step.radius)


def of_scopes(xp: Any, sums: Diagnosis, radius: Any, clipped: Any) -> Diagnosis:
    """Complete the sums of a ``Norm``'s scopes (one entry each) with what only the whole vector can tell."""
    owed = xp.sqrt(sums.weight)
    feed = xp.clip(ratio(xp, sums.fed, radius * owed), -1.0, 1.0)
    return sums._replace(
        radius_sq=radius * radius + 0.0 * sums.size,
        clipped=xp.astype(clipped, sums.size.dtype) * sums.size,
        fed=feed * owed,
        weight=owed,
        ratio=ratio(xp, xp.sqrt(sums.carry_sq), radius),
    )


def last_step(xp: Any, totals: Diagnosis) -> tuple[Any, ...]:
    """The metrics named in ``LAST_STEP``, from the sums over everything that took part in the step."""
    return (
        xp.sqrt(totals.grad_sq),
        xp.sqrt(totals.total_sq),
        xp.sqrt(totals.update_sq),
        xp.sqrt(totals.carry_sq),
        xp.sqrt(totals.radius_sq),
        ratio(xp, totals.clipped, totals.size),
        totals.ratio,
        ratio(xp, totals.fed, totals.weight),
    )
