"""What a figure is: a sheet of panels, the sentences below it, and the numbers behind it.

The sheet is laid out in inches: a legend above, a line below that says which data, a strip under each panel if wanted.
Sizes are given and not solved for, so that thirty panels are laid out as fast as one.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from carryclip_lab.analysis.summary import Cell, Summary, runs_of
from carryclip_lab.figures.style import GREY, Look, plain

LEGEND_ROW, TITLE, FOOT, RIGHT = 0.2, 0.27, 0.3, 0.15
DOTTED: Look = {"color": "black", "linewidth": 0.6, "linestyle": (0, (1, 3))}
"""A line to compare with."""


@dataclass
class Drawn:
    """A figure as it is shown."""

    figure: Any
    caption: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """One entry of the table of figures."""

    title: str
    draw: Callable[[Summary], Drawn | None]
    """None if the study has nothing for it."""


@dataclass
class Panel:
    """A pair of Matplotlib's axes, and the strip below it if there is one."""

    axes: Any
    first: bool = True
    """Whether it stands on the left."""
    last: bool = True
    """Whether it stands in the lowest row."""
    strip: Any = None

    @property
    def lowest(self) -> Any:
        """The axes whose x axis is seen."""
        return self.axes if self.strip is None else self.strip

    def remark(self, text: str, height: float = 0.5) -> None:
        """Words in the middle of a panel that is empty."""
        where = {"transform": self.axes.transAxes, "ha": "center", "va": "center"}
        self.axes.text(0.5, height, text, color="0.45", fontsize=7, **where)

    def beside(self, y: float, text: str, **given: Any) -> None:
        """Small words to the left of the lowest axes, at a height."""
        where = {"transform": self.lowest.get_yaxis_transform(), "ha": "right", "va": "center"}
        self.lowest.text(-0.012, y, text, fontsize=6, color=GREY, **where, **given)

    def hollow(self, points: Sequence[tuple[float, float]], look: Look, zorder: float) -> None:
        """Markers of a look that are empty inside."""
        if points:
            given = {"color": look["color"], "markerfacecolor": "white", "zorder": zorder}
            self.axes.plot(*zip(*points, strict=True), look["marker"], **given)

    def log_x(self, ticks: Mapping[float, str], others: Iterable[float] | None = None) -> None:
        """A logarithmic axis with these labels; a small tick without one at ``others``, or where Matplotlib puts it."""
        axis = self.lowest
        axis.set_xscale("log")
        axis.set_xticks(list(ticks), list(ticks.values()))
        if others is not None:
            axis.set_xticks(list(others), minor=True)
        axis.xaxis.set_minor_formatter("")

    def log_y(self, low: float, high: float, steps: Sequence[float]) -> None:
        """A logarithmic axis with plain numbers at these steps of each decade."""
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        self.axes.set_yscale("log")
        self.axes.set_ylim(low, high)
        self.axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
        self.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        self.axes.yaxis.set_minor_locator(NullLocator())

    def name_rows(self, names: Sequence[str]) -> None:
        """One row for each name, the first on top."""
        self.axes.set_yticks(range(len(names)), list(reversed(names)))
        self.axes.set_ylim(-0.6, len(names) - 0.4)
        self.axes.grid(axis="x", linewidth=0.4, color="0.88")


@dataclass
class Sheet:
    """A figure of a study and its panels, by row and column."""

    figure: Any
    panels: list[list[Panel]]
    rows: Sequence[Any]
    columns: Sequence[Any]
    summary: Summary
    cells: Sequence[Cell]

    def each(self) -> Iterator[tuple[Any, Any, Panel]]:
        """What the row shows, what the column shows, and the panel."""
        for row, panels in zip(self.rows, self.panels, strict=True):
            for column, panel in zip(self.columns, panels, strict=True):
                yield row, column, panel

    def label(self, x: str, y: str) -> None:
        """Name the axes once: x below the lowest panels, y left of the first ones."""
        for panel in self.panels[-1]:
            panel.lowest.set_xlabel(x)
        for row in self.panels:
            row[0].axes.set_ylabel(y)

    def drawn(self, text: str, rows: list[dict[str, Any]]) -> Drawn:
        """With its numbers and a caption: what is seen, of which data, how much of it, and how it is made."""
        summary, (done, planned) = self.summary, runs_of(self.cells)
        size = summary.tier if summary.tier == "paper" else f"{summary.tier}, not the paper's size"
        partial = "" if done == planned else "; partial, so all of it may still change"
        caption = (
            f"{text} Data: {summary.described}; study {summary.study}, "
            f"tier {size}; {done:,} of {planned:,} runs{partial}. Command: {summary.command}"
        )
        return Drawn(self.figure, caption, rows)


def sheet(
    summary: Summary,
    cells: Iterable[Cell],
    rows: Sequence[Any],
    columns: Sequence[Any],
    *,
    legend: Iterable[tuple[str, Look]] = (),
    size: tuple[float, float] = (3.4, 2.2),
    strip: float = 0.0,
    left: float = 0.65,
    gap: tuple[float, float] = (0.22, 0.34),
    share: Literal["all", "row", "none"] = "all",
) -> Sheet:
    """Panels of one size that share their axes.

    Args:
        summary: the study.
        cells: those of its cells that are shown.
        rows: what each row of panels shows.
        columns: what each column shows.
        legend: labels and looks, shown once above all panels.
        size: width and height of a panel.
        strip: height of the strip under each panel; 0 for none.
        left: room for labels.
        gap: between panels, across and down; the latter without the panels' titles.
        share: which panels have the same axes: all, those of a row, or none.
    """
    import matplotlib.figure

    shown, entries = list(cells), list(legend)
    width = left + len(columns) * size[0] + (len(columns) - 1) * gap[0] + RIGHT
    per_row = _legend_columns(entries, width)
    top = 0.14 + LEGEND_ROW * math.ceil(len(entries) / per_row) if entries else 0.05
    below = 0.05 + strip if strip else 0.0
    step = TITLE + size[1] + below + gap[1]
    told = textwrap.wrap(_footer(summary, shown), int((width - 0.2) / 0.05))
    height = top + len(rows) * step - gap[1] + 0.42 + FOOT + 0.12 * (len(told) - 1)
    figure = matplotlib.figure.Figure(figsize=(width, height))

    def add(x: float, y: float, tall: float, **shared: Any) -> Any:
        return figure.add_axes((x / width, y / height, size[0] / width, tall / height), **shared)

    panels: list[list[Panel]] = []
    for row in range(len(rows)):
        bottom = height - top - row * step - TITLE - size[1]
        panels.append([])
        for column in range(len(columns)):
            alike = {"all": panels[0], "row": panels[row], "none": []}[share]
            first = alike[0].axes if alike else None
            x = left + column * (size[0] + gap[0])
            axes = add(x, bottom, size[1], sharex=first, sharey=first)
            panel = Panel(axes, first=column == 0, last=row == len(rows) - 1)
            axes.tick_params(labelsize=7, labelleft=panel.first or share == "none")
            if strip:
                panel.strip = add(x, bottom - below, strip, sharex=axes)
                axes.xaxis.set_visible(False)
                panel.strip.tick_params(labelsize=7, labelleft=panel.first)
            panels[-1].append(panel)
    figure.text(0.12 / width, 0.09 / height, "\n".join(told), fontsize=6.5, color=GREY, va="bottom")
    if entries:
        _add_legend(figure, entries, per_row, left / width, 1 - 0.08 / height)
    return Sheet(figure, panels, rows, columns, summary, shown)


def _footer(summary: Summary, cells: Sequence[Cell]) -> str:
    """The caption's facts inside the picture, for pictures that travel alone."""
    done, planned = runs_of(cells)
    words = [summary.study, summary.data, f"tier {summary.tier}", f"{done:,} of {planned:,} runs"]
    if summary.tier != "paper":
        words[2] += " (not the paper's size)"
    return plain(" · ".join(words + (["PARTIAL"] if done < planned else [])), 160)


def _legend_columns(legend: Sequence[tuple[str, Look]], width: float) -> int:
    """As many as fit beside each other."""
    widest = max((len(plain(label)) for label, _ in legend), default=1)
    return max(1, min(len(legend), int((width - 0.3) / (0.065 * widest + 0.6))))


def _add_legend(figure: Any, legend: Sequence[tuple[str, Look]], columns: int, x: float, y: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    made = [Patch(**look) if "facecolor" in look else Line2D([], [], **look) for _, look in legend]
    room = {"borderaxespad": 0.0, "borderpad": 0.0, "handlelength": 3.2, "columnspacing": 1.6, "labelspacing": 0.3}
    where = {"loc": "upper left", "bbox_to_anchor": (x, y), "ncols": columns, "frameon": False}
    figure.legend(made, [plain(label) for label, _ in legend], **where, **room)


def named(cell: Cell) -> dict[str, Any]:
    """The first columns of the numbers behind a figure: which cell they are about."""
    setting = cell.setting
    region = "" if setting.region is None else setting.name.label
    return {"optimizer": setting.optimizer, "region": region, "method": setting.method.label, "batch": cell.batch}


def known(value: float | None) -> float | str:
    """A number for a table, empty where there is none."""
    return "" if value is None or not math.isfinite(value) else value
