"""How figures of the theory are drawn: two panels, lines that can be told apart in print."""

from typing import Any

LINES: dict[str, dict[str, Any]] = {
    "seen": {"color": "black", "linestyle": "-", "marker": "o", "markersize": 3.5},
    "pooled": {"color": "0.45", "linestyle": "-", "marker": "x", "markersize": 4},
    "printed": {"color": "C3", "linestyle": "--"},
    "corrected": {"color": "C0", "linestyle": "-."},
    "sharp": {"color": "C2", "linestyle": ":", "linewidth": 2.2},
}
"""By kind: told apart by dash and marker as well as by colour."""
REGIMES: dict[str, dict[str, Any]] = {
    "above": {"color": "black", "linestyle": "-", "marker": "o", "markersize": 3},
    "at": {"color": "C0", "linestyle": "-.", "marker": "s", "markersize": 3},
    "below": {"color": "C3", "linestyle": "--", "marker": "^", "markersize": 3},
}
"""By where the radius is: above the mean gradient, at it, below it."""


def panels() -> tuple[Any, Any, Any]:
    """A figure, and its two panels beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.4, 3.8), layout="constrained")
    return figure, left, right


def finish(axis: Any, *, legend: dict[str, Any] | None = None, **given: Any) -> None:
    """Scales, limits and labels of a panel in which everything is drawn, and its legend."""
    axis.set(**given)
    axis.legend(**{"frameon": False, "fontsize": 8, **(legend or {})})


def mark_optimum(axis: Any, height: float = 0.0, colour: str = "black") -> None:
    """A thin dotted line across the panel."""
    axis.axhline(height, color=colour, linewidth=0.6, linestyle=(0, (1, 4)))


def mark_no_op(axis: Any, start: float, end: float, text: str) -> None:
    """Shade the part of an axis where clipping does nothing."""
    axis.axvspan(start, end, color="0.9", zorder=0)
    axis.text(
        (start + end) / 2, 0.03, text, transform=axis.get_xaxis_transform(), ha="center", fontsize=8, color="0.25"
    )
