"""The numbers behind the metrics, as sums that add up to those of the whole model; and warnings that name a remedy.

They answer how much is clipped, how large the carry is against the radius, and whether it is winding up.
"""

import math
import sys
import warnings
from collections.abc import Iterator, Sequence
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
    "delay",
)
"""Metrics of the last measured step, in every backend."""

RUNNING = ("skipped_steps", "dropped_norm")
"""Metrics that add up over the run."""


FEED_MEMORY = 0.9
"""Decay, per measured step, of the averages behind the warnings."""
WINDUP_FEED, WINDUP_RADII, WINDUP_SAMPLES = 0.5, 10.0, 5
LONG_DELAY, STALE_DELAY = 10.0, 100.0
"""Steps that a gradient waits: like a momentum of 0.9 on top of the optimizer's own; and too long for any optimizer."""
SPIKE_RADII = 1e3
UNDRAINABLE_RADII = 1e6
SKIPS_IN_A_ROW = 10
SHUT, SHUT_BESIDE = 1e-5, 2.0**-23
"""Below both of these, the second times the gradient's norm, a radius is what rounding has left of 0: a schedule that
comes to 0 ends at 2e-8 once it is compiled."""
NORMS_REMEMBERED = 32
"""Measured gradient norms among which one looks for those that somebody has clipped before."""
AT_THE_RADIUS, AT_A_CONSTANT = 3, 5
"""How many of them must be the same: the radius, or another number."""


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


class Course(NamedTuple):
    """How the carry has fared over the measured steps, from which warnings are made."""

    mean_feed: float
    """Exponential average of the feed."""
    weight: float
    """Exponential average of 1 over the same steps: how much of the past the averages have seen."""
    mean_delay: float
    """Exponential average of the delay."""
    rise: float
    """The largest growth of the carry between two measured steps, in radii."""


def followed(xp: Any, course: Any, last: Any, now: Any) -> Any:
    """``Course`` as a vector after one more measured step, with the metrics before and at it as vectors."""
    ratio_at = LAST_STEP.index("carry_ratio")
    seen = [now[LAST_STEP.index("carry_feed")], now[0] * 0.0 + 1.0, now[LAST_STEP.index("delay")]]
    moved = [FEED_MEMORY * old + (1.0 - FEED_MEMORY) * new for old, new in zip(course[:3], seen, strict=True)]
    before = xp.where(last[ratio_at] == last[ratio_at], last[ratio_at], 0.0)  # NaN before the first
    return xp.vector([*moved, xp.maximum(course[3], now[ratio_at] - before)], course)


def dangers(
    carried: float,
    course: Course,
    streak: float,
    *,
    look: str,
    unbounded: bool,
    optimizer: str = "",
    smooth: bool = True,
    hasty: bool = True,
    shut: bool = False,
) -> Iterator[tuple[str, str]]:
    """Kind and message of each danger that the figures show.

    Args:
        carried: the largest carry in radii.
        course: how it came there.
        streak: skipped steps in a row.
        look: where to see which gradients were bad.
        unbounded: whether the policy lets the carry grow without end.
        optimizer: who is given the updates, in words; empty if that is not known.
        smooth: whether it averages what it is given, by momentum or as Adam does, so that it suffers from a delay.
        hasty: whether the policy pays at once, so that another one is a remedy.
        shut: whether the radius is 0, by which no carry and no delay can be judged.
    """
    weight = course.weight
    feed, delay = (course.mean_feed / weight, course.mean_delay / weight) if weight > 0.0 else (0.0, 0.0)
    enough = weight >= 0.999 * (1.0 - FEED_MEMORY**WINDUP_SAMPLES)
    remedy = _remedy(optimizer) if hasty else "Take a larger radius."
    if streak >= SKIPS_IN_A_ROW:
        yield (
            "skips",
            f"the last {int(streak)} steps were all skipped because gradients were not finite: nothing is "
            f"being learned. {look}; a lower learning rate or loss scale usually helps.",
        )
    if shut:
        return
    if unbounded and enough and carried > WINDUP_RADII and feed >= WINDUP_FEED:
        yield (
            "wind-up",
            f"the carry is winding up: it holds up to {carried:.3g} radii and gradients keep feeding it (average feed "
            f"{feed:.2f}). The radius is below the mean gradient, so the debt grows and will overshoot when it is "
            f"paid. {remedy}",
        )
    elif unbounded and carried > SPIKE_RADII and course.rise > carried / 2:
        yield (
            "spike",
            f"the carry holds up to {carried:.3g} radii, {course.rise:.3g} of which came at once: a very large "
            f"gradient, which is now paid back for as many steps. Look for the batch that caused it. {remedy}",
        )
    elif enough and (delay >= LONG_DELAY if smooth else unbounded and delay >= STALE_DELAY):
        yield (
            "delay",
            f"gradients wait about {delay:.3g} steps in the carry before they are sent, which acts like a momentum of "
            f"{1.0 - 1.0 / delay:.3g} on top of the optimizer's own. {remedy}",
        )
    if unbounded and carried > UNDRAINABLE_RADII:
        yield (
            "undrainable",
            f"the carry holds up to {carried:.3g} radii; a float32 buffer cannot pay that back one radius at a time. "
            f"{remedy}",
        )


def _remedy(optimizer: str) -> str:
    """What to do about a carry that pays at once."""
    leave = f"With {optimizer}, leave" if optimizer else "Leave"
    return f"{leave} carry= out: the default pays back slowly and cannot wind up. Or take a larger radius."


def is_shut(radius: Any, gradient: Any) -> Any:
    """Whether a radius is 0 but for rounding, beside the gradient's norm; numbers or arrays."""
    return (radius <= SHUT) & (radius <= SHUT_BESIDE * gradient)


def near(norm: float, top: float) -> bool:
    """Whether both may have been clipped to the same limit, ``top`` being the larger one."""
    return top - norm <= min(3e-6 * top + 1e-6, 1e-4 * top)


def clipped_before(norms: Sequence[float], radius: float | None) -> float | None:
    """The norm to which gradients were clipped before they came here; None if nothing shows that they were.

    Norms have a largest value, which they reach once; if they reach it again and again, it is a limit. Steps whose norm
    is below it say nothing. ``clip_grad_norm_`` multiplies with limit / (norm + 1e-6) and measures in float32, so that
    what it leaves scatters a little below the limit, or a little more beside it for large tensors.

    Args:
        norms: of the gradients as they arrived, at measured steps; not finite where a step does not count.
        radius: what a norm is clipped to here; None if there is no such number.
    """
    known = [norm for norm in norms if math.isfinite(norm)]
    top = max(known, default=0.0)
    same = [norm for norm in known if near(norm, top)]
    beside = min(2e-5 * top + 1e-6, 1e-4 * top)
    if top == 0.0 or len(same) < AT_THE_RADIUS:
        return None
    if radius is not None and abs(top - radius) <= beside:
        return radius
    # People give round limits. A gradient that never changes has the same norm to the last bit, and nobody clipped it.
    limit = float(f"{top:.2g}")
    changing = len(set(same)) > 1
    return limit if len(same) >= AT_A_CONSTANT and changing and abs(top - limit) <= beside else None


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
    total, update, carry = (xp.sqrt(square) for square in (totals.total_sq, totals.update_sq, totals.carry_sq))
    radius = xp.sqrt(totals.radius_sq)
    grad = xp.sqrt(totals.grad_sq)
    # What is clipped waits as far as it is kept; a policy that mixes keeps more than it has in mind to send.
    waiting = xp.where(update + carry < total, update + carry, total)
    return (
        grad,
        total,
        update,
        carry,
        radius,
        ratio(xp, totals.clipped, totals.size),
        totals.ratio,
        ratio(xp, totals.fed, totals.weight),
        xp.where(is_shut(radius, grad), 0.0, ratio(xp, waiting, radius)),
    )
