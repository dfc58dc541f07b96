"""Epochs to the target against batch size: the panel that most figures are made of.

A point is the median over seeds with bars from the smallest to the largest, drawn only if all seeds reached the target;
the strip below counts those that did not. A hollow point belongs to a cell whose other learning rates are not done.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.figures.style import GREY, Look, component_look, looks, plain


def strip_height(methods: int) -> float:
    """In inches: a row for each method and one for the heading."""
    return 0.135 * (methods + 1)


@dataclass(frozen=True)
class Line:
    """A setting along the batch sizes."""

    label: str
    look: Look
    cells: list[Cell]


def lines_of(summary: Summary, optimizer: str, regions: Sequence[str], batches: Sequence[int]) -> list[Line]:
    """The optimizer alone, methods of your own, and everything that is done in one or two regions."""
    given = looks(summary.methods)
    both = len({region for region in regions if region}) > 1
    found = []
    for region in (None, *regions):
        for method in summary.methods:
            cells = [cell for batch in batches if (cell := summary.find(optimizer, region, method, batch))]
            if not cells:
                continue
            kind = cells[0].setting.name.kind
            look = component_look(method, given[method]) if both and kind == "component" else given[method]
            found.append(Line(f"{kind} {method}" if both and region else method, look, cells))
    return found


def legend_of(panels: Iterable[Sequence[Line]]) -> list[tuple[str, Look]]:
    """Every label once."""
    return list({line.label: line.look for lines in panels for line in lines}.items())


def draw_lines(panel: Any, lines: Sequence[Line]) -> None:
    """Medians with bars; a gap where a seed did not reach the target."""
    for place, line in enumerate(lines):
        shift = 10 ** (0.022 * (place - (len(lines) - 1) / 2))
        color = line.look["color"]
        x = [cell.batch * shift for cell in line.cells]
        panel.plot(x, [cell.median if cell.drawn else math.nan for cell in line.cells], **line.look, zorder=3)
        drawn = [(at, cell, sorted(cell.chosen.values())) for at, cell in zip(x, line.cells, strict=True) if cell.drawn]
        if drawn:
            ends = [[seen[end] for _, _, seen in drawn] for end in (0, -1)]
            at = [at for at, _, _ in drawn]
            panel.vlines(at, *ends, color=color, linewidth=0.9, zorder=2)
            panel.plot([*at, *at], ends[0] + ends[1], "_", color=color, markersize=4, zorder=2)
        hollow = [(at, cell.median) for at, cell, _ in drawn if cell.partial]
        if hollow:
            panel.plot(*zip(*hollow, strict=True), line.look["marker"], color=color, markerfacecolor="white", zorder=4)
    if not any(cell.drawn for line in lines for cell in line.cells):
        panel.text(0.5, 0.5, "no point yet: no setting has\nall seeds at the target", **centred(panel))


def centred(panel: Any) -> dict[str, Any]:
    """For a remark in the middle of an empty panel."""
    return {"transform": panel.transAxes, "ha": "center", "va": "center", "color": "0.45", "fontsize": 7}


def draw_strip(strip: Any, lines: Sequence[Line], labels: Sequence[str], *, named: bool) -> None:
    """One row per label, one place per batch size: how many seeds did not reach, or a question mark before all ran."""
    by_label = {line.label: line for line in lines}
    good = []
    for row, label in enumerate(labels, 1):
        line = by_label.get(label)
        for cell in line.cells if line else ():
            if cell.drawn:
                good.append((cell.batch, row))
                continue
            text = str(cell.missed) if cell.missed else "?"
            color = line.look["color"] if cell.missed and line else GREY
            given = {"fontsize": 6, "ha": "center", "va": "center_baseline", "weight": "bold"}
            strip.text(cell.batch, row, text, color=color, **given)
    strip.plot([x for x, _ in good], [y for _, y in good], ".", color="0.72", markersize=1.5)
    strip.set_ylim(len(labels) + 0.5, -0.5)
    strip.set_yticks(range(1, len(labels) + 1), [plain(label, 22) if named else "" for label in labels])
    strip.yaxis.set_visible(named)
    if named:
        where = {"transform": strip.get_yaxis_transform(), "ha": "right", "va": "center"}
        strip.text(-0.012, 0, "missed the target:", fontsize=6, color=GREY, style="italic", **where)
    strip.tick_params(axis="y", length=0, labelsize=6)
    strip.set_facecolor("0.965")
    for side in strip.spines.values():
        side.set_visible(False)


def batch_axis(axis: Any, batches: Sequence[int], width: float = 3.4) -> None:
    """Logarithmic, labelled at the batch sizes that there are, as far as the labels fit."""
    axis.set_xscale("log")
    low, high = min(batches) / 1.35, max(batches) * 1.35
    shown: list[int] = []
    for batch in batches:
        last = shown[-1] if shown else 0
        room = width * math.log(batch / last) / math.log(high / low) if last else math.inf
        if room >= 0.06 + 0.03 * len(thousands(batch) + thousands(last)):
            shown.append(batch)
    axis.set_xlim(low, high)
    axis.set_xticks(shown, [thousands(batch) for batch in shown])
    axis.set_xticks([batch for batch in batches if batch not in shown], minor=True)
    axis.xaxis.set_minor_formatter("")


def thousands(value: int) -> str:
    """12000 as 12k."""
    return f"{value / 1000:g}k" if value >= 1000 else str(value)


def epochs_axis(panel: Any, cells: Iterable[Cell], *, log: bool = True) -> None:
    """Of the points that are drawn, logarithmic with plain labels or linear from zero."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    values = [epochs for cell in cells if cell.drawn for epochs in cell.chosen.values()] or [1.0, 10.0]
    low, high = max(min(values), 0.5), max(values)
    if not log:
        panel.set_ylim(0, 1.08 * high)
        return
    panel.set_yscale("log")
    panel.set_ylim(low / 1.25, high * 1.25)
    steps = (1.0, 2.0, 5.0) if high / low > 4 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    panel.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())


def rows_of(panels: Iterable[Sequence[Line]]) -> list[dict[str, Any]]:
    """The numbers behind the points; empty where the target was not reached."""
    return [cell_row(cell) for lines in panels for line in lines for cell in line.cells]


def cell_row(cell: Cell) -> dict[str, Any]:
    """One cell in a table."""
    values = [epochs for epochs in cell.chosen.values() if epochs < math.inf]
    return {
        "optimizer": cell.setting.optimizer,
        "region": "" if cell.setting.region is None else cell.setting.name.label,
        "method": cell.setting.method,
        "batch": cell.batch,
        "lr": "" if cell.lr is None else cell.lr,
        "median": cell.median if cell.median < math.inf else "",
        "min": min(values, default=""),
        "max": max(values, default="") if not cell.missed else "",
        "reached": len(values),
        "done": len(cell.chosen),
        "seeds": cell.seeds,
        "drawn": cell.drawn,
        "partial": cell.partial,
    }
