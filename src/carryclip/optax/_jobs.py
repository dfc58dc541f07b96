"""One leaf at one step as plain real arrays, and its buffers from and into the state's trees."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from optax import MaskedNode

from carryclip.algorithm import Buffers, Rule
from carryclip.optax._engine import Job, guarded
from carryclip.optax._layout import Layout, Leaf, Rulebook, is_clippable, is_hole, named_leaves, spread
from carryclip.optax._state import UClipState

Tree = Any
TREES = ("carry", "mean", "second", "feed")
"""The state's fields that are like the parameters."""


def wide(leaf: Any) -> Any:
    """The type of a leaf's buffers: at least float32, complex if the leaf is."""
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def zeros(book: Rulebook, name: str, layout: Layout, leaves: list[Any], structure: Any) -> Tree:
    """A buffer of zeros for each clipped leaf whose rule keeps one, placed and sharded as the leaf."""
    if name not in book.buffers:
        return None
    filled: list[Any] = [leaf if leaf is None else MaskedNode() for leaf in leaves]
    for leaf in layout.leaves:
        if name in book.rules[leaf.rule].buffers:
            filled[leaf.place] = jnp.zeros_like(leaves[leaf.place], dtype=wide(leaves[leaf.place]))
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


def make_jobs(book: Rulebook, updates: Tree, state: UClipState, params: Tree | None) -> list[Job]:
    """The leaves that have a gradient in this step; complains if they do not fit the state."""
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
    sizes = {number: _sizes(book, layout, number, state.step, shown) for number in {leaf.rule for leaf in present}}
    jobs = []
    for leaf in present:
        rule, gradient = book.rules[leaf.rule], jnp.asarray(gradients[leaf.place])
        stored = {name: trees[name][1][leaf.place] for name in TREES if name in rule.buffers}
        _check_types(leaf, gradient, stored)
        dtype = wide(gradient)
        buffers = {name: split(value) for name, value in stored.items()}
        if "count" in rule.buffers:
            buffers["count"] = not_full(state.samples[leaf.place])
        own = tuple(_fitted(rule, leaf, size[leaf.place], gradient) for size in sizes[leaf.rule])
        jobs.append(Job(leaf, rule, split(guarded(gradient)), Buffers(**buffers), own, jnp.finfo(dtype).dtype))
    return jobs


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
    wanted = [size for size, rule in zip(layout.scopes, book.rules, strict=True) if rule.gates_scopes]
    found = [jnp.shape(count)[-1] for _, count in state.gate]
    if wanted != found:
        raise ValueError(_ANOTHER.format(f"it has gates for {found} vectors where {wanted} are clipped"))


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


def _check_types(leaf: Leaf, gradient: jax.Array, stored: dict[str, Any]) -> None:
    """A gradient must fit into its buffers without loss."""
    if not is_clippable(gradient):
        raise TypeError(f"The gradient of {leaf.name} is {gradient.dtype}; it must be a floating-point array.")
    for buffer in stored.values():
        if jnp.promote_types(wide(gradient), buffer.dtype) != buffer.dtype or (
            jnp.iscomplexobj(gradient) != jnp.iscomplexobj(buffer)
        ):
            raise TypeError(
                f"The gradient of {leaf.name} is {gradient.dtype}, but the state was made for parameters whose buffers "
                f"are {buffer.dtype}. Cast the gradients to the parameters' type, or make the state from parameters of "
                "the gradients' type."
            )


def check_sizes(book: Rulebook, layout: Layout, params: Tree, leaves: list[Any]) -> None:
    """Compare per-parameter radii with the parameters, before anything is clipped with them."""
    for number, rule in enumerate(book.rules):
        own = [leaf for leaf in layout.leaves if leaf.rule == number]
        if not own or any(callable(getattr(rule.region, field.name)) for field in dataclasses.fields(rule.region)):  # type: ignore[arg-type]
            continue
        sizes = _sizes(book, layout, number, 0, params)
        for leaf in own:
            for size in sizes:
                _fitted(rule, leaf, size[leaf.place], leaves[leaf.place])


def _sizes(book: Rulebook, layout: Layout, number: int, step: Any, tree: Tree) -> list[dict[int, Any]]:
    """The region's numbers at ``step``, each by the place of a leaf."""
    region = book.rules[number].region
    owner = type(region).__name__
    try:
        sizes = region.sizes(step)
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"{owner}: the schedule cannot be traced ({type(error).__name__}). Under jit the step is not a Python "
            "number: write it with jax.numpy, jnp.where instead of if, or take one of optax's schedules."
        ) from error
    if region.joint and isinstance(sizes[0], (list, tuple, Mapping)):
        raise TypeError(f"{owner}: the schedule gave {sizes[0]!r}; one radius holds for the whole vector.")
    leaves = [leaf for leaf in layout.leaves if leaf.rule == number]
    return [_by_place(owner, size, leaves, tree) for size in sizes]


def _by_place(owner: str, size: Any, leaves: list[Leaf], tree: Tree) -> dict[int, Any]:
    """One value for each leaf: the same for all, or picked from a list, a mapping of names or a tree."""
    if not isinstance(size, (list, tuple, Mapping)):
        return {leaf.place: size for leaf in leaves}
    names = {leaf.name for leaf in leaves}
    if isinstance(size, Mapping) and names & set(size):
        wrong = sorted(names - set(size)) or sorted(map(str, set(size) - names))
        if not wrong:
            return {leaf.place: size[leaf.name] for leaf in leaves}
        raise ValueError(f"{owner}: radii by name must cover the leaves exactly; {wrong[0]} is missing or unknown.")
    if isinstance(size, (list, tuple)) and len(size) == len(leaves) and not any(map(_nested, size)):
        return {leaf.place: size[leaf.index] for leaf in leaves}
    try:
        entries = spread(size, tree)
    except ValueError:
        raise ValueError(
            f"{owner}: the radii fit the parameters neither as a list of {len(leaves)} values, nor by name, nor as a "
            f"tree of the same structure. The names are {', '.join(leaf.name for leaf in leaves[:5])}"
            f"{', ...' if len(leaves) > 5 else ''}."
        ) from None
    return {leaf.place: entries[leaf.place] for leaf in leaves}


def _nested(entry: Any) -> bool:
    return isinstance(entry, (list, tuple, Mapping))


def _fitted(rule: Rule, leaf: Leaf, size: Any, like: Any) -> Any:
    """A size as a number, or as an array that spreads over the leaf; never more than what was given."""
    if isinstance(size, (int, float)):
        if not size >= 0:
            raise ValueError(
                f"{type(rule.region).__name__}: the radius for {leaf.name} is {size}; it must be at least 0."
            )
        return float(size)
    owner, dtype = type(rule.region).__name__, jnp.finfo(wide(like)).dtype
    if not isinstance(size, jax.Array):
        size = _rounded_down(np.asarray(size), dtype)
    if rule.region.joint and size.ndim:
        raise ValueError(f"{owner}: the radius must be one number, got shape {size.shape}.")
    if size.ndim:
        try:
            size = jnp.broadcast_to(size, jnp.shape(like))
        except ValueError:
            raise ValueError(
                f"{owner}: the radius for {leaf.name} has shape {size.shape}, which does not fit the leaf's "
                f"{jnp.shape(like)}."
            ) from None
        size = size[..., None] if jnp.iscomplexobj(like) else size
    return size.astype(dtype) if jnp.promote_types(size.dtype, dtype) == dtype else size


def _rounded_down(values: np.ndarray, dtype: Any) -> jax.Array:
    """A NumPy array in ``dtype``, rounded toward zero."""
    narrow = values.astype(dtype)
    return jnp.asarray(np.where(narrow > values, np.nextafter(narrow, np.zeros_like(narrow)), narrow))
