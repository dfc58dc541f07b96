"""U-Clip, once, for every backend: measure, decide and apply, pure functions over an array namespace.

    measure   one array                 -> partial sums, which add over arrays, groups and ranks
    decide    the sums of each scope    -> a few scalars per scope (scale, part kept, gate)
    apply     one array and its scalars -> update, new buffers

A scope is a set of entries clipped as one vector: all parameters of a ``Norm``, or one group, or one tensor; adding up
over scopes is in ``carryclip.scopes``. ``xp`` provides ``where clip abs sign sqrt expm1 sum lerp isfinite finfo`` with
NumPy's meanings, ``astype(array, dtype)``, ``allfinite(array)``, ``inner(x, y)``, for metrics ``size(array)`` and
``sums(terms, largest=...)``, and for buffers stored in fewer bits ``as_bits``, ``from_bits`` and ``positions``. Scalars
stay arrays, so nothing here waits for a device; where a backend knows them it may pass numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from carryclip.carry import CarryPolicy, Policy, check_policy, policy_of
from carryclip.diagnosis import Diagnosis, Step, diagnose
from carryclip.precision import debias_weight, fit_for_squares, held, ratio, stochastic, toward_zero, truncate
from carryclip.regions import Region, check_region

NonFinite = Literal["skip", "zero", "raise", "propagate"]


@dataclass(frozen=True)
class Rule:
    """What is done to a gradient: a region, a carry policy, and what happens when the gradient is not finite."""

    region: Region
    carry: CarryPolicy = True
    nonfinite: NonFinite = "skip"
    policy: Policy = field(init=False, repr=False, compare=False)
    """``carry`` as an object."""
    buffers: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Names of the ``Buffers`` it keeps for each array."""

    def __post_init__(self) -> None:
        check_region(self.region)
        object.__setattr__(self, "policy", policy_of(check_policy(self.carry)))
        carry = ("carry",) if self.policy.carries else ()
        averages = ("mean", "second") if self.region.estimator is not None else ()
        averages += ("feed",) if self.gates_coordinates else ()
        object.__setattr__(self, "buffers", carry + averages + (("count",) if averages else ()))
        if self.nonfinite not in ("skip", "zero", "raise", "propagate"):
            raise ValueError(f"nonfinite must be 'skip', 'zero', 'raise' or 'propagate', got {self.nonfinite!r}.")

    @property
    def can_reject(self) -> bool:
        """True if a gradient's values can cancel a step; under ``"zero"`` only a norm that overflows can."""
        return self.nonfinite in ("skip", "raise") or (self.nonfinite == "zero" and self.region.joint)

    @property
    def gates_scopes(self) -> bool:
        """True if each scope has a feed average."""
        return self.policy.gated and self.region.joint

    @property
    def gates_coordinates(self) -> bool:
        """True if each coordinate has a feed average of its own."""
        return self.policy.gated and not self.region.joint


def find_rule(rules: list[Rule], rule: Rule) -> int | None:
    """Where ``rules`` has one that is equal to ``rule``.

    Radii given as arrays are equal only if they are the same object: values may be traced, and an answer that depends
    on them would change under a compiler.
    """
    return next((n for n, known in enumerate(rules) if known.region is rule.region or _equal(known, rule)), None)


def rule_number(rules: list[Rule], rule: Rule) -> int:
    """Position of ``rule`` in ``rules``, added if new: groups with equal regions are clipped as one."""
    found = find_rule(rules, rule)
    if found is None:
        rules.append(rule)
    return len(rules) - 1 if found is None else found


def _equal(one: Rule, other: Rule) -> bool:
    sizes = [size for rule in (one, other) for size in vars(rule.region).values()]
    entries = [entry for size in sizes for entry in (size if isinstance(size, (list, tuple)) else [size])]
    return not any(hasattr(entry, "shape") or isinstance(entry, Mapping) for entry in entries) and one == other


class Buffers(NamedTuple):
    """What one array keeps between steps, in at least float32; None where the rule has no use for it.

    All of them change at every step the array takes part in, unless the step is skipped. They may be stored in
    bfloat16: a step reads them into its own type and rounds what it writes at random, so that sums come out right on
    average.
    """

    carry: Any = None
    mean: Any = None
    second: Any = None
    feed: Any = None
    count: Any = None


class Age(NamedTuple):
    """Scalars that follow from how often an array took part; None where the rule does not need them."""

    share: Any = None
    """1/n for the moments, with this step counted."""
    factor: Any = None
    """What the moments behind the radius are multiplied with."""
    warm: Any = None
    """Whether there are samples enough for a radius."""
    gate: Any = None
    """Sum of the weights in the feed average."""


class Sums(NamedTuple):
    """Partial sums of one array, or the totals of each scope; None where the rule does not need them."""

    bad: Any = None
    total_sq: Any = None
    carry_sq: Any = None
    dot: Any = None


class Feed(NamedTuple):
    """The gate's memory of each scope of a ``Norm``: raw average, and number of steps in it."""

    average: Any
    count: Any


class Scaling(NamedTuple):
    """Scalars of each scope of a ``Norm``: what its vector is multiplied with, and what becomes of the rest.

    ``keep`` is the part of the rest that is carried (None: all of it), ``dropped`` the norm of what is not.
    """

    scale: Any = None
    keep: Any = None
    dropped: Any = None
    clipped: Any = None


class Outcome(NamedTuple):
    """The result of ``apply`` for one array. ``dropped_sq`` is None where nothing drops or the scaling has it."""

    update: Any
    buffers: Buffers
    dropped_sq: Any
    diagnosis: Diagnosis | None


def unit_of(radius: Any) -> float:
    """What the entries of a norm are multiplied with before they are squared: 1, or a power of 2 for a tiny radius.

    A float32 square vanishes below 1e-38, and with it a norm of 1e-19 that must be clipped to 1e-25. Only a radius that
    is a plain number tells; and as little as helps is taken, because what is scaled up may overflow.
    """
    if not isinstance(radius, (int, float)) or not 0.0 < radius < 2.0**-50:
        return 1.0
    return 2.0 ** min(-50 - math.frexp(radius)[1], 100)


def measure(xp: Any, rule: Rule, gradient: Any, carry: Any, dtype: Any, unit: float = 1.0) -> Sums:
    """What must be known of one array before anything is written; squares are in units of ``unit``.

    A norm's sum of squares tells finiteness as well: an overflow counts as non-finite. Coordinate-wise kinds look at
    the gradient itself, because a finite 1e25 is no reason to skip there.
    """
    if not rule.region.joint:
        return Sums(bad=~xp.allfinite(gradient)) if rule.can_reject else Sums()
    raw = _sanitized(xp, rule, gradient, dtype)
    carry = None if carry is None else xp.astype(carry, dtype)
    if unit != 1.0:
        raw, carry = raw * unit, None if carry is None else carry * unit
    total = raw if carry is None else raw + carry
    total_sq = xp.inner(total, total)
    bad = ~xp.isfinite(total_sq)
    if rule.gates_scopes and carry is not None:
        return Sums(bad, total_sq, carry_sq=xp.inner(carry, carry), dot=xp.inner(raw, carry))
    return Sums(bad, total_sq)


def decide(
    xp: Any,
    policy: Policy,
    totals: Sums,
    radius: Any,
    feed: Feed | None = None,
    skip: Any = None,
    rounding: Any = 0.0,
    unit: Any = 1.0,
) -> tuple[Scaling, Feed | None]:
    """Scalars for each scope of a ``Norm``, and the gate's memory after the step.

    The update is scale·s, so what is cut has norm ||s|| - radius and the policies need no further pass over memory.

    Args:
        xp: the array namespace.
        policy: what is kept of the rest.
        totals: the sums of each scope, one entry each.
        radius: of each scope, or one for all.
        feed: the gate's memory, one entry for each scope; None if the policy is not gated.
        skip: boolean array that cancels the step, or None.
        rounding: how far rounding to a narrower type may move an update, relative to its size (half an epsilon), and
            the carry with it. Limits allow for that, or a carry that may not grow would creep up bit by bit.
        unit: ``unit_of`` each scope's radius, or one for all.
    """
    radius = _nonnegative(xp, radius) * unit
    norm = xp.sqrt(totals.total_sq)
    clipped = norm > radius
    scale = xp.where(clipped, radius / xp.where(clipped, norm, 1.0), 1.0)
    # NaN is above nothing, yet under "propagate" it must reach every coordinate, as it does in clip_grad_norm_.
    scale = xp.where(norm == norm, scale, norm)
    cut = xp.where(clipped, norm - radius, 0.0)
    exact = isinstance(rounding, float) and not rounding
    rest = cut if exact else cut + rounding * xp.where(clipped, radius, norm)
    owed = closed = None
    if feed is not None and policy.gated:
        owed = xp.sqrt(totals.carry_sq)
        count = feed.count + 1
        fed = xp.clip(ratio(xp, totals.dot, radius * owed), -1.0, 1.0)
        weight = debias_weight(xp, policy.decay, xp.astype(count, norm.dtype))
        average, closed = _gate(xp, policy, fed, feed.average, weight)
        feed = Feed(_held(xp, skip, feed.average, average), _held(xp, skip, feed.count, count))
    keep = None if policy.limited else policy.fraction
    if policy.limited and (not policy.gated or closed is not None):
        keep = _share(xp, policy.limit(xp, radius, owed, closed), rest)
    dropped = None
    if not policy.carries:
        dropped = cut / unit
    elif keep is not None:
        dropped = cut * (1.0 - keep) / unit
    return Scaling(scale, keep, dropped, clipped), feed


def age(xp: Any, rule: Rule, count: Any, dtype: Any) -> Age:
    """What a step needs to know of ``count``, an array's samples before it: a few scalars, never one per entry."""
    if count is None:
        return Age()
    seen = xp.astype(count + 1, dtype)
    gate = debias_weight(xp, rule.policy.decay, seen) if rule.policy.gated else None
    estimator = rule.region.estimator
    if estimator is None:
        return Age(gate=gate)
    known = count + 1 if rule.region.counts_current else count
    return Age(1.0 / seen, estimator.factor(xp, xp.astype(known, dtype)), known >= estimator.warmup, gate)


def apply(
    xp: Any,
    rule: Rule,
    gradient: Any,
    buffers: Buffers,
    sizes: tuple[Any, ...],
    scaling: Scaling | None,
    skip: Any,
    dtype: Any,
    *,
    clock: Age | None = None,
    seed: Any = None,
    tame: bool = False,
    tally: bool = False,
    inspect: bool = False,
) -> Outcome:
    """One step of one array: the update in the gradient's type, and the buffers that follow.

    Args:
        xp: the array namespace.
        rule: what to do.
        gradient: the raw gradient.
        buffers: what the array kept from the last step.
        sizes: the region's numbers for this array at this step.
        scaling: the scalars of its scope; None for coordinate-wise kinds.
        skip: boolean array that cancels the step, or None.
        dtype: the type to compute in; buffers stored in another are rounded at random.
        clock: ``age`` of the buffers' count, if it is known already.
        seed: a whole number for that, another one for each array and step.
        tame: all entries of the gradient are finite and so small that neither sums nor squares overflow.
        tally: sum up what the carry policy drops.
        inspect: also return the sums behind the metrics.
    """
    stored, buffers = buffers, _widened(xp, buffers, dtype)
    raw = _sanitized(xp, rule, gradient, dtype)
    total = raw if buffers.carry is None else raw + buffers.carry
    moved = buffers._replace(count=None if buffers.count is None else buffers.count + 1)
    clock = age(xp, rule, buffers.count, dtype) if clock is None else clock
    if rule.region.estimator is not None:
        sample = raw if tame else fit_for_squares(xp, raw)
        mean, second = rule.region.estimator.update(xp, sample, buffers.mean, buffers.second, clock.share)
        moved = moved._replace(mean=mean, second=second)
    if scaling is not None:
        radius = sizes[0]
        aim = total * scaling.scale
    else:
        if rule.nonfinite != "propagate" and not tame:
            # Two huge finite numbers may add up to inf, which no later step could pay back.
            total = _within(xp, total, dtype)
        source = moved if rule.region.counts_current else buffers
        radius, centre = _radius(xp, rule, source, clock, sizes, gradient.dtype, dtype)
        aim = rule.region.project(xp, total, radius, centre)
    update = _rounded(xp, aim, gradient.dtype)
    rest = total - xp.astype(update, dtype)
    if scaling is not None:
        kept, dropped_sq = rest if scaling.keep is None else rest * scaling.keep, None
    else:
        kept, feed = _carried(xp, rule, raw, rest, buffers, clock, radius)
        moved = moved._replace(feed=feed)
        dropped_sq = None
        if tally and rule.carry is not True:
            dropped = fit_for_squares(xp, rest - kept if rule.policy.carries else rest)
            dropped_sq = xp.inner(dropped, dropped)
    moved = moved._replace(carry=kept if rule.policy.carries else None)
    diagnosis = None
    if inspect:
        step = Step(raw, total, aim, xp.astype(update, dtype), buffers.carry, moved.carry, radius)
        diagnosis = diagnose(xp, step, joint=scaling is not None)
    moved = _narrowed(xp, moved, stored, seed)
    if skip is not None:
        update = xp.where(skip, 0.0, update)
        moved = Buffers(
            *(None if new is None else xp.where(skip, old, new) for old, new in zip(stored, moved, strict=True))
        )
    return Outcome(update, moved, dropped_sq, diagnosis)


def _widened(xp: Any, buffers: Buffers, dtype: Any) -> Buffers:
    """The buffers in the type to compute in."""
    wide = [None if x is None else xp.astype(x, dtype) for x in buffers[:-1]]
    return Buffers._make([*wide, buffers.count])


def _narrowed(xp: Any, moved: Buffers, stored: Buffers, seed: Any) -> Buffers:
    """New buffers in the types the old ones are stored in."""
    return Buffers(
        *(
            new if new is None or new.dtype == old.dtype else stochastic(xp, new, old.dtype, seed + k)
            for k, (new, old) in enumerate(zip(moved, stored, strict=True))
        )
    )


def _sanitized(xp: Any, rule: Rule, gradient: Any, dtype: Any) -> Any:
    """The gradient in the buffers' precision, without the entries that ``nonfinite="zero"`` removes."""
    gradient = xp.astype(gradient, dtype)
    return xp.where(xp.isfinite(gradient), gradient, 0.0) if rule.nonfinite == "zero" else gradient


def _nonnegative(xp: Any, radius: Any) -> Any:
    """A radius that comes as an array cannot be checked without waiting for it: below 0 and NaN count as 0."""
    return radius if isinstance(radius, (int, float)) else xp.where(radius >= 0.0, radius, 0.0)


def _within(xp: Any, values: Any, dtype: Any) -> Any:
    """``values`` held within the finite range of ``dtype``."""
    largest = float(xp.finfo(dtype).max)
    return xp.clip(values, -largest, largest)


def _rounded(xp: Any, values: Any, dtype: Any) -> Any:
    """``values`` rounded to ``dtype``; a narrower type must not turn a large number into inf."""
    return values if values.dtype == dtype else xp.astype(_within(xp, values, dtype), dtype)


def _radius(
    xp: Any, rule: Rule, source: Buffers, clock: Age, sizes: tuple[Any, ...], narrow: Any, dtype: Any
) -> tuple[Any, Any]:
    """(radius rounded toward zero in the gradient's type, running mean or None); infinite before the moments exist."""
    estimator = rule.region.estimator
    if estimator is None:
        radius = rule.region.extent(xp, sizes, None, None)
        if isinstance(radius, (int, float)):
            return truncate(float(radius), xp.finfo(narrow)), None
        return xp.astype(toward_zero(xp, _nonnegative(xp, radius), narrow), dtype), None
    mean, std = estimator.estimate(xp, source.mean, source.second, clock.factor)
    radius = rule.region.extent(xp, sizes, mean, std)
    if clock.warm is False:  # known without asking the device
        return math.inf, mean
    exists = clock.warm
    if not all(isinstance(size, float) and size < math.inf for size in sizes):
        exists = exists & (radius == radius)  # NaN is an infinite multiple of a deviation of 0: no limit either way
    if exists is not True:
        radius = xp.where(exists, radius, math.inf)
    # A multiple wider than the buffers must not widen them.
    return xp.astype(toward_zero(xp, radius, narrow) if rule.region.centred else radius, dtype), mean


def _carried(xp: Any, rule: Rule, raw: Any, rest: Any, buffers: Buffers, clock: Age, radius: Any) -> tuple[Any, Any]:
    """(what is kept of ``rest``, new feed average) under a coordinate-wise rule."""
    policy, average, owed, closed = rule.policy, None, None, None
    if policy.gated:
        fed = xp.clip(ratio(xp, raw * xp.sign(buffers.carry), radius), -1.0, 1.0)
        average, closed = _gate(xp, policy, fed, buffers.feed, clock.gate)
        owed = xp.abs(buffers.carry)
    if policy.limited:
        limit = held(xp, policy.limit(xp, radius, owed, closed), rest.dtype)
        return xp.clip(rest, -limit, limit), average
    fraction = policy.fraction
    return rest if fraction is None else fraction * rest, average


def _gate(xp: Any, policy: Policy, fed: Any, average: Any, weight: Any) -> tuple[Any, Any]:
    """(new raw average, whether growth is stopped); ``weight`` is what an average of ones would be."""
    average = policy.decay * average + (1.0 - policy.decay) * fed
    return average, average / weight >= policy.threshold


def _share(xp: Any, limit: Any, rest: Any) -> Any:
    """The factor that brings a vector of norm ``rest`` within ``limit``."""
    over = rest > limit
    return xp.where(over, limit / xp.where(over, rest, 1.0), 1.0)


def _held(xp: Any, skip: Any, old: Any, new: Any) -> Any:
    """``new``, or ``old`` if the step is skipped."""
    return new if skip is None else xp.where(skip, old, new)
