"""One step over all leaves, as a pure function: gradient -> measure -> decide -> apply -> update and state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from carryclip import scopes
from carryclip.algorithm import Buffers, Outcome, Rule, apply, measure
from carryclip.optax._layout import Layout, Leaf
from carryclip.optax._namespace import xp
from carryclip.policy import Memory, Scaling, Sums
from carryclip.radius import Past
from carryclip.scopes import NO_SCOPE, Totals


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
    rules: list[Rule],
    memory: Memory | None,
    past: Past | None,
    axis_name: Any,
    *,
    tally: bool,
) -> Result:
    """Clip the gradients of all jobs; nothing is decided on the host.

    ``rules`` has the rule of each scope. ``tally`` adds up what policies drop.
    """
    sums = [_measured(job) for job in jobs]
    scoped = [(job, s) for job, s in zip(jobs, sums, strict=True) if job.leaf.scope != NO_SCOPE]
    found = _totals(scoped, rules) if scoped else None
    skip = _skip(jobs, sums, found, rules, axis_name)
    scaling = radius = None
    if found is not None:
        like = jnp.result_type(*(job.dtype for job, _ in scoped))
        followers = _followers(scoped, rules, like)
        radius = scopes.rule_radii(xp, followers, _radii(scoped, layout, found), past, found.sums)
        if past is not None:
            past = scopes.rule_pasts(xp, followers, lax.stop_gradient(past), found, skip)
        scaling, memory = scopes.decide_all(xp, rules, found, radius, memory, skip, like)
        if skip is not None:  # a skipped step sends 0 anyway, and 0·NaN would spoil its derivative
            calm = {name: jnp.where(skip, 1.0, value) for name, value in _factors(scaling).items()}
            scaling = scaling._replace(**calm)

    def applied(job: Job, **wanted: Any) -> Outcome:
        own = None if job.leaf.scope == NO_SCOPE or scaling is None else _own(scaling, job)
        return apply(xp, job.rule, job.gradient, job.buffers, job.sizes, own, skip, job.dtype, seed=job.seed, **wanted)

    def figures() -> jax.Array:
        seen: list[Any] = [applied(job, inspect=True).diagnosis for job in jobs]
        like = jnp.result_type(*(job.dtype for job in jobs))
        where = [job.leaf.scope if job.rule.region.joint else NO_SCOPE for job in jobs]
        clipped = None if scaling is None else scaling.clipped
        width = len(layout.scopes) if clipped is not None else 0
        return scopes.metrics(xp, scopes.figures(xp, seen, where, width, like, radius, clipped), like)

    outcomes = [applied(job, tally=tally) for job in jobs]
    dropped = [o.dropped_sq for o in outcomes if o.dropped_sq is not None]
    if tally and scaling is not None and scaling.dropped is not None:
        dropped.append(xp.sum(scaling.dropped**2))
    amount = xp.sqrt(jnp.sum(jnp.stack(dropped))) if dropped else None
    return Result([(o.update, o.buffers) for o in outcomes], memory, past, skip, amount, figures)


def _measured(job: Job) -> Sums:
    sums = measure(xp, job.rule, job.gradient, job.buffers, job.dtype, job.rule.unit(job.sizes), sizes=job.sizes)
    if job.weights is None:
        return sums
    weights = xp.astype(job.weights, job.dtype)
    return sums._replace(weight_sq=xp.inner(weights, weights))


def _followers(scoped: list[tuple[Job, Sums]], rules: list[Rule], like: Any) -> list[scopes.Follower]:
    """The rules whose radius is not a number, with what they are given at this step."""
    found: list[scopes.Follower] = []
    for job, _ in scoped:
        if job.rule.region.rule is None or any(job.rule is known.rule for known in found):
            continue
        mine = [float(rule is job.rule) for rule in rules]
        found.append(scopes.Follower(job.rule, job.sizes[0], None if all(mine) else xp.vector(mine, like) > 0.0))
    return found


def _factors(scaling: Scaling) -> dict[str, Any]:
    """The scalars that arrays are multiplied with."""
    wanted = ("scale", "keep", "base", "taken", "back")
    return {name: getattr(scaling, name) for name in wanted if hasattr(getattr(scaling, name), "shape")}


def guarded(values: jax.Array) -> jax.Array:
    """The same values, but nothing is differentiated by those that are not finite: 0·inf would be NaN."""
    return jnp.where(jnp.isfinite(values), values, lax.stop_gradient(values))


def _totals(joint: list[tuple[Job, Sums]], rules: list[Rule]) -> Totals:
    """The sums of each scope, and what is known of it beforehand."""
    width = len(rules)
    rounding, units, held = [0.0] * width, [1.0] * width, [False] * width
    for job, _ in joint:
        scope = job.leaf.scope
        held[scope], units[scope] = True, job.rule.unit(job.sizes)
        if job.gradient.dtype != job.dtype:
            rounding[scope] = max(rounding[scope], float(jnp.finfo(job.gradient.dtype).eps) / 2)
    like = jnp.result_type(*(job.dtype for job, _ in joint))
    found = scopes.totals(
        xp,
        [sums for _, sums in joint],
        [job.leaf.scope for job, _ in joint],
        rules,
        like,
        present=None if all(held) else jnp.array(held),
        rounding=rounding,
        units=units,
    )
    return found._replace(sums=found.sums._replace(total_sq=guarded(found.sums.total_sq)))


def _radii(joint: list[tuple[Job, Sums]], layout: Layout, found: Totals) -> Any:
    """The radius of each vector, or one for all; of other scopes, or if it takes no part, it is of no interest."""
    by_scope = {job.leaf.scope: job.sizes[0] for job, _ in joint if job.rule.region.joint}
    absent = next(iter(by_scope.values()), 1.0)
    radii = [by_scope.get(scope, absent) for scope in range(len(layout.scopes))]
    return scopes.per_scope(xp, radii, found.sums.total_sq)


def _skip(jobs: list[Job], sums: list[Sums], found: Totals | None, rules: list[Rule], axis_name: Any) -> Any:
    """Whether this step must not count; None if nothing can stop it. Devices along ``axis_name`` decide alike."""
    flags = [s.bad for job, s in zip(jobs, sums, strict=True) if s.bad is not None and job.rule.can_reject]
    norms = [scope for scope, rule in enumerate(rules) if rule.region.joint]
    if found is not None and norms and rules[norms[0]].can_reject:
        squares = found.sums.total_sq
        flags.append(~xp.allfinite(squares if len(norms) == len(rules) else squares[jnp.array(norms)]))
    if not flags:
        return None
    bad = jnp.any(jnp.stack(flags))
    return bad if axis_name is None else lax.pmax(bad.astype(jnp.int32), axis_name) > 0


def _own(scaling: Scaling, job: Job) -> Scaling:
    """A vector's scalars, in the precision of one of its arrays."""
    scope = job.leaf.scope

    def own(values: Any) -> Any:
        return values[scope].astype(job.dtype) if hasattr(values, "shape") else values

    used = scaling._replace(dropped=None, clipped=None)
    return Scaling(*(own(values) for values in used))
