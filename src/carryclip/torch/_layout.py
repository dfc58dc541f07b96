"""Which parameters are clipped, by which rule, as part of which vector."""

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from carryclip.algorithm import NonFinite, Rule, rule_number
from carryclip.carry import CarryPolicy
from carryclip.regions import Norm, Region, check_region
from carryclip.scopes import NO_SCOPE
from carryclip.torch._shards import Spread, is_sharded, local_gradient, spread_of

GROUP_KEY = "uclip"
"""Key of a param group that holds the group's own region, or None to leave the group alone."""

Group = dict[str, Any]
Gradients = list[Tensor | None]
"""By number of the parameter; what is here of those that are spread over ranks."""


@dataclass(eq=False)
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
    """Under a ``Norm``: its entry in the table of scopes; ``NO_SCOPE`` otherwise."""
    sharded: bool = False
    """It is a ``DTensor``, of which only a part may be here."""
    counted: bool = True
    """False where another rank has the same entries and counts them."""


@dataclass
class Layout:
    """All clipped parameters, the distinct rules, and where each group's scopes lie."""

    rules: list[Rule] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    scopes: list[tuple[int, Hashable]] = field(default_factory=list)
    """The vectors of all norms: the rule of each, and a name that stays when groups are added."""
    groups: list[tuple[int, slice] | None] = field(default_factory=list)
    """Per group its rule and the range of scopes it takes part in; None if it is left alone."""
    spread: Spread | None = None
    """How the parameters lie on ranks; None if this process has all of them."""

    def gradients(self) -> Gradients:
        """The gradients that the parameters have now."""
        if self.spread is None:
            return [leaf.param.grad for leaf in self.leaves]
        return [local_gradient(leaf.param, leaf.name) for leaf in self.leaves]

    @cached_property
    def joint(self) -> Rule | None:
        """A rule of a norm, if there is one: all of them share their policy and what they do with bad gradients."""
        return next((rule for rule in self.rules if rule.region.joint), None)

    @cached_property
    def rejects(self) -> bool:
        """Whether a gradient's values can cancel a step."""
        return any(rule.can_reject for rule in self.rules)

    @cached_property
    def own(self) -> list[bool]:
        """Whether each scope is a whole tensor that only one rank has, so that it needs no other."""
        whole = self.spread is not None and self.spread.whole
        return [whole and getattr(self.rules[rule].region, "over", "") == "tensor" for rule, _ in self.scopes]

    @cached_property
    def members(self) -> Counter[int]:
        """How many parameters make up each vector."""
        return Counter(leaf.scope for leaf in self.leaves)


class RegionMap:
    """Says which region each group gets: what the group holds itself, or one for all, or a mapping."""

    def __init__(self, region: Any) -> None:
        self.default = region
        if isinstance(region, Mapping) and not region:
            raise ValueError("The mapping from groups to regions is empty. Write for example {0: Norm(1.0), 1: None}.")
        for value in region.values() if isinstance(region, Mapping) else [region]:
            if value is not None or not isinstance(region, Mapping):
                check_region(value)

    def check(self, groups: list[Group]) -> None:
        """Complain about keys of the mapping that fit no group."""
        if isinstance(self.default, Mapping):
            known = {*range(len(groups)), *(group["name"] for group in groups if "name" in group)}
            unknown = [key for key in self.default if key not in known]
            if unknown:
                raise ValueError(
                    f"The mapping names {unknown[0]!r}, but there is no such group: it may use the numbers 0 to "
                    f"{len(groups) - 1} and the groups' names. A group added later can bring its own {GROUP_KEY!r}."
                )

    def of(self, index: int, group: Group) -> Region | None:
        """The region of a group; None leaves it alone."""
        if GROUP_KEY in group:
            return None if group[GROUP_KEY] is None else check_region(group[GROUP_KEY])
        if not isinstance(self.default, Mapping):
            return self.default
        for key in (index, group.get("name")):
            if key in self.default:
                return self.default[key]
        raise ValueError(
            f"Group {index} has no region; the mapping names {list(self.default)}. Add {index}: Norm(1.0), or "
            f"{index}: None to leave it alone, or put {GROUP_KEY!r} into the group."
        )


def build(
    groups: list[Group], regions: RegionMap, carry: CarryPolicy, nonfinite: NonFinite, process_group: Any = None
) -> Layout:
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
        rule = rule_number(layout.rules, Rule(region, carry, nonfinite))
        if rule == len(counts):
            counts.append(0)
        fresh = [param for param in dict.fromkeys(group["params"]) if id(param) not in seen]
        seen.update(map(id, fresh))
        scopes = _scopes_of(layout, rule, group, number, fresh)
        names = dict(zip(group["params"], group.get("param_names") or _numbered(number, group), strict=True))
        for place, param in enumerate(fresh):
            scope = NO_SCOPE
            if region.joint:
                scope = scopes.start + place if _over(region) == "tensor" else scopes.start
            layout.leaves.append(Leaf(param, names[param], len(layout.leaves), rule, counts[rule], scope))
            counts[rule] += 1
        layout.groups.append((rule, scopes))
    if not layout.leaves:
        raise ValueError(
            "There is nothing to clip: every group is left alone (None). Give at least one group a region."
            if seen
            else "There are no parameters to clip."
        )
    _check_radii(layout)
    _spread_out(layout, process_group)
    return layout


def _over(region: Region) -> str:
    """What makes up one vector; "none" where each coordinate is by itself."""
    return region.over if isinstance(region, Norm) else "none"


def _scopes_of(layout: Layout, rule: int, group: Group, number: int, fresh: list[Tensor]) -> slice:
    """The range of scopes of a group's new parameters, added to the table where they are new."""
    over = _over(layout.rules[rule].region)
    first = len(layout.scopes)
    if over == "tensor":
        layout.scopes += [(rule, id(param)) for param in fresh]
    elif over == "group":
        layout.scopes.append((rule, id(group["params"][0]) if group["params"] else ("empty group", number)))
    elif over == "all":
        if (rule, "all") in layout.scopes:
            first = layout.scopes.index((rule, "all"))
            return slice(first, first + 1)
        layout.scopes.append((rule, "all"))
    return slice(first, len(layout.scopes))


def _spread_out(layout: Layout, process_group: Any) -> None:
    """Note how the parameters lie on ranks."""
    leaves = layout.leaves
    layout.spread = spread_of([leaf.param for leaf in leaves], [leaf.name for leaf in leaves], process_group)
    if layout.spread is not None:
        for leaf, counted in zip(leaves, layout.spread.counted, strict=True):
            leaf.counted, leaf.sharded = counted, is_sharded(leaf.param)


def _numbered(number: int, group: Group) -> list[str]:
    return [f"group {number}, parameter {position}" for position in range(len(group["params"]))]


def _check_radii(layout: Layout) -> None:
    """Compare per-parameter sizes with the parameters, before anything is clipped with them."""
    for number, rule in enumerate(layout.rules):
        owner = type(rule.region).__name__
        leaves = [leaf for leaf in layout.leaves if leaf.rule == number]
        for each in dataclasses.fields(rule.region):  # type: ignore[arg-type]
            size = getattr(rule.region, each.name)
            if isinstance(size, (list, tuple)) and len(size) != len(leaves):
                raise ValueError(
                    f"{owner}: {each.name} has {len(size)} values for {len(leaves)} parameters. Give one value each."
                )
            if isinstance(size, Mapping):
                _check_keys(owner, size, leaves)
            for leaf in leaves if isinstance(size, (list, tuple, Mapping)) else []:
                fitted(owner, pick(size, leaf), leaf)


def _check_keys(owner: str, size: Mapping[Any, Any], leaves: Iterable[Leaf]) -> None:
    names, params = {leaf.name for leaf in leaves}, {id(leaf.param) for leaf in leaves}
    for leaf in leaves:
        if leaf.param not in size and leaf.name not in size:
            raise ValueError(
                f"{owner}: the mapping has no radius for {leaf.name}; its keys are {_shown(size)}. Use parameters, "
                "or their names if the optimizer was made from model.named_parameters()."
            )
    for key in size:
        if not (key in names if isinstance(key, str) else id(key) in params):
            shown = repr(key) if isinstance(key, str) else "a tensor that"
            raise ValueError(f"{owner}: the mapping has a radius for {shown}, which is not among the parameters.")


def _shown(size: Mapping[Any, Any]) -> str:
    keys = [repr(key) if isinstance(key, str) else "a tensor" for key in size]
    return ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")


def pick(size: Any, leaf: Leaf) -> Any:
    """The entry of a per-parameter size that belongs to a parameter."""
    if isinstance(size, Mapping):
        return size[leaf.name] if leaf.name in size else size[leaf.param]
    if isinstance(size, (list, tuple)):
        if leaf.index >= len(size):
            raise ValueError(f"{len(size)} radii were given, but there is a parameter {leaf.index} (counted from 0).")
        return size[leaf.index]
    return size


def fitted(owner: str, size: Any, leaf: Leaf) -> Any:
    """A size as a number, or as a tensor on the parameter's device that spreads to its shape."""
    if isinstance(size, (int, float)):
        return size
    size = torch.as_tensor(size, device=leaf.param.device)
    if size.dim() == 0:
        return size
    try:
        return size.expand(leaf.param.shape)
    except RuntimeError:
        raise ValueError(
            f"{owner}: the radius for {leaf.name} has shape {tuple(size.shape)}, which does not fit the parameter's "
            f"{tuple(leaf.param.shape)}."
        ) from None


def find(leaves: list[Leaf], param: Tensor | str | int, where: str) -> Leaf:
    """A parameter given itself, its name or its position; ``where`` is what clips them, for the error."""
    if isinstance(param, int) and -len(leaves) <= param < len(leaves):
        return leaves[param]
    for leaf in leaves:
        if leaf.param is param or leaf.name == param if isinstance(param, (Tensor, str)) else False:
            return leaf
    shown = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
    raise KeyError(f"{shown} is not among the {len(leaves)} parameters that {where} clips.")


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
