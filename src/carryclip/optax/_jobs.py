"""One leaf at one step as plain real arrays, and its buffers from and into the state's trees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from optax import MaskedNode

from carryclip.algorithm import Buffers, Rule
from carryclip.optax._engine import Job, guarded
from carryclip.optax._layout import Layout, Leaf, Rulebook, is_clippable, is_hole, named_leaves, wide
from carryclip.optax._radii import fitted, sizes_at
from carryclip.optax._state import UClipState, no_past
from carryclip.precision import seed_of

Tree = Any
TREES = ("carry", "mean", "second", "feed")
"""The state's fields that are like the parameters."""


def zeros(book: Rulebook, name: str, layout: Layout, leaves: list[Any], structure: Any) -> Tree:
    """A buffer of zeros for each clipped leaf whose rule keeps one, placed and sharded as the leaf."""
    if name not in book.buffers:
        return None
    filled: list[Any] = [leaf if leaf is None else MaskedNode() for leaf in leaves]
    for leaf in layout.leaves:
        if name in book.rules[leaf.rule].buffers:
            filled[leaf.place] = jnp.zeros_like(leaves[leaf.place], dtype=book.kind(name, leaves[leaf.place]))
    return structure.unflatten(filled)


def write(name: str, tree: Tree, jobs: list[Job], outcomes: list[tuple[jax.Array, Buffers]]) -> Tree:
    """``tree`` with the new buffers of the leaves that took part."""
    if tree is None:
        return None
    _, leaves, structure = named_leaves(tree)
    for job, (_, buffers) in zip(jobs, outcomes, strict=True):
        if name in job.rule.buffers:
            leaves[job.leaf.place] = join(getattr(buffers, name), leaves[job.leaf.place])
    return structure.unflatten(leaves)


def split(values: jax.Array) -> jax.Array:
    """A complex array as pairs of real numbers along a new last axis; a real one as it is."""
    return jnp.stack([values.real, values.imag], axis=-1) if jnp.iscomplexobj(values) else values


def join(values: jax.Array, like: Any) -> jax.Array:
    """Undo ``split``."""
    return jax.lax.complex(values[..., 0], values[..., 1]) if jnp.iscomplexobj(like) else values


def make_jobs(book: Rulebook, updates: Tree, state: UClipState, params: Tree | None) -> tuple[list[Job], Layout]:
    """The leaves that have a gradient in this step, and the layout of all; complains if they do not fit the state."""
    names, gradients, structure = named_leaves(updates)
    _check_rules(book, state)
    trees = {name: named_leaves(getattr(state, name)) for name in TREES if getattr(state, name) is not None}
    for known_names, known, _ in trees.values():
        _check_tree(names, gradients, known_names, known)
    template = _template(book, trees, gradients, params)
    shown = structure.unflatten([t if is_hole(g) else g for g, t in zip(gradients, template, strict=True)])
    layout = book.layout(shown, [is_clippable(leaf) for leaf in template])
    _check_gates(book, layout, state)
    present = [leaf for leaf in layout.leaves if not is_hole(gradients[leaf.place]) and np.size(gradients[leaf.place])]
    sizes = {number: sizes_at(book, layout, number, state.step, shown) for number in {leaf.rule for leaf in present}}
    jobs = []
    for leaf in present:
        rule, gradient = book.rules[leaf.rule], jnp.asarray(gradients[leaf.place])
        stored = {name: trees[name][1][leaf.place] for name in TREES if name in rule.buffers}
        _check_types(book, leaf, gradient, stored)
        dtype = wide(gradient)
        buffers = {name: split(value) for name, value in stored.items()}
        if "count" in rule.buffers:
            buffers["count"] = not_full(state.samples[leaf.place])
        own = tuple(fitted(rule, leaf, size[leaf.place], gradient) for size in sizes[leaf.rule])
        # Another number for each leaf and step, by which buffers in bfloat16 are rounded at random.
        seed = jnp.asarray(state.step, jnp.int32) * 0x2C1B3C6D + seed_of(leaf.place)
        given = split(guarded(gradient)), Buffers(**buffers), own, jnp.finfo(dtype).dtype
        weights = None
        if rule.region.rule is not None and rule.region.rule.weighs:
            weights = _weights(rule, params, leaf)
        jobs.append(Job(leaf, rule, *given, seed, weights))
    return jobs, layout


def _weights(rule: Rule, params: Tree | None, leaf: Leaf) -> jax.Array:
    """The parameter of a leaf, whose radius looks at it."""
    if params is None:
        raise ValueError(
            f"The radius of {rule.region!r} looks at the weights: call tx.update(gradients, state, params), with the "
            "parameters."
        )
    return split(jnp.asarray(named_leaves(params)[1][leaf.place]))


def not_full(count: jax.Array) -> jax.Array:
    """A count that can be counted up once more without a jump to negative numbers."""
    return jnp.minimum(count, jnp.iinfo(count.dtype).max - 1)


def _template(book: Rulebook, trees: dict[str, Any], gradients: list[Any], params: Tree | None) -> list[Any]:
    """What tells a gradient that is missing from a leaf that is not there: buffers, or else the parameters."""
    if "carry" in trees:
        return trees["carry"][1]
    if "mean" in trees and all("mean" in rule.buffers for rule in book.rules):
        return trees["mean"][1]
    if params is None:
        return gradients
    template = named_leaves(params)[1]
    if len(template) != len(gradients):
        raise ValueError(f"The gradients have {len(gradients)} leaves, but the parameters have {len(template)}.")
    return template


_ANOTHER = (
    "The state was made by a uclip with another region or policy ({}). Make it anew with tx.init(params), or take over "
    "what still fits with carryclip.optax.graft(tx.init(params), state)."
)


def _check_rules(book: Rulebook, state: UClipState) -> None:
    """Complain about a state that has other buffers than these rules keep."""
    for name, field in [*((name, name) for name in TREES), ("count", "samples")]:
        if (name in book.buffers) != (getattr(state, field) is not None):
            raise ValueError(_ANOTHER.format(f"it has {'no' if name in book.buffers else 'a'} {field}"))
    if (book.rules[0].nonfinite == "propagate") != (state.skipped is None):
        raise ValueError(_ANOTHER.format("it differs in nonfinite"))


def _check_gates(book: Rulebook, layout: Layout, state: UClipState) -> None:
    wanted = [layout.vectors(number) for number, rule in enumerate(book.rules) if rule.remembers]
    found = [jnp.shape(count)[-1] for _, count, *_ in state.gate]
    columns = 3 if book.rules[0].policy.noisy else 2
    if wanted != found or any(len(kept) != columns for kept in state.gate):
        raise ValueError(_ANOTHER.format(f"it has gates for {found} vectors where {wanted} are clipped"))
    fresh = no_past(book.rules, layout.width, jnp.float32)
    alike = jax.tree.structure(state.radii) == jax.tree.structure(fresh)
    if not alike or any(map(_differs, jax.tree.leaves(state.radii), jax.tree.leaves(fresh))):
        raise ValueError(_ANOTHER.format("its radii have learned something else"))


def _differs(one: Any, other: Any) -> bool:
    """Whether two arrays have other shapes, apart from axes that vmap has added."""
    return jnp.shape(one)[-jnp.ndim(other) :] != jnp.shape(other)


def _check_tree(names: list[str], gradients: list[Any], known_names: list[str], known: list[Any]) -> None:
    """Compare the gradients with a tree of the state, and name the first leaf that does not fit."""
    if names != known_names:
        extra = next((name for name in names if name not in known_names), None)
        lost = next((name for name in known_names if name not in names), None)
        what = f"have {extra}, which the parameters had not" if extra else f"lack {lost}, which the parameters had"
        raise ValueError(f"The gradients {what} when the state was made. Make it anew with tx.init(params).")
    for name, gradient, buffer in zip(names, gradients, known, strict=True):
        if buffer is None and not is_hole(gradient):
            raise ValueError(
                f"{name} has a gradient, but was None when the state was made. Make it anew with tx.init(params)."
            )
        if is_hole(gradient) or is_hole(buffer):
            continue
        given, wanted = jnp.shape(gradient), buffer.shape  # type: ignore[union-attr]
        if given != wanted:
            raise ValueError(
                f"The gradient of {name} has shape {given}, but the state was made for {wanted}. Make it anew with "
                "tx.init(params)."
            )


def _check_types(book: Rulebook, leaf: Leaf, gradient: jax.Array, stored: dict[str, Any]) -> None:
    """A gradient must fit into its buffers without loss."""
    if not is_clippable(gradient):
        raise TypeError(f"The gradient of {leaf.name} is {gradient.dtype}; it must be a floating-point array.")
    for name, buffer in stored.items():
        kind = book.kind(name, gradient)
        if jnp.promote_types(kind, buffer.dtype) != buffer.dtype or (
            jnp.iscomplexobj(gradient) != jnp.iscomplexobj(buffer)
        ):
            raise TypeError(
                f"The gradient of {leaf.name} is {gradient.dtype}, but the state was made for parameters whose buffers "
                f"are {buffer.dtype}. Cast the gradients to the parameters' type, or make the state from parameters of "
                "the gradients' type."
            )
