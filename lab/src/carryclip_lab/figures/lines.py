"""Epochs to the target against batch size: the panel that most figures are made of.

A point is the median over seeds with bars from the smallest to the largest, drawn only if all seeds reached the target;
the strip below counts those that did not. A hollow point belongs to a cell whose other learning rates are not done.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.figures.sheet import Panel, known, named
from carryclip_lab.figures.style import GREY, Look, component_look, looks, plain


@dataclass(frozen=True)
class Line:
    """A setting along the batch sizes."""

    label: str
    look: Look
    cells: list[Cell]


def lines_of(summary: Summary, optimizer: str, regions: Sequence[str], batches: Sequence[int]) -> list[Line]:
    """The optimizer alone, methods of your own, and everything that is done in one or two regions."""
    given = looks(summary.methods)
    both = len(set(regions)) > 1
    found = []
    for region in (None, *regions):
        for method in summary.methods:
            cells = [cell for batch in batches if (cell := summary.find(optimizer, region, method, batch))]
            if not cells:
                continue
            kind = cells[0].setting.name.kind
            look = component_look(method, given[method]) if both and kind == "component" else given[method]
            found.append(Line(f"{kind} {method.label}" if both and region else method.label, look, cells))
    return found


def legend_of(lines: Iterable[Line]) -> dict[str, Look]:
    """Every label once."""
    return {line.label: line.look for line in lines}


def cells_of(lines: Iterable[Line]) -> list[Cell]:
    """Every cell once."""
    return list(dict.fromkeys(cell for line in lines for cell in line.cells))


def apart(place: int, count: int, width: float = 0.022) -> float:
    """A factor that keeps points beside each other on a logarithmic axis; the width is in decades."""
    return 10 ** (width * (place - (count - 1) / 2))


def draw_lines(panel: Panel, lines: Sequence[Line]) -> None:
    """Medians with bars; a gap where a seed did not reach the target."""
    for place, line in enumerate(lines):
        _draw_line(panel, line, apart(place, len(lines)))
    if not any(cell.drawn for line in lines for cell in line.cells):
        panel.remark("no point yet: no setting has\nall seeds at the target")
    panel.axes.grid(axis="y", color="0.92", linewidth=0.6)
    panel.axes.set_axisbelow(True)


def _draw_line(panel: Panel, line: Line, shift: float) -> None:
    x = [cell.batch * shift for cell in line.cells]
    y = [cell.median if cell.drawn else math.nan for cell in line.cells]
    panel.axes.plot(x, y, **line.look, zorder=3)
    drawn = [cell for cell in line.cells if cell.drawn]
    if drawn:
        at = [cell.batch * shift for cell in drawn]
        low, high = ([end(cell.chosen.values()) for cell in drawn] for end in (min, max))
        panel.axes.vlines(at, low, high, color=line.look["color"], linewidth=0.9, zorder=2)
        panel.axes.plot([*at, *at], [*low, *high], "_", color=line.look["color"], markersize=4, zorder=2)
    panel.hollow([(cell.batch * shift, cell.median) for cell in drawn if cell.partial], line.look, zorder=4)


def strip_height(methods: int) -> float:
    """In inches: a row for each method and one for the heading."""
    return 0.135 * (methods + 1)


def draw_strip(panel: Panel, lines: Sequence[Line], labels: Sequence[str]) -> None:
    """One row per label, one place per batch size: how many seeds did not reach, or a question mark before all ran."""
    strip, good = panel.strip, []
    for line in sorted(lines, key=lambda line: labels.index(line.label)):
        row = labels.index(line.label) + 1
        for cell in line.cells:
            if cell.drawn:
                good.append((cell.batch, row))
                continue
            text, color = (str(cell.missed), line.look["color"]) if cell.missed else ("?", GREY)
            given = {"fontsize": 6, "ha": "center", "va": "center_baseline", "weight": "bold"}
            strip.text(cell.batch, row, text, color=color, **given)
    strip.plot([x for x, _ in good], [y for _, y in good], ".", color="0.72", markersize=1.5)
    strip.set_ylim(len(labels) + 0.5, -0.5)
    strip.set_yticks(range(1, len(labels) + 1), [plain(label, 22) if panel.first else "" for label in labels])
    strip.yaxis.set_visible(panel.first)
    if panel.first:
        panel.beside(0, "missed the target:", style="italic")
    strip.tick_params(axis="y", length=0, labelsize=6)
    strip.set_facecolor("0.965")
    for side in strip.spines.values():
        side.set_visible(False)


def batch_axis(panel: Panel, batches: Sequence[int], width: float = 3.5) -> None:
    """Logarithmic, labelled at the batch sizes that there are, as far as the labels fit."""
    low, high = min(batches) / 1.35, max(batches) * 1.35
    shown: list[int] = []
    for batch in batches:
        last = shown[-1] if shown else 0
        room = width * math.log(batch / last) / math.log(high / low) if last else math.inf
        if room >= 0.06 + 0.03 * len(thousands(batch) + thousands(last)):
            shown.append(batch)
    panel.log_x({batch: thousands(batch) for batch in shown}, [batch for batch in batches if batch not in shown])
    panel.lowest.set_xlim(low, high)


def thousands(value: int) -> str:
    """12000 as 12k."""
    return f"{value / 1000:g}k" if value >= 1000 else str(value)


def epochs_axis(panel: Panel, cells: Iterable[Cell], *, log: bool = True) -> None:
    """Of the points that are drawn, logarithmic with plain labels or linear from zero."""
    values = [epochs for cell in cells if cell.drawn for epochs in cell.chosen.values()] or [1.0, 10.0]
    low, high = max(min(values), 0.5), max(values)
    if log:
        steps = (1.0, 2.0, 5.0) if high / low > 4 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
        panel.log_y(low / 1.25, high * 1.25, steps)
    else:
        panel.axes.set_ylim(0, 1.08 * high)


def cell_row(cell: Cell) -> dict[str, Any]:
    """The numbers behind a point; empty where the target was not reached."""
    values = [epochs for epochs in cell.chosen.values() if epochs < math.inf]
    return {
        **named(cell),
        "lr": known(cell.lr),
        "median": known(cell.median),
        "min": min(values, default=""),
        "max": max(values, default="") if not cell.missed else "",
        "reached": len(values),
        "done": len(cell.chosen),
        "seeds": cell.seeds,
        "drawn": cell.drawn,
        "partial": cell.partial,
    }
