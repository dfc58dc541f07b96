"""Runs in words: short names of data, regions and methods, the same in every figure, table and verdict."""

import functools
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from carryclip.moments import EWMA
from carryclip.regions import Adaptive, Component, Norm
from carryclip_lab.spec import Spec, parse, policy_of

OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "momentum",
    "nesterov": "Nesterov momentum",
    "adam": "Adam",
    "adamw": "AdamW",
}
METHODS = ("none", "clip", "U-Clip", "U-Clip, Gated", "U-Clip, Capped(10)")
"""The methods that come first, in this order."""
_PEERS = "carryclip.experiments.peers:"
PEERS = {
    "Average": "clip of the average",
    "ErrorFeedback": "EF-SGD",
    "Dice": "DiceSGD",
    "Clip21": "Clip21, momentum",
    "ZScore": "ZClip",
}
"""Others' remedies, by the names of their classes."""

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


def method_name(spec: Spec) -> str:
    """What is done to the gradients: ``"none"``, ``"clip"``, ``"U-Clip"``, ``"U-Clip, Gated"``, or your own method."""
    if spec.method is not None:
        known = PEERS.get(spec.method.removeprefix(_PEERS)) if spec.method.startswith(_PEERS) else None
        carried = "" if spec.carry == "none" else f" + {_policy_name(spec.carry).removeprefix('U-Clip, ')}"
        return (known or spec.method) + carried
    return spec.label if spec.carry == "none" else _policy_name(spec.carry)


@functools.cache
def _policy_name(carry: str) -> str:
    if carry == "full":
        return "U-Clip"
    policy: Any = policy_of(carry)
    needed = [f"{getattr(policy, each.name):g}" for each in fields(policy) if each.default is MISSING]
    given = needed + [part.strip() for part in _unusual(policy).split(",") if part]
    return f"U-Clip, {type(policy).__name__}" + (f"({', '.join(given)})" if given else "")


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


def method_order(method: str) -> tuple[int, str]:
    """For sorting methods: those of the paper first."""
    return (METHODS.index(method) if method in METHODS else len(METHODS), method)
