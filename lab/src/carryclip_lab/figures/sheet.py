"""A sheet of panels in inches: a legend above, a line below that says which data, a strip under each panel if wanted.

Sizes are given and not solved for, so that thirty panels are laid out as fast as one.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from carryclip_lab.figures.style import GREY, Look, plain

LEGEND_ROW, TITLE, FOOT, RIGHT = 0.2, 0.27, 0.3, 0.15


@dataclass
class Sheet:
    """A figure and its axes, by row and column."""

    figure: Any
    panels: list[list[Any]]
    strips: list[list[Any]]

    def label(self, x: str, y: str) -> None:
        """Name the axes once: x below the lowest panels, y left of the first ones."""
        for axis in (self.strips or self.panels)[-1]:
            axis.set_xlabel(x)
        for row in self.panels:
            row[0].set_ylabel(y)


def sheet(
    rows: int,
    columns: int,
    *,
    legend: Sequence[tuple[str, Look]],
    foot: str,
    size: tuple[float, float] = (3.4, 2.2),
    strip: float = 0.0,
    left: float = 0.65,
    gap: tuple[float, float] = (0.22, 0.34),
    share: Literal["all", "row", "none"] = "all",
) -> Sheet:
    """Panels of one size that share their axes.

    Args:
        rows: of panels.
        columns: of panels.
        legend: labels and looks, shown once above all panels.
        foot: the line below.
        size: width and height of a panel.
        strip: height of the strip under each panel; 0 for none.
        left: room for labels.
        gap: between panels, across and down; the latter without the panels' titles.
        share: which panels have the same axes: all, those of a row, or none.
    """
    from matplotlib.figure import Figure

    width = left + columns * size[0] + (columns - 1) * gap[0] + RIGHT
    per_row = _legend_columns(legend, width)
    top = 0.14 + LEGEND_ROW * math.ceil(len(legend) / per_row) if legend else 0.05
    below = 0.05 + strip if strip else 0.0
    step = TITLE + size[1] + below + gap[1]
    told = textwrap.wrap(foot, int((width - 0.2) / 0.05))
    height = top + rows * step - gap[1] + 0.42 + FOOT + 0.12 * (len(told) - 1)
    figure = Figure(figsize=(width, height))
    panels, strips = [], []
    for row in range(rows):
        bottom = height - top - row * step - TITLE - size[1]
        panels.append([])
        strips.append([])
        for column in range(columns):
            x = (left + column * (size[0] + gap[0])) / width
            alike = {"all": panels[0], "row": panels[row], "none": []}[share]
            first = alike[0] if alike else None
            panel = figure.add_axes((x, bottom / height, size[0] / width, size[1] / height), sharex=first, sharey=first)
            panel.tick_params(labelsize=7, labelleft=column == 0 or share == "none")
            panels[-1].append(panel)
            if strip:
                low = (bottom - below) / height
                axis = figure.add_axes((x, low, size[0] / width, strip / height), sharex=panel)
                panel.xaxis.set_visible(False)
                axis.tick_params(labelsize=7, labelleft=column == 0)
                strips[-1].append(axis)
    figure.text(0.12 / width, 0.09 / height, "\n".join(told), fontsize=6.5, color=GREY, va="bottom")
    if legend:
        _add_legend(figure, legend, per_row, left / width, 1 - 0.08 / height)
    return Sheet(figure, panels, strips if strip else [])


def _legend_columns(legend: Sequence[tuple[str, Look]], width: float) -> int:
    """As many as fit beside each other."""
    widest = max((len(plain(label)) for label, _ in legend), default=1)
    return max(1, min(len(legend), int((width - 0.3) / (0.065 * widest + 0.6))))


def _add_legend(figure: Any, legend: Sequence[tuple[str, Look]], columns: int, x: float, y: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    made = [Patch(**look) if "facecolor" in look else Line2D([], [], **look) for _, look in legend]
    figure.legend(
        made,
        [plain(label) for label, _ in legend],
        loc="upper left",
        bbox_to_anchor=(x, y),
        ncols=columns,
        frameon=False,
        borderaxespad=0.0,
        borderpad=0.0,
        handlelength=3.2,
        columnspacing=1.6,
        labelspacing=0.3,
    )
