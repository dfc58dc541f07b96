"""Moving what an old optimizer state knows into a fresh one that has a carry."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from carryclip.optax._state import UClipState, walk

Tree = Any


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
    places, structure = tree_util.tree_flatten_with_path(fresh, is_leaf=_is_own)
    given = tree_util.tree_flatten_with_path(old, is_leaf=_is_own)[0]
    mine, theirs = [n for _, n in places if _is_own(n)], [n for _, n in given if _is_own(n)]
    if not mine:
        raise ValueError("There is no uclip in the fresh state: give tx.init(params) of the optimizer to go on with.")
    if theirs and len(theirs) != len(mine):
        raise ValueError(f"The old state has {len(theirs)} uclips and the fresh one {len(mine)}.")
    rest = iter([(path, leaf) for path, leaf in given if not _is_own(leaf)])
    wanted = [path for path, node in places if not _is_own(node)]
    if len(wanted) != len(given) - len(theirs):
        raise ValueError(
            f"The old state has {len(given) - len(theirs)} arrays where the fresh one has {len(wanted)}. Apart from "
            "uclip both must come from the same optimizer and parameters."
        )
    if _records(fresh) != _records(old):
        raise ValueError(
            f"The old state is made of {', '.join(_records(old))} and the fresh one of {', '.join(_records(fresh))}. "
            "Apart from uclip both must come from the same optimizer."
        )
    own = iter([_merged(a, b) for a, b in zip(mine, theirs, strict=True)] if theirs else mine)
    return structure.unflatten(
        [next(own) if _is_own(node) else _matched(path, node, *next(rest)) for path, node in places]
    )


def _is_own(node: Any) -> bool:
    return isinstance(node, UClipState)


def _matched(path: Any, leaf: Any, old_path: Any, old: Any) -> Any:
    """The old leaf, if it can stand in the place of ``leaf``."""
    same_name = _words(path) == _words(old_path)
    if not same_name or jnp.shape(leaf) != jnp.shape(old) or jnp.result_type(leaf) != jnp.result_type(old):
        raise ValueError(
            f"{tree_util.keystr(path)} of the fresh state ({_kind(leaf)}) does not fit {tree_util.keystr(old_path)} of "
            f"the old one ({_kind(old)}). Apart from uclip both must come from the same optimizer and parameters."
        )
    return old


def _words(path: Any) -> list[str]:
    """The names along a path, without positions in tuples, which ``uclip`` shifts."""
    return [str(key) for key in path if not isinstance(key, tree_util.SequenceKey)]


def _records(tree: Tree) -> list[str]:
    """The named tuples a state is made of, in order, apart from those that hold nothing."""
    return [type(node).__name__ for node in walk(tree) if hasattr(node, "_fields") and len(node)]


def _kind(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def _merged(fresh: UClipState, old: UClipState) -> UClipState:
    """Fields of ``old`` where they have the shape of ``fresh``; averages that would mean something else start anew."""
    same: dict[str, bool] = {name: _alike(getattr(fresh, name), getattr(old, name)) for name in UClipState._fields}
    averages = ("mean", "second", "feed", "samples", "averages")
    keep = all(same[name] for name in averages)
    same["gate"] = same["gate"] and same["policy"]
    return fresh._replace(
        **{name: getattr(old, name) for name in UClipState._fields if same[name] and (keep or name not in averages)}
    )


def _alike(one: Tree, other: Tree) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(jnp.shape(a) == jnp.shape(b) and jnp.result_type(a) == jnp.result_type(b) for a, b in pairs)
