"""What belongs to whole scopes: adding up the sums of their arrays, deciding on all of them, and the metrics of a step.

A scope is what is clipped as one vector under a ``Norm``: all parameters, a group, a tensor. All scopes of a clipper
stand in one table, whichever region they belong to, and everything here has one entry for each. What a region clips
coordinate by coordinate is one more scope if the carry policy keeps a memory of it; else it has none, and where a place
is asked for it gives ``NO_SCOPE``. A tensor whose rows are scopes has a slice of the table, and one sum for each entry
of it.

Beside what ``carryclip.algorithm`` asks of ``xp``, this needs ``vector(values, like)`` (a list of scalars as a vector),
``full(count, value, like)`` (a vector of equal numbers), ``concat(values, like)`` (vectors end to end),
``total(values)`` (the sum of a list of scalars), ``max`` and ``maximum``; and ``added_at(vector, numbers, values)``
where places are vectors of numbers. ``like`` is whatever the backend makes
vectors by, such as a type.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from carryclip.algorithm import Rule, decide, decide_coordinates
from carryclip.diagnosis import Diagnosis, last_step, of_scopes
from carryclip.policy import Memory, Scaling, Sums
from carryclip.radius import Past, Radius

NO_SCOPE = -1

Place = Any
"""Which entry of the table (a number), or which entries (a slice, or a vector of their numbers, each once)."""


class Table:
    """All scopes: the rule of each run of them, and how many a run has; more than one only where rows are scopes.

    There may be a hundred thousand rows, so nothing here has a Python object for each.
    """

    def __init__(self, rules: Sequence[Rule], counts: Sequence[int]) -> None:
        self.rules = list(rules)
        self.counts = list(counts)
        self.width = sum(counts)
        self.single = not any(rule.region.split for rule in self.rules)
        """Every run is one scope, and every place a number."""
        self.names = [name for name in Sums._fields if any(name in rule.measures for rule in self.rules)]
        """The sums that some of the rules need."""
        joint = [rule.region.joint for rule in self.rules]
        self.all_joint, self.any_joint = all(joint), any(joint)

    def spread(self, xp: Any, values: Sequence[Any], like: Any) -> Any:
        """One value for each run as a vector over all scopes; or as it is if all are the same."""
        found = per_scope(xp, values, like) if self.single or len(values) == 1 else _same(values)
        if found is not None:
            return found
        return xp.concat([xp.full(n, value, like) for value, n in zip(values, self.counts, strict=True)], like)

    def which(self, xp: Any, chosen: Callable[[Rule], bool], like: Any) -> Any:
        """The scopes whose rule is chosen; None if all are."""
        mine = [chosen(rule) for rule in self.rules]
        return None if all(mine) else self.marked(xp, mine, like)

    def marked(self, xp: Any, chosen: Sequence[bool], like: Any) -> Any:
        """The scopes of the runs that are chosen, as a boolean vector."""
        found = self.spread(xp, [float(each) for each in chosen], like)
        return (xp.full(self.width, found, like) if isinstance(found, float) else found) > 0.0


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
    table: Table,
    like: Any,
    *,
    present: Any = None,
    rounding: Sequence[float] = (),
    units: Sequence[float] = (),
) -> Totals:
    """Add up partial sums by scope; ``where`` says to which scopes each belongs. ``rounding`` and ``units`` of runs."""
    found: dict[str, Any] = {}
    add_up = by_scope if table.single else by_slices
    for name in table.names:
        values = [0.0 if getattr(each, name) is None else getattr(each, name) for each in sums]
        found[name] = add_up(xp, values, where, table.width, like)
    rounds, scales = (table.spread(xp, given, like) for given in (rounding or (0.0,), units or (1.0,)))
    return Totals(Sums(**found), present, rounds, scales)


def per_scope(xp: Any, values: Sequence[Any], like: Any) -> Any:
    """One value for each scope as a vector; or as it is if they are all the same, so that no device need see it."""
    found = _same(values)
    return xp.vector(list(values), like) if found is None else found


def _same(values: Sequence[Any]) -> Any:
    """The value that all of them are; None if there is none."""
    first = values[0]
    for value in values:
        same = value is first or (
            isinstance(value, (int, float)) and isinstance(first, (int, float)) and value == first
        )
        if not same:
            return None
    return first


def by_scope(xp: Any, values: Sequence[Any], where: Sequence[Any], width: int, like: Any) -> Any:
    """A vector with the sum of the values that belong to each scope."""
    groups: list[list[Any]] = [[] for _ in range(width)]
    for value, place in zip(values, where, strict=True):
        groups[place].append(value)
    found = []
    for group in groups:
        if len(group) == 1:
            found.append(group[0])
        else:
            found.append(xp.total(group) if group else 0.0)
    return xp.vector(found, like)


def by_slices(xp: Any, values: Sequence[Any], where: Sequence[Any], width: int, like: Any) -> Any:
    """The same where some have an entry for each row: parts of the table end to end, with zeros between them."""
    listed = [(value, place) for value, place in zip(values, where, strict=True) if not isinstance(place, (int, slice))]
    if listed:
        values = [value for value, place in zip(values, where, strict=True) if isinstance(place, (int, slice))]
        where = [place for place in where if isinstance(place, (int, slice))]
    found = _end_to_end(xp, values, where, width, like)
    for value, place in listed:
        found = xp.added_at(found, place, value)
    return found


def _end_to_end(xp: Any, values: Sequence[Any], where: Sequence[Any], width: int, like: Any) -> Any:
    """The same where each has a number or a slice."""
    spans = [place if isinstance(place, slice) else slice(place, place + 1) for place in where]
    edges = sorted({0, width, *(edge for span in spans for edge in (span.start, span.stop))})
    by_start: dict[int, list[int]] = {}
    for k, span in enumerate(spans):
        if span.start == span.stop:  # a rank may have no row of a tensor
            continue
        by_start.setdefault(span.start, []).append(k)
    open_now: list[int] = []
    parts = []
    for start, stop in pairwise(edges):
        open_now = [k for k in open_now if spans[k].stop > start] + by_start.get(start, [])
        part = xp.full(stop - start, 0.0, like)
        for k in open_now:
            value = values[k]
            if getattr(value, "shape", ()) != ():
                value = value[start - spans[k].start : stop - spans[k].start]
            part = part + value
        parts.append(part)
    return xp.concat(parts, like)


class Follower(NamedTuple):
    """A rule whose radius is not a number, and the scopes that have it."""

    rule: Rule
    size: Any
    """The number of its radius at this step."""
    mine: Any
    """Which scopes they are, as a boolean vector; None if all are."""

    @property
    def radius(self) -> Radius:
        """What says the radius."""
        assert self.rule.region.rule is not None
        return self.rule.region.rule


def rule_radii(xp: Any, followers: Sequence[Follower], radius: Any, past: Past | None, sums: Sums) -> Any:
    """The radius of every scope: ``radius``, but what a rule says where there is one."""
    for follower in followers:
        norm, weight = _norms(xp, follower, sums)
        said = follower.radius.radius(xp, past or Past(None), follower.size, norm, weight)
        said = xp.astype(said, norm.dtype)
        radius = said if follower.mine is None else xp.where(follower.mine, said, radius)
    return radius


def rule_pasts(xp: Any, followers: Sequence[Follower], past: Past, found: "Totals", skip: Any) -> Past:
    """What the rules remember after the step."""
    moved = past
    for follower in followers:
        if not follower.radius.follows:
            continue
        norm, _ = _norms(xp, follower, found.sums)
        own = follower.radius.followed(xp, past, follower.size, norm)
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
    xp: Any, table: Table, found: Totals, radius: Any, memory: Memory | None, skip: Any, like: Any
) -> tuple[Scaling, Memory | None]:
    """The scaling of every scope, and the policy's memory; all rules have one policy."""
    policy = table.rules[0].policy
    scaling, moved = Scaling(), memory
    if table.any_joint:
        scaling, moved = decide(xp, policy, found.sums, radius, memory, skip, found.rounding, found.unit)
    if not table.all_joint:
        single, moved_too = decide_coordinates(xp, policy, found.sums, memory, skip)
        if table.any_joint:
            which = table.which(xp, lambda rule: rule.region.joint, like)
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
    places = [width if isinstance(place, int) and place == NO_SCOPE else place for place in where]
    add_up = by_scope if all([isinstance(place, int) for place in places]) else by_slices
    columns = [
        add_up(xp, [getattr(each, name) for each in diagnoses], places, width + 1, like)
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
