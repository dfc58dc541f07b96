"""One step over all leaves, as a pure function: gradient -> measure -> decide -> apply -> update and state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from carryclip.algorithm import Buffers, Feed, Outcome, Rule, Sums, Verdict, apply, decide, measure
from carryclip.diagnosis import Diagnosis, last_step, of_scopes
from carryclip.optax._layout import Leaf
from carryclip.optax._namespace import xp


class Job(NamedTuple):
    """A gradient that takes part in this step, as plain real arrays."""

    leaf: Leaf
    rule: Rule
    gradient: jax.Array
    buffers: Buffers
    sizes: tuple[Any, ...]
    dtype: Any
    seed: Any


class Result(NamedTuple):
    """What a step leaves: one (update, buffers) per job, the gates, and the figures to account for."""

    outcomes: list[tuple[jax.Array, Buffers]]
    gates: list[Feed | None]
    skip: Any
    dropped: Any
    """Norm of what the policies dropped."""
    figures: Callable[[], jax.Array]
    """Measures the step: a vector of the metrics."""


class Scopes(NamedTuple):
    """The vectors of one rule that take part, what is decided of each, and the radius."""

    place: dict[int, int]
    verdict: Verdict
    radius: Any


def run(jobs: list[Job], rules: list[Rule], gates: list[Feed | None], axis_name: Any, *, tally: bool) -> Result:
    """Clip the gradients of all jobs; nothing is decided on the host. ``tally`` adds up what policies drop."""
    sums = [measure(xp, job.rule, job.gradient, job.buffers.carry, job.dtype) for job in jobs]
    members = [[(job, s) for job, s in zip(jobs, sums, strict=True) if job.leaf.rule == k] for k in range(len(rules))]
    totals = {k: _totals(part) for k, part in enumerate(members) if part and rules[k].region.joint}
    skip = _skip(rules, jobs, sums, totals, axis_name)
    scopes, gates = {}, list(gates)
    for k, (place, total) in totals.items():
        radius = members[k][0][0].sizes[0]
        verdict, gates[k] = _decide(rules[k], total, place, radius, gates[k], skip, members[k])
        if skip is not None:  # a skipped step sends 0 anyway, and 0·NaN would spoil its derivative
            verdict = verdict._replace(scale=jnp.where(skip, 1.0, verdict.scale))
        scopes[k] = Scopes(place, verdict, radius)

    def applied(job: Job, **wanted: Any) -> Outcome:
        verdict = _own(scopes[job.leaf.rule], job) if job.leaf.rule in scopes else None
        return apply(
            xp, job.rule, job.gradient, job.buffers, job.sizes, verdict, skip, job.dtype, seed=job.seed, **wanted
        )

    def figures() -> jax.Array:
        return _figures([(job, applied(job, inspect=True).diagnosis) for job in jobs], rules, scopes)

    outcomes = [applied(job, tally=tally) for job in jobs]
    dropped = [o.dropped_sq for o in outcomes if o.dropped_sq is not None]
    dropped += [xp.sum(s.verdict.dropped**2) for s in scopes.values() if tally and s.verdict.dropped is not None]
    amount = xp.sqrt(jnp.sum(jnp.stack(dropped))) if dropped else None
    return Result([(o.update, o.buffers) for o in outcomes], gates, skip, amount, figures)


def guarded(values: jax.Array) -> jax.Array:
    """The same values, but nothing is differentiated by those that are not finite: 0·inf would be NaN."""
    return jnp.where(jnp.isfinite(values), values, lax.stop_gradient(values))


def _totals(members: list[tuple[Job, Sums]]) -> tuple[dict[int, int], Sums]:
    """(place of each vector that takes part, the sums of each)."""
    place: dict[int, int] = {}
    for job, _ in members:
        place.setdefault(job.leaf.scope, len(place))
    where = [place[job.leaf.scope] for job, _ in members]
    dtype = _widest([job for job, _ in members])

    def total(name: str) -> Any:
        column = [getattr(sums, name) for _, sums in members]
        return None if column[0] is None else _by_scope(column, where, len(place), dtype)

    return place, Sums(None, guarded(total("total_sq")), total("carry_sq"), total("dot"))


def _skip(rules: list[Rule], jobs: list[Job], sums: list[Sums], totals: dict[int, Any], axis_name: Any) -> Any:
    """Whether this step must not count; None if nothing can stop it. Devices along ``axis_name`` decide alike."""
    flags = [s.bad for job, s in zip(jobs, sums, strict=True) if s.bad is not None and job.rule.can_reject]
    flags += [~xp.allfinite(total.total_sq) for k, (_, total) in totals.items() if rules[k].can_reject]
    if not flags:
        return None
    bad = jnp.any(jnp.stack(flags))
    return bad if axis_name is None else lax.pmax(bad.astype(jnp.int32), axis_name) > 0


def _decide(
    rule: Rule, total: Sums, place: dict[int, int], radius: Any, gate: Feed | None, skip: Any, members: list
) -> tuple[Verdict, Feed | None]:
    """Scalars per vector, and the gate's memory moved on for those that take part."""
    rounding = dict.fromkeys(place, 0.0)
    for job, _ in members:
        if job.gradient.dtype != job.dtype:
            rounding[job.leaf.scope] = max(rounding[job.leaf.scope], float(jnp.finfo(job.gradient.dtype).eps) / 2)
    alike = len(set(rounding.values())) == 1
    allowed = next(iter(rounding.values())) if alike else jnp.array(list(rounding.values()), total.total_sq.dtype)
    present = list(place)
    whole = gate is None or present == list(range(gate.count.shape[0]))
    feed = gate if whole or gate is None else Feed(*(x[jnp.array(present)] for x in gate))
    verdict, moved = decide(xp, rule, total, radius, feed, skip, allowed)
    if gate is None or moved is None:
        return verdict, gate
    new = Feed(*(m.astype(old.dtype) for m, old in zip(moved, gate, strict=True)))
    if whole:
        return verdict, new
    return verdict, Feed(*(old.at[jnp.array(present)].set(m) for old, m in zip(gate, new, strict=True)))


def _own(scope: Scopes, job: Job) -> Verdict:
    """A vector's scalars, in the precision of one of its arrays."""
    k = scope.place[job.leaf.scope]
    keep = scope.verdict.keep
    keep = keep[k].astype(job.dtype) if hasattr(keep, "shape") else keep
    return Verdict(scale=scope.verdict.scale[k].astype(job.dtype), keep=keep)


def _figures(measured: list[tuple[Job, Any]], rules: list[Rule], scopes: dict[int, Scopes]) -> jax.Array:
    """The metrics of a step as one small vector."""
    dtype = _widest([job for job, _ in measured])
    parts = []
    for k in range(len(rules)):
        members = [(job, d) for job, d in measured if job.leaf.rule == k]
        if not members:
            continue
        place = scopes[k].place if k in scopes else {}
        where = [place.get(job.leaf.scope, 0) for job, _ in members]
        columns = [[d[n] for _, d in members] for n in range(len(Diagnosis._fields))]
        summed = [_by_scope(column, where, len(place) or 1, dtype) for column in columns[:-1]]
        worst = jnp.max(jnp.stack([jnp.asarray(r, dtype) for r in columns[-1]]))[None]
        part = Diagnosis._make([*summed, worst])
        parts.append(of_scopes(xp, part, scopes[k].radius, scopes[k].verdict.clipped) if k in scopes else part)
    columns = [jnp.concatenate([getattr(part, name) for part in parts]) for name in Diagnosis._fields]
    return jnp.stack(last_step(xp, Diagnosis._make([*map(jnp.sum, columns[:-1]), jnp.max(columns[-1])])))


def _widest(jobs: list[Job]) -> Any:
    return jnp.result_type(*(job.dtype for job in jobs))


def _by_scope(column: list[Any], where: list[int], width: int, dtype: Any) -> jax.Array:
    """Add up scalars that belong to the same vector."""
    groups: list[list[jax.Array]] = [[] for _ in range(width)]
    for value, k in zip(column, where, strict=True):
        groups[k].append(jnp.asarray(value, dtype))
    return jnp.stack([group[0] if len(group) == 1 else jnp.sum(jnp.stack(group)) for group in groups])
