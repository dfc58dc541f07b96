"""What belongs to whole scopes: adding up the sums of their arrays, deciding on all of them, and the metrics of a step.

A scope is what is clipped as one vector under a ``Norm``: all parameters, a group, a tensor. All scopes of a clipper
stand in one table, whichever region they belong to, and everything here has one entry for each. Coordinate-wise
regions have no scope; where a place is asked for they give ``NO_SCOPE``. A backend with scopes finer than an array,
such as rows, passes a slice of the table and one sum for each entry of it.

Beside what ``carryclip.algorithm`` asks of ``xp``, this needs ``vector(values, like)`` (a list of scalars as a vector),
``concat(values, like)`` (vectors end to end), ``total(values)`` (the sum of a list of scalars), ``max`` and
``maximum``. ``like`` is whatever the backend makes vectors by, such as a type.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from carryclip.algorithm import Feed, Rule, Scaling, Sums, decide
from carryclip.diagnosis import Diagnosis, last_step, of_scopes

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
    width: int,
    like: Any,
    *,
    present: Any = None,
    rounding: Sequence[float] = (),
    units: Sequence[float] = (),
) -> Totals:
    """Add up partial sums by scope; ``where`` says to which of the ``width`` scopes each belongs."""

    def column(name: str) -> Any:
        return by_scope(xp, [getattr(each, name) for each in sums], where, width, like)

    gated = bool(sums) and sums[0].dot is not None
    found = Sums(None, column("total_sq"), *((column("carry_sq"), column("dot")) if gated else ()))
    return Totals(found, present, per_scope(xp, rounding or (0.0,), like), per_scope(xp, units or (1.0,), like))


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


def decide_all(
    xp: Any, rule: Rule, found: Totals, radius: Any, feed: Feed | None, skip: Any
) -> tuple[Scaling, Feed | None]:
    """The scaling of every scope, and the gates' memory; ``rule`` is any of them, as they share their policy."""
    scaling, moved = decide(xp, rule.policy, found.sums, radius, feed, skip, found.rounding, found.unit)
    if feed is None or moved is None:
        return scaling, feed
    moved = Feed(*(xp.astype(new, old.dtype) for new, old in zip(moved, feed, strict=True)))
    if found.present is not None:  # a gate that has seen no gradient has learned nothing
        moved = Feed(*(xp.where(found.present, new, old) for new, old in zip(moved, feed, strict=True)))
    return scaling, moved


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
