"""Which leaves of a tree are clipped, by which rule, as part of which vector. All of it is known when tracing."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util
from optax import MaskedNode

from carryclip import _checks
from carryclip.algorithm import NonFinite, Rule, rule_number
from carryclip.carry import CarryPolicy
from carryclip.regions import Norm, check_region
from carryclip.scopes import NO_SCOPE, Place

Tree = Any


def is_hole(node: Any) -> bool:
    """A place of a tree without an array: None, or what ``optax.masked`` leaves behind."""
    return node is None or isinstance(node, MaskedNode)


def is_clippable(leaf: Any) -> bool:
    """Whether a leaf is a floating-point or complex array; integers, keys and holes are left alone."""
    return not is_hole(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def wide(leaf: Any) -> Any:
    """The type of a leaf's buffers: at least float32, complex if the leaf is."""
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def is_function(value: Any) -> bool:
    """Whether ``value`` is there to be called: modules of some libraries can be called, but are trees."""
    return callable(value) and tree_util.all_leaves([value])


def named_leaves(tree: Tree) -> tuple[list[str], list[Any], Any]:
    """(names, leaves, structure) of a tree, holes included; a name is the path as JAX prints it."""
    found, structure = tree_util.tree_flatten_with_path(tree, is_leaf=is_hole)
    return [tree_util.keystr(path) or "the whole tree" for path, _ in found], [leaf for _, leaf in found], structure


@dataclass(frozen=True)
class Leaf:
    """One clipped leaf."""

    name: str
    place: int
    """Position among all leaves of the tree, holes included."""
    rule: int
    index: int
    """Position among the leaves of its rule."""
    scope: int
    """Its entry in the table of scopes, or the first if its rows have one each; ``NO_SCOPE`` if it has none."""
    rows: int = 0
    """How many rows have an entry; 0 if they have none."""
    axis: int | None = None
    """Along which they lie; None if there is but one."""

    @property
    def span(self) -> Place:
        """Its entry, or entries, in the table of scopes."""
        return slice(self.scope, self.scope + self.rows) if self.rows else self.scope


@dataclass(frozen=True)
class Layout:
    """The clipped leaves, and all scopes: the rule of each, those of one rule side by side."""

    leaves: list[Leaf]
    scopes: list[tuple[int, int]]
    """Run by run: the rule, and how many scopes there are, more than one only for rows."""

    @property
    def width(self) -> int:
        """How many scopes there are."""
        return sum(count for _, count in self.scopes)

    def vectors(self, rule: int) -> int:
        """How many scopes a rule has."""
        return sum(count for owner, count in self.scopes if owner == rule)


class Rulebook:
    """The rules of a transformation, and which leaf has which."""

    def __init__(
        self,
        region: Any,
        carry: CarryPolicy,
        nonfinite: NonFinite,
        groups: Tree | Callable | None,
        carry_dtype: Any = None,
        moments_dtype: Any = None,
    ) -> None:
        self.groups = groups
        self._stored = {
            "carry": _checks.storage("carry_dtype", carry_dtype),
            "moments": _checks.storage("moments_dtype", moments_dtype),
        }
        self.by_label = isinstance(region, Mapping)
        regions = dict(region) if self.by_label else {None: check_region(region)}
        if not regions:
            raise ValueError("The mapping from labels to regions is empty. Write for example {'dense': Norm(1.0)}.")
        for each in regions.values():
            _refuse_callable_trees(each)
        self.rules: list[Rule] = []
        self.numbers: dict[Any, int | None] = {}
        for label, each in regions.items():
            alone = each is None and self.by_label
            self.numbers[label] = None if alone else rule_number(self.rules, Rule(check_region(each), carry, nonfinite))
        if not self.rules:
            raise ValueError("There is nothing to clip: every label is left alone (None). Give at least one a region.")
        spans = any(isinstance(rule.region, Norm) and rule.region.over == "group" for rule in self.rules)
        if groups is None and (self.by_label or spans):
            what = "A mapping of regions" if self.by_label else 'Norm(over="group")'
            raise ValueError(
                f"{what} needs groups=...: a tree of labels like the parameters' (or a prefix of it), or a function "
                "from parameters to such a tree, as in optax.partition."
            )

    def kind(self, name: str, leaf: Any) -> Any:
        """The type in which a buffer of a leaf is stored."""
        narrow = self._stored["carry" if name == "carry" else "moments"]
        if narrow is not None and jnp.iscomplexobj(leaf):
            raise ValueError(
                "There is no complex bfloat16: leave carry_dtype and moments_dtype out for complex parameters."
            )
        return wide(leaf) if narrow is None else jnp.dtype(narrow)

    @property
    def buffers(self) -> set[str]:
        """Names of the buffers that some rule keeps."""
        return {name for rule in self.rules for name in rule.buffers}

    def layout(self, tree: Tree, clippable: list[bool]) -> Layout:
        """Lay out the leaves of ``tree``; ``clippable`` says which of them can be clipped at all."""
        names, entries, _ = named_leaves(tree)
        labels = self._labels(tree, names)
        counts, own = [0] * len(self.rules), [{} for _ in self.rules]
        lengths: list[list[int]] = [[] for _ in self.rules]
        leaves: list[Leaf] = []
        for place, (name, label, eligible) in enumerate(zip(names, labels, clippable, strict=True)):
            rule = self._number(name, label) if eligible else None
            if rule is None:
                continue
            scope, rows, axis = NO_SCOPE, 0, None
            region = self.rules[rule].region
            if self.rules[rule].has_scope:
                over = region.over if isinstance(region, Norm) else "all"
                vector = {"all": "all", "group": label}.get(over, place)
                if isinstance(region, Norm) and region.split:
                    shape = jnp.shape(entries[place])
                    rows, axis = region.vectors(shape), region.axis(len(shape))
                if vector not in own[rule]:
                    own[rule][vector] = sum(lengths[rule])
                    lengths[rule].append(rows or 1)
                scope = own[rule][vector]
            leaves.append(Leaf(name, place, rule, counts[rule], scope, rows, axis))
            counts[rule] += 1
        first = list(itertools.accumulate((sum(found) for found in lengths), initial=0))
        moved = [
            leaf if leaf.scope == NO_SCOPE else dataclasses.replace(leaf, scope=first[leaf.rule] + leaf.scope)
            for leaf in leaves
        ]
        return Layout(moved, [(rule, count) for rule, found in enumerate(lengths) for count in found])

    def _labels(self, tree: Tree, names: list[str]) -> list[Any]:
        """The label of each leaf; None where it has none."""
        if self.groups is None or not names:
            return [None] * len(names)
        try:
            return spread(self.groups(tree) if is_function(self.groups) else self.groups, tree)
        except ValueError as error:
            raise ValueError(f"groups does not have the structure of the parameters: {error}") from None

    def _number(self, name: str, label: Any) -> int | None:
        if not self.by_label:
            return 0
        if label not in self.numbers:
            raise ValueError(
                f"The leaf {name} has the label {label!r}, but regions are given for {list(self.numbers)}. "
                f"Add {label!r}: Norm(1.0), or {label!r}: None to leave it alone."
            )
        return self.numbers[label]


def _refuse_callable_trees(region: Any) -> None:
    for name, size in vars(region).items() if dataclasses.is_dataclass(region) else ():
        if callable(size) and not is_function(size):
            raise TypeError(
                f"{type(region).__name__}: {name} is a tree that can be called, so it cannot be told from a schedule. "
                "Give the radii as a list in the order of jax.tree.leaves(params), or by name: {\"['w']\": 0.1, ...}."
            )


def spread(prefix: Tree, tree: Tree) -> list[Any]:
    """The entries of ``prefix``, a tree like ``tree`` or the upper part of one, for each leaf of ``tree``."""
    full = jax.tree.map(lambda _: 0, tree, is_leaf=is_hole)  # a hole of the tree must not hide its entry
    return jax.tree.leaves(jax.tree.broadcast(prefix, full, is_leaf=is_hole), is_leaf=is_hole)
