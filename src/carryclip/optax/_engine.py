"""One step over all leaves, as a pure function: gradient -> measure -> decide -> apply -> update and state."""

import operator
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from carryclip import scopes
from carryclip.algorithm import Buffers, Outcome, Rule, apply, measure
from carryclip.optax._layout import Layout, Leaf
from carryclip.optax._namespace import RowsNamespace, xp
from carryclip.policy import Memory, Scaling, Sums
from carryclip.radius import Past
from carryclip.scopes import NO_SCOPE, Table, Totals


class Job(NamedTuple):
    """A gradient that takes part in this step, as plain real arrays."""

    leaf: Leaf
    rule: Rule
    gradient: jax.Array
    buffers: Buffers
    sizes: tuple[Any, ...]
    dtype: Any
    seed: Any
    weights: Any = None
    """The parameter, if its radius looks at it."""


class Result(NamedTuple):
    """What a step leaves: one (update, buffers) per job, the memory, and the figures to account for."""

    outcomes: list[tuple[jax.Array, Buffers]]
    memory: Memory | None
    past: Past | None
    skip: Any
    dropped: Any
    """Norm of what the policies dropped."""
    figures: Callable[[], jax.Array]
    """Measures the step: a vector of the metrics."""


def run(
    jobs: list[Job],
    layout: Layout,
    table: Table,
    memory: Memory | None,
    past: Past | None,
    axis_name: Any,
    *,
    tally: bool,
) -> Result:
    """Clip the gradients of all jobs; nothing is decided on the host.

    ``tally`` adds up what policies drop.
    """
    sums = [_measured(job) for job in jobs]
    scoped = [(job, s) for job, s in zip(jobs, sums, strict=True) if job.leaf.scope != NO_SCOPE]
    found = _totals(scoped, layout, table) if scoped else None
    skip = _skip(jobs, sums, found, layout, table, axis_name)
    scaling = radius = None
    if found is not None:
        like = jnp.result_type(*(job.dtype for job, _ in scoped))
        followers = _followers(scoped, table, like)
        radius = scopes.rule_radii(xp, followers, _radii(scoped, layout, table, found), past, found.sums)
        if past is not None:
            past = scopes.rule_pasts(xp, followers, lax.stop_gradient(past), found, skip)
        scaling, memory = scopes.decide_all(xp, table, found, radius, memory, skip, like)
        if skip is not None:  # a skipped step sends 0 anyway, and 0·NaN would spoil its derivative
            calm = {name: jnp.where(skip, 1.0, value) for name, value in _factors(scaling).items()}
            scaling = scaling._replace(**calm)

    def applied(job: Job, **wanted: Any) -> Outcome:
        own = None if job.leaf.scope == NO_SCOPE or scaling is None else _own(scaling, job)
        space = _space(job.leaf)
        given = job.gradient, job.buffers, job.sizes, own, skip, job.dtype
        return apply(space, job.rule, *given, seed=job.seed, **wanted)

    def figures() -> jax.Array:
        seen: list[Any] = [applied(job, inspect=True).diagnosis for job in jobs]
        like = jnp.result_type(*(job.dtype for job in jobs))
        where = [job.leaf.span if job.rule.region.joint else NO_SCOPE for job in jobs]
        clipped = None if scaling is None else scaling.clipped
        width = layout.width if clipped is not None else 0
        return scopes.metrics(xp, scopes.figures(xp, seen, where, width, like, radius, clipped), like)

    outcomes = [applied(job, tally=tally) for job in jobs]
    dropped = [o.dropped_sq for o in outcomes if o.dropped_sq is not None]
    if tally and scaling is not None and scaling.dropped is not None:
        dropped.append(xp.sum(scaling.dropped**2))
    amount = xp.sqrt(jnp.sum(jnp.stack(dropped))) if dropped else None
    return Result([(o.update, o.buffers) for o in outcomes], memory, past, skip, amount, figures)


def _measured(job: Job) -> Sums:
    space, unit = _space(job.leaf), job.rule.unit(job.sizes)
    sums = measure(space, job.rule, job.gradient, job.buffers, job.dtype, unit, sizes=job.sizes)
    if job.weights is None:
        return sums
    weights = xp.astype(job.weights, job.dtype)
    return sums._replace(weight_sq=space.inner(weights, weights))


def _space(leaf: Leaf) -> Any:
    """The array namespace, with a sum for each row where these are vectors."""
    return RowsNamespace(leaf.axis) if leaf.rows else xp


def _followers(scoped: list[tuple[Job, Sums]], table: Table, like: Any) -> list[scopes.Follower]:
    """The rules whose radius is not a number, with what they are given at this step."""
    found: list[scopes.Follower] = []
    for job, _ in scoped:
        if job.rule.region.rule is None or any(job.rule is known.rule for known in found):
            continue
        mine = table.which(xp, partial(operator.is_, job.rule), like)
        found.append(scopes.Follower(job.rule, job.sizes[0], mine))
    return found


def _factors(scaling: Scaling) -> dict[str, Any]:
    """The scalars that arrays are multiplied with."""
    wanted = ("scale", "keep", "base", "taken", "back", "held")
    return {name: getattr(scaling, name) for name in wanted if hasattr(getattr(scaling, name), "shape")}


def guarded(values: jax.Array) -> jax.Array:
    """The same values, but nothing is differentiated by those that are not finite: 0·inf would be NaN."""
    return jnp.where(jnp.isfinite(values), values, lax.stop_gradient(values))


def _totals(joint: list[tuple[Job, Sums]], layout: Layout, table: Table) -> Totals:
    """The sums of each scope, and what is known of it beforehand."""
    runs, place = _runs(layout), len(layout.scopes)
    rounding, units, held = [0.0] * place, [1.0] * place, [False] * place
    for job, _ in joint:
        run = runs[job.leaf.scope]
        held[run], units[run] = True, job.rule.unit(job.sizes)
        if job.gradient.dtype != job.dtype:
            rounding[run] = max(rounding[run], float(jnp.finfo(job.gradient.dtype).eps) / 2)
    like = jnp.result_type(*(job.dtype for job, _ in joint))
    found = scopes.totals(
        xp,
        [sums for _, sums in joint],
        [job.leaf.span for job, _ in joint],
        table,
        like,
        present=None if all(held) else jnp.repeat(jnp.array(held), np.array(table.counts)),
        rounding=rounding,
        units=units,
    )
    return found._replace(sums=found.sums._replace(total_sq=guarded(found.sums.total_sq)))


def _radii(joint: list[tuple[Job, Sums]], layout: Layout, table: Table, found: Totals) -> Any:
    """The radius of each vector, or one for all; of other scopes, or if it takes no part, it is of no interest."""
    runs = _runs(layout)
    by_run = {runs[job.leaf.scope]: job.sizes[0] for job, _ in joint if job.rule.region.joint}
    absent = next(iter(by_run.values()), 1.0)
    radii = [by_run.get(run, absent) for run in range(len(layout.scopes))]
    return table.spread(xp, radii, found.sums.total_sq)


def _runs(layout: Layout) -> dict[int, int]:
    """The number of the run that begins at a scope."""
    starts = accumulate((count for _, count in layout.scopes[:-1]), initial=0)
    return {start: run for run, start in enumerate(starts)}


def _skip(jobs: list[Job], sums: list[Sums], found: Totals | None, layout: Layout, table: Table, axis_name: Any) -> Any:
    """Whether this step must not count; None if nothing can stop it. Devices along ``axis_name`` decide alike."""
    flags = [jnp.any(s.bad) for job, s in zip(jobs, sums, strict=True) if s.bad is not None and job.rule.can_reject]
    norms = [rule for rule in table.rules if rule.region.joint]
    if found is not None and norms and norms[0].can_reject:
        squares, which = found.sums.total_sq, table.which(xp, lambda rule: rule.region.joint, found.sums.total_sq)
        flags.append(~xp.allfinite(squares if which is None else jnp.where(which, squares, 0.0)))
    if not flags:
        return None
    bad = jnp.any(jnp.stack(flags))
    return bad if axis_name is None else lax.pmax(bad.astype(jnp.int32), axis_name) > 0


def _own(scaling: Scaling, job: Job) -> Scaling:
    """A vector's scalars, in the precision of one of its arrays."""
    span = job.leaf.span
    shape = [job.leaf.rows if k == job.leaf.axis else 1 for k in range(job.gradient.ndim)] if job.leaf.rows else ()

    def own(values: Any) -> Any:
        return values[span].astype(job.dtype).reshape(shape) if hasattr(values, "shape") else values

    used = scaling._replace(dropped=None, clipped=None)
    return Scaling(*(own(values) for values in used))
