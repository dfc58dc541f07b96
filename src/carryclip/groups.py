"""Which region each group of parameters gets, and how regions are described; no framework is imported here."""

from collections.abc import Mapping
from typing import Any

from carryclip.regions import Region, check_region

GROUP_KEY = "uclip"
"""Key of a param group that holds the group's own region, or None to leave the group alone."""

Group = dict[str, Any]

Regions = Region | Mapping[Any, Region | None]
"""A region for all, or one for each param group, by number or name; None leaves a group alone."""


class RegionMap:
    """Says which region each group gets: what the group holds itself, or one for all, or a mapping."""

    def __init__(self, region: Any) -> None:
        self.default = region
        if not isinstance(region, Mapping):
            check_region(region)
            return
        if not region:
            raise ValueError("The mapping from groups to regions is empty. Write for example {0: Norm(1.0), 1: None}.")
        for value in region.values():
            if value is not None:
                check_region(value)

    def check(self, groups: list[Group]) -> None:
        """Complain about keys of the mapping that fit no group."""
        if not isinstance(self.default, Mapping):
            return
        known = {*range(len(groups)), *(group["name"] for group in groups if "name" in group)}
        for key in self.default:
            if key not in known:
                raise ValueError(
                    f"The mapping names {key!r}, but there is no such group: it may use the numbers 0 to "
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


def describe(value: Any) -> str:
    """A region in words that stay the same from run to run, so that a checkpoint can be compared with them."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(entry)}" for key, entry in value.items()) + "}"
    if not isinstance(value, Region):
        return repr(value)
    sizes = ", ".join(f"{name}={_describe_size(size)}" for name, size in vars(value).items())
    return f"{type(value).__name__}({sizes})"


def _describe_size(size: Any) -> str:
    if callable(size):
        return f"<schedule {getattr(size, '__qualname__', type(size).__qualname__)}>"
    if isinstance(size, (list, tuple, Mapping)) or hasattr(size, "shape"):
        return "<per parameter>"
    return repr(size)
