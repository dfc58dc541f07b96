"""The region's numbers for each leaf at one step, in whatever form the user gave them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carryclip.algorithm import Rule
from carryclip.optax._layout import Layout, Leaf, Rulebook, spread, wide

Tree = Any


def check_sizes(book: Rulebook, layout: Layout, params: Tree, leaves: list[Any]) -> None:
    """Compare per-parameter radii with the parameters, before anything is clipped with them."""
    for number, rule in enumerate(book.rules):
        own = [leaf for leaf in layout.leaves if leaf.rule == number]
        if not own or any(map(callable, vars(rule.region).values())):  # a schedule shows its values only when asked
            continue
        sizes = sizes_at(book, layout, number, 0, params)
        for leaf in own:
            for size in sizes:
                fitted(rule, leaf, size[leaf.place], leaves[leaf.place])


def sizes_at(book: Rulebook, layout: Layout, number: int, step: Any, tree: Tree) -> list[dict[int, Any]]:
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


def fitted(rule: Rule, leaf: Leaf, size: Any, like: Any) -> Any:
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
                f"{jnp.shape(like)}. Radii of its rows are written radius[:, None]."
            ) from None
        size = size[..., None] if jnp.iscomplexobj(like) else size
    return size.astype(dtype) if jnp.promote_types(size.dtype, dtype) == dtype else size


def _rounded_down(values: np.ndarray, dtype: Any) -> jax.Array:
    """A NumPy array in ``dtype``, rounded toward zero."""
    narrow = values.astype(dtype)
    return jnp.asarray(np.where(narrow > values, np.nextafter(narrow, np.zeros_like(narrow)), narrow))
