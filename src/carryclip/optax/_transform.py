"""``uclip`` as a gradient transformation: trees in, trees out; the step itself is ``_engine.run``."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from carryclip.algorithm import NonFinite
from carryclip.carry import DEFAULT, CarryPolicy, policy_of
from carryclip.diagnosis import LAST_STEP, Course, followed
from carryclip.optax._engine import Job, Result, run
from carryclip.optax._jobs import TREES, join, make_jobs, not_full, write, zeros
from carryclip.optax._layout import Rulebook, is_clippable, named_leaves, wide
from carryclip.optax._namespace import xp
from carryclip.optax._radii import check_sizes
from carryclip.optax._state import UClipState, Watch, kind_of, mark_of, no_past
from carryclip.policy import Memory
from carryclip.regions import Region
from carryclip.scopes import Table

Tree = Any


def uclip(
    region: Region | Mapping[Any, Region | None],
    carry: CarryPolicy = DEFAULT,
    nonfinite: NonFinite = "skip",
    *,
    groups: Tree | Callable[[Tree], Tree] | None = None,
    metrics_every: int = 0,
    axis_name: Any = None,
    carry_dtype: Any = None,
    moments_dtype: Any = None,
) -> optax.GradientTransformation:
    """Clip gradients and give back what is cut; a bad step sends zeros, so momentum and decay still act.

    With ``carry=True``, the paper's algorithm:

        u     = clip(g + carry, radius)
        carry = g + carry - u

    Put it first in ``optax.chain``. Guards and accumulation (``apply_if_finite``, ``MultiSteps``) go around the chain.

    Args:
        region: where updates must lie: ``Norm(1.0)``, ``Component(0.1)``, ...; or a mapping from labels to regions, in
            which None leaves a label alone.
        carry: what becomes of what is cut. The default adds back, a little at each step, the bias that
            it has measured, and is safe with momentum and Adam.
            ``Shrunk()`` and ``Drip()`` are such policies, False is plain clipping. True is the full carry of the paper;
            it, ``Gated()``, ``Capped(radii)`` and ``Leaky(kappa)`` are for SGD without momentum.
        nonfinite: what to do with inf and NaN: ``"skip"`` the step (the state stays, the update is 0), ``"zero"`` the
            bad entries, or ``"propagate"`` them.
        groups: labels for a mapping of regions and for ``Norm(over="group")``: a tree like the parameters' or a prefix
            of it, or a function from parameters to such a tree.
        metrics_every: measure the first step and then every so many: with 10 the 10th, 20th, ..., after which people
            log. 0 never, because XLA then needs no copies of the state and no branch.
        axis_name: inside ``shard_map`` or ``pmap``: devices along this axis skip a step together. A norm is that of the
            leaves a device sees.
        carry_dtype: ``"bfloat16"`` stores the carry in half the memory, rounded at random so that nothing is lost on
            average; the default is at least float32.
        moments_dtype: the same for moments and feed averages.

    >>> from carryclip import Norm
    >>> from carryclip.optax import uclip
    >>> tx = optax.chain(uclip(Norm(1.0), carry=True), optax.sgd(1.0))
    >>> state = tx.init(jnp.zeros(2))
    >>> for g in ([3.0, 0.0], [0.0, 0.0], [0.0, 0.0]):
    ...     updates, state = tx.update(jnp.array(g), state)
    ...     print(updates, state[0].carry)
    [-1. -0.] [2. 0.]
    [-1. -0.] [1. 0.]
    [-1. -0.] [0. 0.]
    """
    if nonfinite == "raise":
        raise ValueError(
            'nonfinite="raise" cannot work in JAX: a compiled function cannot raise. Use nonfinite="skip" and read '
            'carryclip.optax.metrics(state)["skipped_steps"], or wrap the step with jax.experimental.checkify and '
            "errors=checkify.float_checks."
        )
    _check_interval(metrics_every)
    book = Rulebook(region, carry, nonfinite, groups, carry_dtype, moments_dtype)
    watched = isinstance(metrics_every, jax.Array) or metrics_every > 0

    def init(params: Tree) -> UClipState:
        _, leaves, structure = named_leaves(params)
        layout = book.layout(params, [is_clippable(leaf) for leaf in leaves])
        check_sizes(book, layout, params, leaves)
        kinds = [wide(leaves[leaf.place]) for leaf in layout.leaves]
        real = jnp.finfo(jnp.result_type(*kinds)).dtype if kinds else jnp.dtype(jnp.float32)
        rows = [layout.vectors(number) for number, rule in enumerate(book.rules) if rule.remembers]
        return UClipState(
            step=jnp.zeros((), jnp.int32),
            skipped=None if nonfinite == "propagate" else jnp.zeros((), jnp.int32),
            dropped=jnp.zeros(2, real) if watched else None,
            **{name: zeros(book, name, layout, leaves, structure) for name in TREES},
            samples=jnp.zeros(len(leaves), jnp.int32) if "count" in book.buffers else None,
            gate=tuple(_no_memory(size, real, noisy=book.rules[0].policy.noisy) for size in rows),
            radii=no_past(book.rules, layout.width, real),
            averages=tuple(kind_of(rule.region.estimator) for rule in book.rules),
            policy=mark_of(policy_of(carry)),
            watch=_fresh(real) if watched else None,
        )

    def update(updates: Tree, state: UClipState, params: Tree | None = None) -> tuple[Tree, UClipState]:
        _, gradients, structure = named_leaves(updates)
        jobs, layout = make_jobs(book, updates, state, params)
        if not jobs:
            return updates, state._replace(step=optax.safe_increment(state.step))
        if axis_name is not None:
            state = state._replace(watch=_varying(state.watch, jobs))
        table = Table([book.rules[number] for number, _ in layout.scopes], [count for _, count in layout.scopes])
        past = None if state.radii is None else state.radii[1]
        past = None if past is None else past._replace(count=not_full(past.count))
        result = run(jobs, layout, table, _memory(state.gate), past, axis_name, tally=watched)
        for job, (sent, _) in zip(jobs, result.outcomes, strict=True):
            gradients[job.leaf.place] = join(sent, gradients[job.leaf.place])
        return structure.unflatten(gradients), _moved(state, jobs, result, metrics_every)

    return optax.GradientTransformation(cast(Any, init), cast(Any, update))


def _check_interval(metrics_every: Any) -> None:
    """A traced value is what ``inject_hyperparams`` makes of a number; it has nothing to check."""
    whole = isinstance(metrics_every, (int, np.integer)) and not isinstance(metrics_every, bool) and metrics_every >= 0
    if not whole and not isinstance(metrics_every, jax.Array):
        raise ValueError(f"metrics_every must be a whole number of steps, or 0 for never; got {metrics_every!r}.")


def _fresh(dtype: Any) -> Watch:
    return Watch(
        at=jnp.full((), -1, jnp.int32),
        last=jnp.full(len(LAST_STEP), jnp.nan, dtype),
        course=jnp.zeros(len(Course._fields), dtype),
        streak=jnp.zeros((), jnp.int32),
    )


def _moved(state: UClipState, jobs: list[Job], result: Result, metrics_every: Any) -> UClipState:
    """The state after a step."""
    skip = result.skip
    dropped = state.dropped
    if dropped is not None and result.dropped is not None:
        amount = result.dropped if skip is None else jnp.where(skip, 0.0, result.dropped)
        dropped = _added(dropped, amount.astype(dropped.dtype))
    return UClipState(
        step=optax.safe_increment(state.step),
        skipped=state.skipped if skip is None else state.skipped + skip,
        dropped=dropped,
        **{name: write(name, getattr(state, name), jobs, result.outcomes) for name in TREES},
        samples=_samples(state.samples, jobs, result),
        gate=_by_rule(result.memory, state.gate),
        radii=None if result.past is None else (state.radii[0], result.past),
        averages=state.averages,
        policy=state.policy,
        watch=None if state.watch is None else _watched(state.watch, state.step, result, metrics_every),
    )


def _added(total: jax.Array, amount: jax.Array) -> jax.Array:
    """A sum and what rounding has taken from it (Knuth's two-sum): alone it would stand still after a large addend."""
    old, lost = total[0], total[1]
    new = old + amount
    back = new - old
    return jnp.stack([new, lost + ((old - (new - back)) + (amount - back))])


def _no_memory(size: int, dtype: Any, *, noisy: bool) -> tuple[Any, ...]:
    """The memory of ``size`` scopes before the first step."""
    columns = (jnp.zeros(size, dtype), jnp.zeros(size, jnp.int32))
    return (*columns, jnp.zeros(size, dtype)) if noisy else columns


def _memory(kept: tuple[Any, ...]) -> Memory | None:
    """The memory of all scopes as one table, in the order of the rules."""
    if not kept:
        return None
    columns = [parts[0] if len(parts) == 1 else jnp.concatenate(parts) for parts in zip(*kept, strict=True)]
    memory = Memory(*columns)
    return memory._replace(count=not_full(memory.count))


def _by_rule(memory: Memory | None, like: tuple[Any, ...]) -> tuple[Any, ...]:
    """The table as it is kept: by rule."""
    if memory is None:
        return ()
    kept, start = [], 0
    for _, count, *_ in like:
        end = start + count.shape[0]
        kept.append(tuple(column[start:end] for column in memory.known()))
        start = end
    return tuple(kept)


def _samples(count: Any, jobs: list[Job], result: Result) -> Any:
    """Steps each leaf took part in; one write for all."""
    pairs = zip(jobs, result.outcomes, strict=True)
    new = [(job.leaf.place, buffers.count) for job, (_, buffers) in pairs if buffers.count is not None]
    if not new:
        return count
    return count.at[jnp.array([place for place, _ in new])].set(jnp.stack([value for _, value in new]))


def _watched(watch: Watch, step: Any, result: Result, metrics_every: Any) -> Watch:
    """Measure the step if it is due; a skipped one leaves the figures of the one before."""
    skip = result.skip
    # The last of every so many steps, after which trainers log; and the first, so that there are figures from then on.
    due = ((watch.at < 0) | ((step + 1) % jnp.maximum(metrics_every, 1) == 0)) & (jnp.asarray(metrics_every) > 0)
    due = due if skip is None else due & ~skip

    def measure() -> jax.Array:
        return result.figures().astype(watch.last.dtype)

    if not isinstance(metrics_every, jax.Array) and metrics_every == 1:
        last = jnp.where(due, measure(), watch.last)
    else:
        last = lax.cond(due, measure, lambda: watch.last)
    course = jnp.where(due, followed(xp, watch.course, watch.last, last), watch.course)
    streak = watch.streak if skip is None else jnp.where(skip, watch.streak + 1, 0)
    return Watch(jnp.where(due, step, watch.at), last, course, streak)


def _varying(watch: Watch | None, jobs: list[Job]) -> Watch | None:
    """The same figures, in a type that may differ between the devices of a ``shard_map`` as the gradients do.

    A state that was made inside has no such type yet, and both branches of a condition need the same one.
    """
    if watch is None:
        return None
    nothing = sum(jnp.sum(jnp.ravel(job.gradient)[:0], dtype=watch.last.dtype) for job in jobs)
    return watch._replace(last=watch.last + nothing)
