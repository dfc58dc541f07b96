"""Which parameters are clipped, by which rule, in which scope: the table of scopes is made here."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carryclip.algorithm import NonFinite, Rule, rule_number
from carryclip.carry import CarryPolicy
from carryclip.groups import GROUP_KEY, Group, RegionMap, describe  # noqa: F401 (imported from here by others)
from carryclip.regions import Norm, Region
from carryclip.scopes import NO_SCOPE, Place, Table
from carryclip.torch._shards import Spread, is_sharded, local_gradient, local_range, spread_of

Gradients = list[Tensor | None]
"""By number of the parameter; what is here of those that are spread over ranks."""

Places = list[tuple[int, slice] | None]
"""Per group its rule and the range of scopes it takes part in; None if it is left alone."""


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
    """Its entry in the table of scopes, or the first if its rows have one each; ``NO_SCOPE`` if it has none."""
    place: Place = NO_SCOPE
    """The same, or those of its rows that are here."""
    axis: int | None = None
    """Along which its rows lie; None if it has none, or one."""
    sharded: bool = False
    """It is a ``DTensor``, of which only a part may be here."""
    counted: bool = True
    """False where another rank has the same entries and counts them."""


class Run(NamedTuple):
    """Scopes side by side: one, or those of a tensor's rows."""

    rule: int
    name: Hashable
    """Stays when groups are added."""
    length: int = 1


@dataclass
class Layout:
    """All clipped parameters, the distinct rules, and where each group's scopes lie."""

    rules: list[Rule] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    scopes: list[Run] = field(default_factory=list)
    """The table of scopes, run by run."""
    groups: Places = field(default_factory=list)
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
    def table(self) -> Table:
        """The rules of the scopes, for what belongs to all of them."""
        return Table([self.rules[run.rule] for run in self.scopes], [run.length for run in self.scopes])

    @cached_property
    def norms(self) -> list[int]:
        """The scopes that are clipped as one vector."""
        return self._scopes_where(lambda region: region.joint)

    @cached_property
    def runs(self) -> list[tuple[Run, slice]]:
        """The runs of scopes, and where each lies in the table."""
        ends = list(accumulate(run.length for run in self.scopes))
        return [(run, slice(end - run.length, end)) for run, end in zip(self.scopes, ends, strict=True)]

    def _scopes_where(self, chosen: Callable[[Region], bool]) -> list[int]:
        """The scopes whose region is chosen."""
        mine = [place for run, place in self.runs if chosen(self.rules[run.rule].region)]
        return [scope for place in mine for scope in range(place.start, place.stop)]

    @cached_property
    def followers(self) -> list[int]:
        """The rules whose radius is not a number."""
        there = {run.rule for run in self.scopes}
        return [number for number in sorted(there) if self.rules[number].region.rule is not None]

    @cached_property
    def weighs(self) -> list[Leaf]:
        """The parameters whose weights count in their radius."""
        rules = [rule.region.rule for rule in self.rules]
        return [leaf for leaf in self.leaves if (rule := rules[leaf.rule]) is not None and rule.weighs]

    @cached_property
    def is_one_vector(self) -> bool:
        """Whether there is a single norm, over all that is clipped."""
        return len(self.rules) == len(self.norms) == 1

    @cached_property
    def rejects(self) -> bool:
        """Whether a gradient's values can cancel a step."""
        return any(rule.can_reject for rule in self.rules)

    @cached_property
    def own(self) -> list[int]:
        """The scopes of whole tensors that only one rank has, so that they need no other."""
        whole = self.spread is not None and self.spread.whole
        return self._scopes_where(_stands_alone) if whole else []

    @cached_property
    def shared(self) -> list[int]:
        """The other scopes."""
        own = set(self.own)
        return [k for k in range(self.table.width) if k not in own]

    @cached_property
    def members(self) -> Counter[int]:
        """How many parameters make up each vector."""
        return Counter(leaf.scope for leaf in self.leaves)


def build(
    groups: list[Group], regions: RegionMap, carry: CarryPolicy, nonfinite: NonFinite, process_group: Any = None
) -> Layout:
    """Lay out the parameters of ``groups``; a parameter that occurs twice counts once, where it comes first."""
    layout = Layout()
    leaves = layout.leaves
    seen: set[int] = set()
    counts: Counter[int] = Counter()
    for number, group in enumerate(groups):
        params = group["params"]
        fresh = [param for param in dict.fromkeys(params) if id(param) not in seen]
        seen.update(map(id, fresh))
        region = regions.of(number, group)
        if region is None:
            layout.groups.append(None)
            continue
        rule = rule_number(layout.rules, Rule(region, carry, nonfinite))
        scopes = _add_scopes(layout, rule, group, number, fresh)
        names = group.get("param_names") or [f"group {number}, parameter {place}" for place in range(len(params))]
        name_of = dict(zip(params, names, strict=True))
        at = scopes.start if layout.rules[rule].has_scope else NO_SCOPE
        for param in fresh:
            leaf = Leaf(param, name_of[param], len(leaves), rule, counts[rule], at, at)
            if isinstance(region, Norm) and region.split:
                leaf.axis = region.axis(param.dim())
                leaf.place = slice(at, at + region.vectors(param.shape))
                at = leaf.place.stop
            elif _over(region) == "tensor":
                at += 1
            leaves.append(leaf)
            counts[rule] += 1
        layout.groups.append((rule, scopes))
    if not seen:
        raise ValueError("There are no parameters to clip.")
    if not leaves:
        raise ValueError("There is nothing to clip: every group is left alone (None). Give one of them a region.")
    _check_radii(layout)
    layout.spread = spread_of([leaf.param for leaf in leaves], [leaf.name for leaf in leaves], process_group)
    if layout.spread is not None:
        for leaf, counted in zip(leaves, layout.spread.counted, strict=True):
            leaf.counted, leaf.sharded = counted, is_sharded(leaf.param)
            if leaf.axis is not None and leaf.sharded:
                here = local_range(leaf.param, leaf.axis)
                leaf.place = slice(leaf.scope + here.start, leaf.scope + here.stop)
    return layout


def _stands_alone(region: Region) -> bool:
    """Whether a tensor is clipped without a look at others."""
    alone = region.rule is None or region.rule.before == math.inf
    return _over(region) in ("tensor", "row", "column") and alone


def _over(region: Region) -> str:
    """What makes up one vector; "none" where each coordinate is by itself."""
    return region.over if isinstance(region, Norm) else "none"


def _add_scopes(layout: Layout, rule: int, group: Group, number: int, fresh: list[Tensor]) -> slice:
    """The range of scopes of a group's new parameters, added to the table where they are new."""
    own = layout.rules[rule]
    match "all" if own.has_scope and not own.region.joint else _over(own.region):
        case "tensor":
            runs = [Run(rule, id(param)) for param in fresh]
        case "row" | "column":
            region: Any = own.region
            runs = [Run(rule, id(param), region.vectors(param.shape)) for param in fresh]
        case "group":
            runs = [Run(rule, id(group["params"][0]) if group["params"] else ("empty group", number))]
        case "all":
            runs = [Run(rule, "all")]
        case _:
            return slice(0, 0)
    first = sum(run.length for run in layout.scopes)
    if runs == [Run(rule, "all")] and runs[0] in layout.scopes:
        place = layout.scopes.index(runs[0])
        first = sum(run.length for run in layout.scopes[:place])
    else:
        layout.scopes += runs
    return slice(first, first + sum(run.length for run in runs))


def _check_radii(layout: Layout) -> None:
    """Compare per-parameter sizes with the parameters, before anything is clipped with them."""
    for number, rule in enumerate(layout.rules):
        owner = type(rule.region).__name__
        leaves = [leaf for leaf in layout.leaves if leaf.rule == number]
        for name, size in vars(rule.region).items():
            if not isinstance(size, (list, tuple, Mapping)):
                continue
            if isinstance(size, Mapping):
                _check_keys(owner, size, leaves)
            elif len(size) != len(leaves):
                raise ValueError(f"{owner}: {name} has {len(size)} values for {len(leaves)} parameters: give one each.")
            for leaf in leaves:
                fitted(owner, pick(size, leaf), leaf)


def _check_keys(owner: str, size: Mapping[Any, Any], leaves: list[Leaf]) -> None:
    shown = [repr(key) if isinstance(key, str) else "a tensor" for key in size]
    for leaf in leaves:
        if leaf.param not in size and leaf.name not in size:
            raise ValueError(
                f"{owner}: the mapping has no radius for {leaf.name}; it begins with {', '.join(shown[:5])}. Use "
                "parameters, or their names if the optimizer was made from model.named_parameters()."
            )
    known = {leaf.name for leaf in leaves} | {id(leaf.param) for leaf in leaves}
    for key, label in zip(size, shown, strict=True):
        if (key if isinstance(key, str) else id(key)) not in known:
            raise ValueError(f"{owner}: the mapping has a radius for {label}, which is not among the parameters.")


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
            f"{tuple(leaf.param.shape)}. Radii of its rows are written radius[:, None]."
        ) from None


def find(leaves: list[Leaf], param: Tensor | str | int, where: str) -> Leaf:
    """A parameter given itself, its name or its position; ``where`` is what clips them, for the error."""
    if isinstance(param, int) and -len(leaves) <= param < len(leaves):
        return leaves[param]
    for leaf in leaves:
        if leaf.param is param or (isinstance(param, str) and leaf.name == param):
            return leaf
    shown = f"a tensor of shape {tuple(param.shape)}" if isinstance(param, Tensor) else repr(param)
    raise KeyError(f"{shown} is not among the {len(leaves)} parameters that {where} clips.")
