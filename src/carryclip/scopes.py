"""What belongs to whole scopes: adding up the sums of their arrays, deciding on all of them, and the metrics of a step.

A scope is what is clipped as one vector under a ``Norm``: all parameters, a group, a tensor. All scopes of a clipper
stand in one table, whichever region they belong to, and everything here has one entry for each. What a region clips
coordinate by coordinate is one more scope if the carry policy keeps a memory of it; else it has none, and where a place
is asked for it gives ``NO_SCOPE``. A backend with scopes finer than an array, such as rows, passes a slice of the table
and one sum for each entry of it.

Beside what ``carryclip.algorithm`` asks of ``xp``, this needs ``vector(values, like)`` (a list of scalars as a vector),
``concat(values, like)`` (vectors end to end), ``total(values)`` (the sum of a list of scalars), ``max`` and
``maximum``. ``like`` is whatever the backend makes vectors by, such as a type.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from carryclip.algorithm import Rule, decide, decide_coordinates
from carryclip.diagnosis import Diagnosis, last_step, of_scopes
from carryclip.policy import Memory, Scaling, Sums
from carryclip.radius import Past

NO_SCOPE = -1

Place = int | slice
"""Which entry, or entries, of the table."""


class Totals(NamedTuple):
    """Sums of each scope, and what is known of it beforehand."""

    sums: Sums
    present: Any
    """Whether each scope has a gradient in this step; None if all of them have."""
    rounding: Any
    """How far, relative to its size, rounding to the narrowest gradient's type may move each update; 0 if none."""
    unit: Any
    """``unit_of`` each radius."""


def totals(
    xp: Any,
    sums: Sequence[Sums],
    where: Sequence[Place],
    rules: Sequence[Rule],
    like: Any,
    *,
    present: Any = None,
    rounding: Sequence[float] = (),
    units: Sequence[float] = (),
    names: Sequence[str] | None = None,
) -> Totals:
    """Add up partial sums by scope; ``where`` says to which scope each belongs, and ``rules`` has the rule of each.

    ``names`` are those that ``measured`` finds, where somebody has kept them.
    """
    found: dict[str, Any] = {}
    for name in measured(rules) if names is None else names:
        values = [0.0 if getattr(each, name) is None else getattr(each, name) for each in sums]
        found[name] = by_scope(xp, values, where, len(rules), like)
    return Totals(Sums(**found), present, per_scope(xp, rounding or (0.0,), like), per_scope(xp, units or (1.0,), like))


def measured(rules: Sequence[Rule]) -> list[str]:
    """The sums that some of the rules need."""
    return [name for name in Sums._fields if any(name in rule.measures for rule in rules)]


def per_scope(xp: Any, values: Sequence[Any], like: Any) -> Any:
    """One value for each scope as a vector; or as it is if they are all the same, so that no device need see it."""
    first = values[0]
    for value in values:
        same = value is first or (
            isinstance(value, (int, float)) and isinstance(first, (int, float)) and value == first
        )
        if not same:
            return xp.vector(list(values), like)
    return first


def by_scope(xp: Any, values: Sequence[Any], where: Sequence[Place], width: int, like: Any) -> Any:
    """A vector with the sum of the values that belong to each scope."""
    groups: list[list[Any]] = [[] for _ in range(width)]
    for value, place in zip(values, where, strict=True):
        if isinstance(place, slice):
            for k, entry in enumerate(value, place.start):
                groups[k].append(entry)
        else:
            groups[place].append(value)
    found = []
    for group in groups:
        if len(group) == 1:
            found.append(group[0])
        else:
            found.append(xp.total(group) if group else 0.0)
    return xp.vector(found, like)


class Follower(NamedTuple):
    """A rule whose radius is not a number, and the scopes that have it."""

    rule: Rule
    size: Any
    """The number of its radius at this step."""
    mine: Any
    """Which scopes they are, as a boolean vector; None if all are."""


def rule_radii(xp: Any, followers: Sequence[Follower], radius: Any, past: Past | None, sums: Sums) -> Any:
    """The radius of every scope: ``radius``, but what a rule says where there is one."""
    for follower in followers:
        norm, weight = _norms(xp, follower, sums)
        said = follower.rule.region.rule.radius(xp, past, follower.size, norm, weight)
        said = xp.astype(said, norm.dtype)
        radius = said if follower.mine is None else xp.where(follower.mine, said, radius)
    return radius


def rule_pasts(xp: Any, followers: Sequence[Follower], past: Past, found: "Totals", skip: Any) -> Past:
    """What the rules remember after the step."""
    moved = past
    for follower in followers:
        rule = follower.rule.region.rule
        if not rule.follows:
            continue
        norm, _ = _norms(xp, follower, found.sums)
        own = rule.followed(xp, past, follower.size, norm)
        moved = _chosen(xp, follower.mine, own, moved)
    for stays in (skip, None if found.present is None else ~found.present):
        if stays is not None:
            moved = _chosen(xp, stays, past, moved)
    return Past.each(lambda new, old: xp.astype(new, old.dtype), moved, past)


def _norms(xp: Any, follower: Follower, sums: Sums) -> tuple[Any, Any]:
    """(norm of the gradients, norm of the weights) of a rule's scopes; 0 elsewhere."""
    squares = sums.grad_sq if follower.rule.measures_gradient else sums.total_sq
    weight = None if sums.weight_sq is None else xp.sqrt(sums.weight_sq)
    norm = xp.sqrt(squares)
    return norm if follower.mine is None else xp.where(follower.mine, norm, 0.0), weight


def _chosen(xp: Any, which: Any, one: Past, other: Past) -> Past:
    """Scope by scope one past or the other."""
    if which is None:
        return one

    def choose(x: Any, y: Any) -> Any:
        wide = len(x.shape) == 2 and len(which.shape) == 1
        return xp.where(which[:, None] if wide else which, x, y)

    return Past.each(choose, one, other)


def decide_all(
    xp: Any, rules: Sequence[Rule], found: Totals, radius: Any, memory: Memory | None, skip: Any, like: Any
) -> tuple[Scaling, Memory | None]:
    """The scaling of every scope, and the policy's memory; ``rules`` has the rule of each, all with one policy."""
    policy, joint = rules[0].policy, [rule.region.joint for rule in rules]
    scaling, moved = Scaling(), memory
    if any(joint):
        scaling, moved = decide(xp, policy, found.sums, radius, memory, skip, found.rounding, found.unit)
    if not all(joint):
        single, moved_too = decide_coordinates(xp, policy, found.sums, memory, skip)
        if any(joint):
            which = xp.vector([float(each) for each in joint], like) > 0.0
            scaling = _merged(xp, which, scaling, single)
            if moved is not None and moved_too is not None:
                moved = Memory.each(lambda x, y: xp.where(which, x, y), moved, moved_too)
        else:
            scaling, moved = single, moved_too
    if memory is None or moved is None:
        return scaling, memory
    moved = Memory(
        xp.astype(moved.average, memory.average.dtype),
        xp.astype(moved.count, memory.count.dtype),
        None if moved.noise is None else xp.astype(moved.noise, memory.noise.dtype),
    )
    if found.present is not None:  # without a gradient nothing was learned
        moved = Memory.each(lambda new, old: xp.where(found.present, new, old), moved, memory)
    return scaling, moved


def _merged(xp: Any, which: Any, joint: Scaling, single: Scaling) -> Scaling:
    """Scalars of norms where ``which`` says so, and of what is clipped coordinate by coordinate elsewhere."""
    back = None if joint.back is None else xp.where(which, joint.back, single.back)
    dropped = None if joint.dropped is None else xp.where(which, joint.dropped, 0.0)
    return joint._replace(taken=xp.where(which, joint.taken, single.taken), back=back, dropped=dropped)


class Figures(NamedTuple):
    """The sums behind the metrics: an entry for each scope, and a last one for all that is clipped by coordinates.

    All of them add up over ranks, but ``ratio``, which is one number: the largest so far.
    """

    sums: Diagnosis
    radius: Any = None
    clipped: Any = None
    """Of each scope; None if there is no norm."""


def figures(
    xp: Any,
    diagnoses: Sequence[Diagnosis],
    where: Sequence[Place],
    width: int,
    like: Any,
    radius: Any = None,
    clipped: Any = None,
) -> Figures:
    """Add up what was seen while a step was done."""
    places = [width if place == NO_SCOPE else place for place in where]
    columns = [
        by_scope(xp, [getattr(each, name) for each in diagnoses], places, width + 1, like)
        for name in Diagnosis._fields[:-1]
    ]
    worst: Any = 0.0
    for each in diagnoses:
        if not (isinstance(each.ratio, (int, float)) and each.ratio == 0.0):
            worst = each.ratio if isinstance(worst, float) and worst == 0.0 else xp.maximum(worst, each.ratio)
    return Figures(Diagnosis._make([*columns, xp.vector([worst], like)]), radius, clipped)


def finished(xp: Any, found: Figures, like: Any, which: Any = True) -> Figures:
    """The same with these scopes (all, or those where a vector says so) completed and moved into the last entry."""
    if found.clipped is None:
        return found
    columns = Diagnosis._make([*(column[:-1] for column in found.sums[:-1]), found.sums.ratio])
    done = of_scopes(xp, columns, found.radius, found.clipped)
    there = (columns.size > 0.0) & which
    rest = [xp.where(there, 0.0, column) for column in columns[:-1]]
    gone = [xp.sum(xp.where(there, column, 0.0)) for column in done[:-1]]
    sums = [
        xp.concat([left, xp.vector([new + old[-1]], like)], like)
        for left, new, old in zip(rest, gone, found.sums[:-1], strict=True)
    ]
    ratios = xp.concat([found.sums.ratio, xp.where(there, done.ratio, 0.0)], like)
    return found._replace(sums=Diagnosis._make([*sums, xp.vector([xp.max(ratios)], like)]))


def metrics(xp: Any, found: Figures, like: Any) -> Any:
    """The metrics named in ``LAST_STEP``, as one small vector."""
    sums = finished(xp, found, like).sums
    return xp.vector(list(last_step(xp, Diagnosis._make([column[-1] for column in sums]))), like)
