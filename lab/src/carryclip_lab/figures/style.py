"""How a method looks: one colour, dash and marker in all figures, told apart in print and by the colour-blind."""

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from carryclip_lab.analysis.naming import CAPPED, CLIP, DRIP, FULL, GATED, NONE, SHRUNK, Method

RC: Any = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.linewidth": 0.7,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,  # names of studies and methods are anybody's, and no formulas
}
"""What differs from Matplotlib's defaults while figures are drawn and saved."""

GREY = "0.4"
Look = dict[str, Any]
T = TypeVar("T", bound=Hashable)
_METHODS: dict[Any, Look] = {
    NONE: {"color": "#4d4d4d", "linestyle": "-", "marker": "o"},
    CLIP: {"color": "#d55e00", "linestyle": (0, (5, 2)), "marker": "s"},
    FULL: {"color": "#0072b2", "linestyle": "-", "marker": "^"},
    GATED: {"color": "#009e73", "linestyle": (0, (5, 1.5, 1, 1.5)), "marker": "D"},
    CAPPED: {"color": "#882255", "linestyle": (0, (2, 1.5)), "marker": "v"},
    DRIP: {"color": "#b8860b", "linestyle": (0, (3, 1, 1, 1)), "marker": "*"},
    SHRUNK: {"color": "#cc79a7", "linestyle": "-", "marker": "p"},
}
_COMPONENT: dict[Method, Look] = {
    CLIP: {"color": "#f0a36b", "linestyle": (0, (1, 1.2)), "marker": "x"},
    FULL: {"color": "#56b4e9", "linestyle": (0, (3, 1, 1, 1, 1, 1)), "marker": "v"},
    GATED: {"color": "#7bd0b4", "linestyle": (0, (2, 2)), "marker": "P"},
}
_OTHERS: Sequence[Look] = (
    {"color": "#6a3d9a", "linestyle": (0, (8, 2)), "marker": "h"},
    {"color": "#8c564b", "linestyle": (0, (2, 1)), "marker": "<"},
    {"color": "#17becf", "linestyle": (0, (4, 1, 2, 1)), "marker": ">"},
    {"color": "#7f7f00", "linestyle": (0, (6, 1)), "marker": "X"},
    {"color": "#e377c2", "linestyle": (0, (1, 2)), "marker": "d"},
)


def looks(methods: Sequence[T]) -> dict[T, Look]:
    """A look for every method; those the paper does not know, or variants of one, take the next that is free."""
    others = [method for method in methods if method not in _METHODS]
    given = {method: _OTHERS[place % len(_OTHERS)] for place, method in enumerate(others)}
    return {method: _METHODS.get(method) or given[method] for method in methods}


def component_look(method: Method, usual: Look) -> Look:
    """For component clipping beside norm clipping: the method's colour, lighter, with another dash and marker."""
    return _COMPONENT.get(method, {**usual, "linestyle": (0, (1, 1.2)), "marker": "x"})


def plain(text: str, most: int = 60) -> str:
    """Text for a figure: one line of printable characters."""
    clean = "".join(letter if letter.isprintable() else " " for letter in text)
    return clean if len(clean) <= most else clean[: most - 1] + "…"
