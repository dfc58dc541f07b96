"""What the transformation keeps between steps, an ordinary pytree, and what can be read from it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import tree_util

from carryclip.algorithm import Feed
from carryclip.diagnosis import LAST_STEP, RUNNING, dangers, warn_user

Tree = Any


class Watch(NamedTuple):
    """The figures behind metrics and warnings."""

    at: Any
    """Step measured last, counted from 0; -1 before the first."""
    last: Any
    """The metrics named in ``carryclip.diagnosis.LAST_STEP``, of that step; NaN before the first."""
    feed: Any
    """Exponential averages of ``carry_feed`` and of 1 over measured steps; None if the policy bounds the carry."""
    streak: Any
    """Skipped steps in a row."""


class UClipState(NamedTuple):
    """State of ``uclip``. Trees are like the parameters', with a ``MaskedNode`` where a leaf is not clipped.

    A skipped step changes ``step``, ``skipped`` and ``watch.streak`` only.
    """

    step: Any
    """Number of updates so far, skipped ones included; what schedules see."""
    skipped: Any
    """How many of them were skipped; None under ``nonfinite="propagate"``, which never skips."""
    dropped: Any
    """Sum of the norms of what the carry policy dropped; None with metrics off."""
    carry: Tree
    """What was cut and waits, in at least float32; None under ``carry=False``."""
    mean: Tree
    """Running means of an adaptive region, else None."""
    second: Tree
    """Its second moments, else None."""
    feed: Tree
    """Feed averages of ``Gated`` under a coordinate-wise region, else None."""
    count: Any
    """Steps each clipped leaf took part in, one entry per leaf; None if no average needs it."""
    gate: tuple[Feed, ...]
    """Feed averages of ``Gated`` under each ``Norm``, one entry per vector."""
    watch: Watch | None
    """Metrics; None with ``metrics_every=0``."""


def metrics(state: Tree) -> dict[str, jax.Array]:
    """The metrics of the last measured step and the running ones, by name, from any optimizer state with a ``uclip``.

    Pure: it works inside ``jit`` and waits for nothing. ``carry_norm`` and ``skipped_steps`` can always be told; the
    others need ``metrics_every=10`` (or another interval) in ``uclip`` and are NaN without it.

    >>> from carryclip import Norm
    >>> from carryclip.optax import metrics, uclip
    >>> tx = optax.chain(uclip(Norm(1.0), metrics_every=10), optax.sgd(0.1))
    >>> params = {"w": jnp.zeros(2)}
    >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(params))
    >>> round(float(metrics(state)["grad_norm"]), 3)
    5.0
    """
    own = _the_one(state)
    missing = jnp.full(jnp.shape(own.step), jnp.nan)
    figures: dict[str, Any] = dict.fromkeys([*LAST_STEP, *RUNNING], missing)
    if own.watch is None:
        figures["carry_norm"] = _norm(own.carry, jnp.ndim(own.step))
    else:
        figures |= {name: own.watch.last[..., k] for k, name in enumerate(LAST_STEP)}
        figures["dropped_norm"] = own.dropped
    figures["skipped_steps"] = jnp.zeros_like(own.step) if own.skipped is None else own.skipped
    return figures


def _norm(tree: Tree, leading: int) -> jax.Array:
    """The norm of all leaves together, one for each entry of the ``leading`` axes that devices or ``vmap`` added."""
    squares = [jnp.sum(jnp.abs(x) ** 2, axis=tuple(range(leading, x.ndim))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares)) if squares else jnp.zeros(())


def check(state: Tree) -> None:
    """Warn of what the metrics show: wind-up, a spike, an undrainable carry, repeated skips.

    Call it outside ``jit``, where you log: it reads a few numbers from the device.
    """
    for name, own in find(state):
        watch = own.watch
        if watch is None:
            continue
        watch = jax.device_get(watch)
        ratio = watch.last[..., LAST_STEP.index("carry_ratio")].max()
        feed, weight = (0.0, 0.0) if watch.feed is None else watch.feed.reshape(-1, 2).max(axis=0)
        carried = 0.0 if watch.feed is None else float(ratio)
        look = "jax.debug.print inside the loss, or the config jax_debug_nans, shows where they arise"
        for _, message in dangers(carried, float(feed), float(weight), float(watch.streak.max()), look):
            warn_user(f"U-Clip in the optimizer state{' at ' + name if name else ''}: {message}")


def find(state: Tree) -> list[tuple[str, UClipState]]:
    """Every ``UClipState`` in an optimizer state, with the path to it."""
    found = [
        (tree_util.keystr(path), node)
        for path, node in tree_util.tree_flatten_with_path(state, is_leaf=lambda n: isinstance(n, UClipState))[0]
        if isinstance(node, UClipState)
    ]
    if not found:
        raise ValueError(
            "There is no uclip in this optimizer state. Pass the state of the optimizer that contains it, for example "
            "that of optax.chain(carryclip.optax.uclip(Norm(1.0)), optax.adamw(3e-4))."
        )
    _refuse_inner_guard(state, found)
    return found


def _the_one(state: Tree) -> UClipState:
    found = find(state)
    if len(found) > 1:
        raise ValueError(
            f"There are {len(found)} uclips in this optimizer state, at {', '.join(name for name, _ in found)}. "
            "Pass the part that holds the one you mean, for example state.inner_states['decay'] of optax.partition."
        )
    return found[0][1]


def _refuse_inner_guard(state: Tree, found: list[tuple[str, UClipState]]) -> None:
    """A guard against NaN behind a ``uclip`` that lets NaN through protects the optimizer, but not the carry."""
    guards = _nodes(state, optax.ApplyIfFiniteState)
    covered = {id(own) for guard in guards for own in _nodes(guard, UClipState)}
    for name, own in found:
        if guards and own.skipped is None and id(own) not in covered:
            raise ValueError(
                f'The uclip at {name} has nonfinite="propagate" and stands in front of optax.apply_if_finite: a NaN is '
                "kept from the optimizer but stays in the carry for ever. Put the guard outside, "
                'optax.apply_if_finite(optax.chain(uclip(...), ...), n), or use nonfinite="skip".'
            )


def _nodes(tree: Tree, kind: type) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def graft(fresh: Tree, old: Tree) -> Tree:
    """The ``fresh`` state of an optimizer with everything that an ``old`` one knows, whether or not it has a carry.

    For checkpoints written before ``uclip`` was added: restore with the old optimizer's state as the target, then
    graft. Where the old state has a ``uclip`` too, what still means the same is taken over and the rest starts anew.

    >>> import optax
    >>> from carryclip import Norm
    >>> from carryclip.optax import graft, uclip
    >>> params = {"w": jnp.ones(2)}
    >>> old = optax.adam(1e-3).init(params)
    >>> state = graft(optax.chain(uclip(Norm(1.0)), optax.adam(1e-3)).init(params), old)
    """
    is_own = lambda node: isinstance(node, UClipState)  # noqa: E731
    places, structure = tree_util.tree_flatten_with_path(fresh, is_leaf=is_own)
    given = tree_util.tree_flatten_with_path(old, is_leaf=is_own)[0]
    mine, theirs = [n for _, n in places if is_own(n)], [n for _, n in given if is_own(n)]
    if not mine:
        raise ValueError("There is no uclip in the fresh state: give tx.init(params) of the optimizer to go on with.")
    if theirs and len(theirs) != len(mine):
        raise ValueError(f"The old state has {len(theirs)} uclips and the fresh one {len(mine)}.")
    rest = iter([(path, leaf) for path, leaf in given if not is_own(leaf)])
    wanted = [path for path, node in places if not is_own(node)]
    if len(wanted) != len(given) - len(theirs):
        raise ValueError(
            f"The old state has {len(given) - len(theirs)} arrays where the fresh one has {len(wanted)}. Apart from "
            "uclip both must come from the same optimizer and parameters."
        )
    own = iter([_merged(a, b) for a, b in zip(mine, theirs, strict=True)] if theirs else mine)
    return structure.unflatten(
        [next(own) if is_own(node) else _matched(path, node, *next(rest)) for path, node in places]
    )


def _matched(path: Any, leaf: Any, old_path: Any, old: Any) -> Any:
    """The old leaf, if it can stand in the place of ``leaf``."""
    same_name = not path or not old_path or str(path[-1]) == str(old_path[-1])
    if not same_name or jnp.shape(leaf) != jnp.shape(old) or jnp.result_type(leaf) != jnp.result_type(old):
        raise ValueError(
            f"{tree_util.keystr(path)} of the fresh state ({_kind(leaf)}) does not fit {tree_util.keystr(old_path)} of "
            f"the old one ({_kind(old)}). Apart from uclip both must come from the same optimizer and parameters."
        )
    return old


def _kind(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def _merged(fresh: UClipState, old: UClipState) -> UClipState:
    """Fields of ``old`` where they have the shape of ``fresh``; averages that would mean something else start anew."""
    same = {name: _alike(getattr(fresh, name), getattr(old, name)) for name in UClipState._fields}
    averages = ("mean", "second", "feed", "count")
    keep = all(same[name] for name in averages)
    return fresh._replace(
        **{name: getattr(old, name) for name in UClipState._fields if same[name] and (keep or name not in averages)}
    )


def _alike(one: Tree, other: Tree) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(jnp.shape(a) == jnp.shape(b) and jnp.result_type(a) == jnp.result_type(b) for a, b in pairs)
