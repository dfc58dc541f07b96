"""How much the learning rate matters: epochs to the target against it, for every optimizer and batch size."""

import math
from typing import Any

import numpy as np

from carryclip.experiments.figures.drawn import Drawn, caption, footer
from carryclip.experiments.figures.lines import Line, legend_of, lines_of
from carryclip.experiments.figures.sheet import sheet
from carryclip.experiments.figures.style import GREY
from carryclip.experiments.naming import OPTIMIZERS, region_name
from carryclip.experiments.summary import Cell, Summary


def draw(summary: Summary) -> Drawn | None:
    """One row per batch size, one column per optimizer; a shaded band on top stands for "not reached"."""
    region = summary.main_region
    grid = [
        [lines_of(summary, name, [region] if region else [], [batch]) for name in summary.optimizers]
        for batch in summary.batches
    ]
    cells = [cell for row in grid for panel in row for line in panel for cell in line.cells]
    if max((len(cell.runs) for cell in cells), default=0) < 2:
        return None
    top = 2.0 * max(cell.limit for cell in cells)
    low = min((min(cell.chosen.values()) for cell in cells if cell.chosen), default=1.0)
    low = max(1.0, low if low < math.inf else 1.0)
    legend = legend_of(panel for row in grid for panel in row)
    rates = sorted({lr for cell in cells for lr in cell.runs})
    decades = math.log10(rates[-1] / rates[0]) + 0.6
    size = (3.5, 1.35)
    made = sheet(
        len(grid), len(summary.optimizers), legend=legend, foot=footer(summary, cells), size=size, gap=(0.22, 0.2)
    )
    for row, panels in enumerate(grid):
        for column, lines in enumerate(panels):
            panel = made.panels[row][column]
            for place, line in enumerate(lines):
                _line(panel, line, 10 ** (0.014 * decades * (place - (len(lines) - 1) / 2)), top)
            name = summary.optimizers[column]
            panel.set_title(f"{OPTIMIZERS.get(name, name)}, batch {summary.batches[row]}")
            panel.tick_params(labelbottom=row == len(grid) - 1)
            panel.axhspan(top / 1.55, top * 1.55, color="0.93", zorder=0)
            if column == 0:
                where = {"transform": panel.get_yaxis_transform(), "ha": "right", "va": "center"}
                panel.text(-0.012, top, "not reached", fontsize=6, color=GREY, **where)
    _axes(made.panels[0][0], rates, low, top)
    made.label("learning rate", "epochs")
    text = (
        f"Epochs to {100 * summary.target:g} % against the learning rate"
        f"{f', {region_name(region).label}' if region else ''}: median over the seeds done. Filled: all seeds reached "
        "the target; hollow: some did not, or have not run; in the shaded band: the median did not."
    )
    return Drawn(made.figure, caption(summary, cells, text), [row for cell in cells for row in _rows(cell)])


def _line(panel: Any, line: Line, shift: float, top: float) -> None:
    (cell,) = line.cells
    seen = {lr: found for lr in sorted(cell.runs) if (found := list(cell.epochs_at(lr).values()))}
    medians = {lr: float(np.median(found)) for lr, found in seen.items()}
    whole = {lr for lr, found in seen.items() if len(found) == len(cell.runs[lr]) and max(found) < math.inf}
    finite = [median if median < math.inf else math.nan for median in medians.values()]
    panel.plot([lr * shift for lr in medians], finite, **line.look, zorder=2)
    unsure = [lr for lr in medians if lr not in whole]
    places = [lr * shift for lr in unsure], [min(medians[lr], top) for lr in unsure]
    panel.plot(*places, line.look["marker"], color=line.look["color"], markerfacecolor="white", zorder=3)


def _axes(panel: Any, rates: list[float], low: float, top: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panel.set_xscale("log")
    panel.set_xlim(rates[0] / 2, rates[-1] * 2)
    panel.set_xticks(rates, [f"{lr:g}" for lr in rates])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_yscale("log")
    panel.set_ylim(low / 1.4, top * 1.5)
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0,) if top / low > 30 else (1.0, 3.0), numticks=9))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < top / 1.55 else ""))
    panel.yaxis.set_minor_locator(NullLocator())


def _rows(cell: Cell) -> list[dict[str, Any]]:
    rows = []
    for lr in sorted(cell.runs):
        seen = list(cell.epochs_at(lr).values())
        median = float(np.median(seen)) if seen else math.inf
        rows.append(
            {
                "optimizer": cell.setting.optimizer,
                "region": "" if cell.setting.region is None else cell.setting.name.label,
                "method": cell.setting.method,
                "batch": cell.batch,
                "lr": lr,
                "median": median if median < math.inf else "",
                "reached": sum(epochs < math.inf for epochs in seen),
                "done": len(seen),
                "seeds": len(cell.runs[lr]),
                "chosen": lr == cell.lr,
            }
        )
    return rows
