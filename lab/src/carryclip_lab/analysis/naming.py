"""Runs in words: short names of data, regions and methods, the same in every figure, table and verdict."""

import functools
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from carryclip.carry import DEFAULT, Capped, CarryPolicy, Drip, Gated, Shrunk
from carryclip.moments import EWMA
from carryclip.radius import Radius
from carryclip.regions import Adaptive, Component, Norm
from carryclip_lab.spec import Spec, parse, policy_of

_PEERS = "carryclip.experiments.peers:"
"""Where the classes of others' remedies were when their runs' ids were made."""
PEERS = {
    "Average": "clip of the average",
    "ErrorFeedback": "EF-SGD",
    "Dice": "DiceSGD",
    "Clip21": "Clip21, momentum",
    "ZScore": "ZClip",
}
"""Others' remedies, by the names of their classes."""
REWARDS = {
    "carryclip_lab.rewards:Clipped": "rewards clipped",
    "carryclip_lab.rewards:Carried": "rewards with carry",
    "carryclip_lab.rewards:Seen": "rewards with carry, seen",
}
"""What is done to rewards instead of gradients."""

Kind = Literal["none", "component", "norm", "Welford", "EWMA", "other"]


@dataclass(frozen=True)
class RegionName:
    """What a figure or a rule needs to know of a region.

    Attributes:
        kind: constant (``"component"``, ``"norm"``), adaptive (by its moments), ``"none"`` or ``"other"``.
        sizes: its radius, or the paper's (a, b).
        note: what else differs from the paper's region of that kind, if anything.
    """

    kind: Kind
    sizes: tuple[float, ...] = ()
    note: str = ""

    @property
    def label(self) -> str:
        """In a few words: ``"norm 0.5"``, ``"EWMA (1, 2)"``."""
        if self.kind == "other":
            return self.note
        return " ".join(word for word in (self.kind, self.size) if word)

    @property
    def size(self) -> str:
        """The same without the kind."""
        if len(self.sizes) == 2:
            return f"({self.sizes[0]:g}, {self.sizes[1]:g}){self.note}"
        return f"{self.sizes[0]:g}{self.note}" if self.sizes else ""


@functools.cache
def region_name(text: str | None) -> RegionName:
    """The name of a spec's region.

    >>> region_name("Norm(radius=0.5, over='all')").label, region_name("Adaptive(1, 2, moments=EWMA())").label
    ('norm 0.5', 'EWMA (1, 2)')
    """
    region = None if text is None else parse(text)
    match region:
        case None:
            return RegionName("none")
        case Component(radius=int() | float()):
            return RegionName("component", (float(region.radius),))
        case Norm(radius=int() | float()):
            return RegionName("norm", (float(region.radius),), "" if region.over == "all" else f" per {region.over}")
        case Adaptive(mean=int() | float(), std=int() | float()):
            kind = "EWMA" if isinstance(region.moments, EWMA) else "Welford"
            note = _unusual(region, skip=("mean", "std", "moments")) + _unusual(region.moments)
            return RegionName(kind, (float(region.mean), float(region.std)), note)
    return RegionName("other", (), str(text))


@dataclass(frozen=True)
class Method:
    """What is done to the gradients. Methods are told apart by what a spec says of them; labels are for people.

    Attributes:
        carry: True, False or a policy, as the library takes it; None where nothing is clipped.
        own: ``"module:function"`` of a method of your own or of somebody else's remedy; another loss is one as well.
        radius: a rule that says the radius, if it is not the trial's own.

    >>> Method(Gated()).label, Method(True, "mine:clip").label, Method(False, radius="Quantile(0.9)").label
    ('Gated', 'mine:clip + U-Clip', 'clip at Quantile(0.9)')
    """

    carry: CarryPolicy | None
    own: str | None = None
    radius: str | None = None

    @functools.cached_property
    def label(self) -> str:
        """In a few words: ``"none"``, ``"clip"``, ``"U-Clip"``, ``"Gated"``, or the name of your own."""
        if self.own is None:
            name = "none" if self.carry is None else _policy_name(self.carry)
            return name if self.radius is None else f"{name} at {self.radius}"
        name = REWARDS.get(self.own) or PEERS.get(self.own.removeprefix(_PEERS), self.own)
        return name if not self.carry else f"{name} + {_policy_name(self.carry)}"

    @property
    def words(self) -> str:
        """The same where it stands alone."""
        return "no clipping" if self == NONE else self.label

    @property
    def is_uclip(self) -> bool:
        """Whether it is clipping with a carry, and nobody else's method."""
        return self.own is None and bool(self.carry)

    @property
    def order(self) -> tuple[int, str]:
        """For sorting: those of the paper first."""
        return (METHODS.index(self) if self in METHODS else len(METHODS), self.label)


NONE, CLIP, FULL, GATED, CAPPED, DRIP, SHRUNK = METHODS = tuple(
    map(Method, (None, False, True, Gated(), Capped(10), Drip(), Shrunk()))
)
"""The methods that come first, in this order."""


def peer(name: str, carry: CarryPolicy = False) -> Method:
    """One of others' remedies, by the name of its class."""
    return Method(carry, _PEERS + name)


def method_of(spec: Spec) -> Method:
    """What a spec does to the gradients; a loss that one might take instead is a method as well."""
    loss = dict(spec.settings).get("loss", "squared")
    if loss != "squared":
        return Method(None, f"{loss} loss")
    clips = spec.region is not None or spec.method is not None
    return Method(policy_of(spec.carry) if clips else None, spec.method, radius_rule(spec.region))


@functools.cache
def radius_rule(region: str | None) -> str | None:
    """The rule that says a region's radius, if it has one.

    >>> radius_rule("Norm(radius=Quantile(0.9), over='all')"), radius_rule("Norm(0.5)")
    ('Quantile(0.9)', None)
    """
    radius = None if region is None else getattr(parse(region), "radius", None)
    return repr(radius) if isinstance(radius, Radius) else None


def _policy_name(carry: Any) -> str:
    """U-Clip is the paper's carry alone; policies have their own names, so that nobody takes one for the other."""
    if isinstance(carry, bool):
        return "U-Clip" if carry else "clip"
    if carry == DEFAULT:
        return f"{type(carry).__name__} (default)"
    needed = [f"{getattr(carry, each.name):g}" for each in fields(carry) if each.default is MISSING]
    given = needed + [part.strip() for part in _unusual(carry).split(",") if part]
    return type(carry).__name__ + (f"({', '.join(given)})" if given else "")


def _unusual(thing: Any, skip: tuple[str, ...] = ()) -> str:
    """The fields that are not at their defaults, each after a comma."""
    chosen = [each for each in fields(thing) if each.name not in skip and each.default is not MISSING]
    return "".join(
        f", {each.name}={getattr(thing, each.name)!r}" for each in chosen if getattr(thing, each.name) != each.default
    )


def region_order(text: str | None) -> tuple[Any, ...]:
    """For sorting regions: by kind, then by size; the paper's (a, 0) come before (1, b)."""
    name = region_name(text)
    kinds = ("none", "norm", "component", "Welford", "EWMA", "other")
    return (kinds.index(name.kind), name.sizes[-1:] != (0.0,), name.sizes, name.note)
