"""Which parameters are clipped, by which rule, as part of which vector."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from carryclip.algorithm import NonFinite, Rule
from carryclip.carry import CarryPolicy
from carryclip.regions import Norm, Region, check_region

GROUP_KEY = "uclip"
"""Key of a param group that holds the group's own region, or None to leave the group alone."""

Group = dict[str, Any]


@dataclass
class Leaf:
    """One clipped parameter."""

    param: Tensor
    name: str
    number: int
    """Position among all clipped parameters."""
    rule: int
    index: int
    """Position among the parameters of its rule: where a list of radii has its entry."""
    scope: int
    """Under a ``Norm``: which of the rule's vectors it belongs to."""


@dataclass
class Layout:
    """All clipped parameters, the distinct rules, and where each group's scopes lie."""

    rules: list[Rule] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    scopes: list[int] = field(default_factory=list)
    """Number of vectors of each rule."""
    groups: list[tuple[int, slice] | None] = field(default_factory=list)
    """Per group its rule and the range of that rule's scopes it takes part in; None if it is left alone."""


class RegionMap:
    """Says which region each group gets: one for all, a mapping, or what a group holds itself."""

    def __init__(self, region: Any, own: dict[int, Region | None] | None = None) -> None:
        self.default = region
        self.own = dict(own or {})
        if isinstance(region, Mapping) and not region:
            raise ValueError("The mapping from groups to regions is empty. Write for example {0: Norm(1.0), 1: None}.")
        for value in region.values() if isinstance(region, Mapping) else [region]:
            if value is not None or not isinstance(region, Mapping):
                check_region(value)

    def of(self, index: int, group: Group) -> Region | None:
        """The region of a group; None leaves it alone.

        A region found in the group is taken out of it, because checkpoints should hold tensors and numbers only.
        """
        if GROUP_KEY in group:
            found = group.pop(GROUP_KEY)
            self.own[index] = None if found is None else check_region(found)
        if index in self.own:
            return self.own[index]
        if not isinstance(self.default, Mapping):
            return self.default
        for key in (index, group.get("name")):
            if key in self.default:
                return self.default[key]
        raise ValueError(
            f"Group {index} has no region; the mapping names {list(self.default)}. Add {index}: Norm(1.0), or "
            f"{index}: None to leave it alone, or put {GROUP_KEY!r} into the group."
        )

    def __repr__(self) -> str:
        own = ", ".join(f"{index}: {describe(region)}" for index, region in self.own.items())
        return describe(self.default) + (f" but {{{own}}}" if own else "")


def build(groups: list[Group], regions: RegionMap, carry: CarryPolicy, nonfinite: NonFinite) -> Layout:
    """Lay out the parameters of ``groups``; a parameter that occurs twice counts once, where it comes first."""
    layout = Layout()
    seen: set[int] = set()
    counts: list[int] = []
    for number, group in enumerate(groups):
        region = regions.of(number, group)
        if region is None:
            layout.groups.append(None)
            seen.update(map(id, group["params"]))
            continue
        rule = _rule_number(layout.rules, Rule(region, carry, nonfinite))
        if rule == len(counts):
            counts.append(0)
            layout.scopes.append(0)
        over = region.over if isinstance(region, Norm) else "all"
        first = {"all": 0, "group": layout.scopes[rule], "tensor": counts[rule]}[over]
        names = group.get("param_names")
        for position, param in enumerate(group["params"]):
            if id(param) in seen:
                continue
            seen.add(id(param))
            name = names[position] if names else f"group {number}, parameter {position}"
            scope = counts[rule] if over == "tensor" else first
            layout.leaves.append(Leaf(param, name, len(layout.leaves), rule, counts[rule], scope))
            counts[rule] += 1
        stop = counts[rule] if over == "tensor" else first + 1
        layout.scopes[rule] = stop
        layout.groups.append((rule, slice(first, stop)))
    if not layout.leaves:
        raise ValueError(
            "There is nothing to clip: every group is left alone (None). Give at least one group a region."
            if seen
            else "There are no parameters to clip."
        )
    return layout


def _rule_number(rules: list[Rule], rule: Rule) -> int:
    """Position of ``rule`` in ``rules``, added if new: groups with equal regions are clipped as one."""
    for number, known in enumerate(rules):
        if known.region is rule.region or _equal(known, rule):
            return number
    rules.append(rule)
    return len(rules) - 1


def _equal(one: Rule, other: Rule) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # radii given as arrays have no single truth value
        return False


def describe(value: Any) -> str:
    """A region in words that stay the same from run to run, so that a checkpoint can be compared with them."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(entry)}" for key, entry in value.items()) + "}"
    if not isinstance(value, Region):
        return repr(value)
    return f"{type(value).__name__}({', '.join(f'{k}={_described(v)}' for k, v in vars(value).items())})"


def _described(value: Any) -> str:
    if callable(value):
        return f"<schedule {getattr(value, '__qualname__', type(value).__qualname__)}>"
    if isinstance(value, (list, tuple, Mapping)) or hasattr(value, "shape"):
        return "<per parameter>"
    return repr(value)
