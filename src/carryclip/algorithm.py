"""U-Clip, once, for every backend: measure, decide and apply, pure functions over an array namespace.

    measure   one array                 -> partial sums, which add over arrays, groups and ranks
    decide    the sums of each scope    -> a few scalars per scope (scale, part kept, gate)
    apply     one array and its scalars -> update, new buffers

A scope is a set of entries clipped as one vector: all parameters of a ``Norm``, or one group, or one tensor; adding up
over scopes is in ``carryclip.scopes``. ``xp`` provides ``where clip abs sign sqrt expm1 sum lerp isfinite finfo`` with
NumPy's meanings, ``astype(array, dtype)``, ``allfinite(array)``, ``inner(x, y)``, ``plus(x, y, factor)``,
``weighted(x, a, y, b)``, ``between(x, a, y, weight, scale)``, for metrics ``size(array)`` and ``sums(terms,
largest=...)``, and for buffers stored in fewer bits ``as_bits``, ``from_bits`` and ``positions``. Scalars stay arrays,
so nothing here waits for a device; where a backend knows them it may pass numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from carryclip.carry import CarryPolicy, check_policy, policy_of
from carryclip.diagnosis import Diagnosis, Step, diagnose
from carryclip.policy import Clipped, Memory, Mixing, Policy, Scaling, Sums, share_within
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
    def gates_coordinates(self) -> bool:
        """True if each coordinate has a feed average of its own."""
        return self.policy.gated and not self.region.joint

    @property
    def has_scope(self) -> bool:
        """True if its arrays belong to entries of the table of scopes: under a norm, or if all share a memory."""
        return self.region.joint or (self.policy.mixes and self.policy.follows is not None)

    @property
    def remembers(self) -> bool:
        """True if the policy keeps a memory of each scope."""
        return self.has_scope and self.policy.follows is not None

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the ``Sums`` that are made of its arrays and added up by scope."""
        if not self.region.joint:
            if not self.has_scope:
                return ()
            return ("total_sq", "carry_sq", "dot", "cut_sq") if self.policy.noisy else ("total_sq", "dot")
        names = ("total_sq", "carry_sq", "dot") if self.policy.gated or self.policy.mixes else ("total_sq",)
        if self.region.rule is None:
            return names
        names += ("grad_sq",) if self.measures_gradient else ()
        return (*names, "weight_sq") if self.region.rule.weighs else names

    @property
    def measures_gradient(self) -> bool:
        """True if the gradient's own square is needed beside that of what is clipped."""
        rule = self.region.rule
        return rule is not None and rule.follows and self.policy.carries and not self.policy.mixes

    def unit(self, sizes: tuple[Any, ...]) -> float:
        """``unit_of`` the radius, if that is a number."""
        return unit_of(sizes[0]) if self.region.joint and self.region.rule is None else 1.0


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


def measure(
    xp: Any,
    rule: Rule,
    gradient: Any,
    buffers: Buffers,
    dtype: Any,
    unit: float = 1.0,
    *,
    sizes: tuple[Any, ...] = (),
    clock: Age | None = None,
    tame: bool = False,
) -> Sums:
    """What must be known of one array before anything is written; squares are in units of ``unit``.

    A norm's sum of squares tells finiteness as well: an overflow counts as non-finite. Coordinate-wise kinds look at
    the gradient itself, because a finite 1e25 is no reason to skip there. ``sizes``, ``clock`` and ``tame``, as for
    ``apply``, are read only where coordinate-wise kinds need more than that.
    """
    if not rule.region.joint:
        return _measure_coordinates(xp, rule, gradient, buffers, sizes, clock, dtype, tame=tame)
    raw = _sanitized(xp, rule, gradient, dtype)
    carry = None if buffers.carry is None else xp.astype(buffers.carry, dtype)
    if unit != 1.0:
        raw, carry = raw * unit, None if carry is None else carry * unit
    found = Sums()
    if "dot" in rule.measures and carry is not None:
        # First what reads both: the others then find them in the cache.
        found = found._replace(dot=xp.inner(raw, carry), carry_sq=xp.inner(carry, carry))
    total = raw if carry is None or rule.policy.mixes else raw + carry
    total_sq = xp.inner(total, total)
    found = found._replace(bad=~xp.isfinite(total_sq), total_sq=total_sq)
    if rule.measures_gradient:
        found = found._replace(grad_sq=xp.inner(raw, raw))
    return found


def _measure_coordinates(
    xp: Any,
    rule: Rule,
    gradient: Any,
    buffers: Buffers,
    sizes: tuple[Any, ...],
    clock: Age | None,
    dtype: Any,
    *,
    tame: bool,
) -> Sums:
    bad = ~xp.allfinite(gradient) if rule.can_reject and not tame else None
    if not rule.has_scope:
        return Sums(bad)
    raw = _sanitized(xp, rule, gradient, dtype)
    raw = raw if tame else fit_for_squares(xp, raw)
    wide = _widened(xp, buffers, dtype)
    if clock is None:
        clock = age(xp, rule, buffers.count, dtype)
    if rule.region.counts_current:
        wide = _sampled(xp, rule, raw, wide, clock)
    radius, centre = _radius(xp, rule, wide, clock, sizes, gradient.dtype, dtype)
    if rule.policy.reach < math.inf:
        limit = held(xp, rule.policy.reach * radius, dtype)
        raw = xp.clip(raw, -limit, limit)
    cut = raw - rule.region.project(xp, raw, radius, centre)
    found = Sums(bad, xp.inner(raw, raw), dot=xp.inner(raw, cut))
    if not rule.policy.noisy:
        return found
    return found._replace(carry_sq=xp.inner(wide.carry, wide.carry), cut_sq=xp.inner(cut, cut))


def _sampled(xp: Any, rule: Rule, sample: Any, buffers: Buffers, clock: Age) -> Buffers:
    """The buffers with a gradient taken into the moments."""
    estimator: Any = rule.region.estimator
    mean, second = estimator.update(xp, sample, buffers.mean, buffers.second, clock.share)
    return buffers._replace(mean=mean, second=second)


def decide(
    xp: Any,
    policy: Policy,
    totals: Sums,
    radius: Any,
    memory: Memory | None = None,
    skip: Any = None,
    rounding: Any = 0.0,
    unit: Any = 1.0,
) -> tuple[Scaling, Memory | None]:
    """Scalars for each scope of a ``Norm``, and the policy's memory after the step.

    The update is scale·s, so what is cut has norm ||s|| - radius and the policies need no further pass over memory.

    Args:
        xp: the array namespace.
        policy: what is kept of the rest.
        totals: the sums of each scope, one entry each.
        radius: of each scope, or one for all.
        memory: the policy's, one entry for each scope; None if it has none.
        skip: boolean array that cancels the step, or None.
        rounding: how far rounding to a narrower type may move an update, relative to its size (half an epsilon), and
            the carry with it. Limits allow for that, or a carry that may not grow would creep up bit by bit.
        unit: ``unit_of`` each scope's radius, or one for all.
    """
    radius = _nonnegative(xp, radius) * unit
    if policy.mixes:
        scaling, moved = policy.weigh(xp, totals, radius, memory, rounding, unit)
        return scaling, _remembered(xp, skip, memory, moved)
    norm = xp.sqrt(totals.total_sq)
    clipped = norm > radius
    scale = xp.where(clipped, radius / xp.where(clipped, norm, 1.0), 1.0)
    # NaN is above nothing, yet under "propagate" it must reach every coordinate, as it does in clip_grad_norm_.
    scale = xp.where(norm == norm, scale, norm)
    cut = xp.where(clipped, norm - radius, 0.0)
    exact = isinstance(rounding, float) and not rounding
    rest = cut if exact else cut + rounding * xp.where(clipped, radius, norm)
    owed = closed = None
    if memory is not None and policy.gated:
        owed = xp.sqrt(totals.carry_sq)
        count = memory.count + 1
        fed = xp.clip(ratio(xp, totals.dot, radius * owed), -1.0, 1.0)
        weight = debias_weight(xp, policy.decay, xp.astype(count, norm.dtype))
        average, closed = _gate(xp, policy, fed, memory.average, weight)
        memory = _remembered(xp, skip, memory, Memory(average, count))
    keep = None if policy.limited else policy.fraction
    if policy.limited and (not policy.gated or closed is not None):
        keep = share_within(xp, policy.limit(xp, radius, owed, closed), rest)
    dropped = None
    if not policy.carries:
        dropped = cut / unit
    elif keep is not None:
        dropped = cut * (1.0 - keep) / unit
    return Scaling(scale, keep, dropped, clipped), memory


def decide_coordinates(
    xp: Any, policy: Policy, totals: Sums, memory: Memory | None, skip: Any = None
) -> tuple[Scaling, Memory | None]:
    """The same for rules that clip coordinate by coordinate and share a memory: one entry for each of them."""
    scaling, moved = policy.weigh_coordinates(xp, totals, memory)
    return scaling, _remembered(xp, skip, memory, moved)


def _remembered(xp: Any, skip: Any, old: Memory | None, new: Memory | None) -> Memory | None:
    """``new``, or ``old`` if the step is skipped."""
    if old is None or new is None:
        return None
    return new if skip is None else Memory.each(lambda x, y: xp.where(skip, x, y), old, new)


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
        scaling: the scalars of its scope; None if it has none.
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
    moved = buffers._replace(count=None if buffers.count is None else buffers.count + 1)
    clock = age(xp, rule, buffers.count, dtype) if clock is None else clock
    # Before the moments: a program that writes in place then has room for it.
    total = raw if buffers.carry is None or rule.policy.mixes else raw + buffers.carry
    if rule.region.estimator is not None:
        moved = _sampled(xp, rule, raw if tame else fit_for_squares(xp, raw), moved, clock)
    if rule.region.joint:
        assert scaling is not None
        radius = sizes[0]
        step = _by_norm(xp, rule, raw, total, buffers, scaling, gradient.dtype, inspect=inspect)
    else:
        source = moved if rule.region.counts_current else buffers
        radius, centre = _radius(xp, rule, source, clock, sizes, gradient.dtype, dtype)
        hold = not tame and rule.nonfinite != "propagate"
        step = _by_coordinates(xp, rule, raw, total, buffers, scaling, clock, radius, centre, gradient.dtype, hold=hold)
        moved = moved._replace(feed=step.feed)
    dropped_sq = None
    if tally and step.dropped is not None:
        dropped = fit_for_squares(xp, step.dropped)
        dropped_sq = xp.inner(dropped, dropped)
    moved = moved._replace(carry=step.kept if rule.policy.carries else None)
    diagnosis = None
    if inspect:
        wide = xp.astype(step.update, dtype)
        seen = Step(raw, step.total, step.aim, wide, buffers.carry, moved.carry, radius)
        diagnosis = diagnose(xp, seen, joint=rule.region.joint)
    moved = _narrowed(xp, moved, stored, seed)
    update = step.update
    if skip is not None:
        update = xp.where(skip, 0.0, update)
        moved = Buffers(
            *(None if new is None else xp.where(skip, old, new) for old, new in zip(stored, moved, strict=True))
        )
    return Outcome(update, moved, dropped_sq, diagnosis)


def _by_norm(
    xp: Any,
    rule: Rule,
    raw: Any,
    total: Any,
    buffers: Buffers,
    scaling: Scaling,
    narrow: Any,
    *,
    inspect: bool,
) -> Clipped:
    """Clip an array as a part of its scope's vector; what a policy mixes is seen as a whole only to ``inspect`` it."""
    if rule.policy.mixes:
        aim, owed = rule.policy.mix(xp, raw, buffers.carry, scaling)
        if inspect:
            total, _ = rule.policy.mix(xp, raw, buffers.carry, scaling._replace(scale=1.0))
        update = _rounded(xp, aim, narrow)
        return Clipped(total, aim, update, rule.policy.left(xp, owed, xp.astype(update, raw.dtype), scaling))
    aim = total * scaling.scale
    update = _rounded(xp, aim, narrow)
    rest = total - xp.astype(update, raw.dtype)
    return Clipped(total, aim, update, rest if scaling.keep is None else rest * scaling.keep)


def _by_coordinates(
    xp: Any,
    rule: Rule,
    raw: Any,
    total: Any,
    buffers: Buffers,
    scaling: Scaling | None,
    clock: Age,
    radius: Any,
    centre: Any,
    narrow: Any,
    *,
    hold: bool,
) -> Clipped:
    """Clip each coordinate by itself. ``hold``: two huge finite numbers may add up to inf, which nothing pays back."""
    dtype = raw.dtype

    def project(values: Any) -> Any:
        return rule.region.project(xp, values, radius, centre)

    def held_in(values: Any) -> Any:
        return _within(xp, values, dtype) if hold else values

    if rule.policy.mixes:

        def rounded(values: Any) -> Any:
            return xp.astype(_rounded(xp, values, narrow), dtype)

        mixing = Mixing(raw, buffers.carry, radius, project, rounded, held_in, scaling)
        mixed = rule.policy.mix_coordinates(xp, mixing)
        return mixed._replace(update=xp.astype(mixed.update, narrow))
    total = held_in(total)
    aim = project(total)
    update = _rounded(xp, aim, narrow)
    rest = total - xp.astype(update, dtype)
    if rule.carry is True:
        return Clipped(total, aim, update, rest)
    kept, feed = _carried(xp, rule, raw, rest, buffers, clock, radius)
    return Clipped(total, aim, update, kept, rest - kept if rule.policy.carries else rest, feed)


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
