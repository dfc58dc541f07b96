"""How much the learning rate matters: epochs to the target against it, for every optimizer and batch size."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from carryclip_lab.analysis.naming import OPTIMIZERS, region_name
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.figures.drawn import Drawn, caption, footer
from carryclip_lab.figures.lines import Line, legend_of, lines_of
from carryclip_lab.figures.sheet import sheet
from carryclip_lab.figures.style import GREY


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
    foot = footer(summary, cells)
    legend = legend_of(panel for row in grid for panel in row)
    size, gap = (3.5, 1.35), (0.22, 0.2)
    made = sheet(len(grid), len(summary.optimizers), legend=legend, foot=foot, size=size, gap=gap, share="none")
    for column, name in enumerate(summary.optimizers):
        rates = sorted({lr for cell in cells if cell.setting.optimizer == name for lr in cell.runs})
        for row, panels in enumerate(grid):
            panel = made.panels[row][column]
            _panel(panel, panels[column], rates, top)
            _axes(panel, rates, low, top)
            panel.set_title(f"{OPTIMIZERS.get(name, name)}, batch {summary.batches[row]}")
            panel.tick_params(labelbottom=row == len(grid) - 1, labelleft=column == 0)
            if column == 0:
                where = {"transform": panel.get_yaxis_transform(), "ha": "right", "va": "center"}
                panel.text(-0.012, top, "not reached", fontsize=6, color=GREY, **where)
    made.label("learning rate", "epochs")
    text = (
        f"Epochs to {100 * summary.target:g} % against the learning rate"
        f"{f', {region_name(region).label}' if region else ''}: median over the seeds done. Filled: all seeds reached "
        "the target; hollow: some did not, or have not run; in the shaded band: the median did not."
    )
    return Drawn(made.figure, caption(summary, cells, text), [row for cell in cells for row in _rows(cell)])


def _panel(panel: Any, lines: Sequence[Line], rates: Sequence[float], top: float) -> None:
    decades = math.log10(rates[-1] / rates[0]) + 0.6
    for place, line in enumerate(lines):
        _line(panel, line, 10 ** (0.014 * decades * (place - (len(lines) - 1) / 2)), top)
    panel.axhspan(top / 1.55, top * 1.55, color="0.93", zorder=0)


def _line(panel: Any, line: Line, shift: float, top: float) -> None:
    (cell,) = line.cells
    seen = {lr: found for lr in sorted(cell.runs) if (found := list(cell.epochs_at(lr).values()))}
    medians = {lr: float(statistics.median(found)) for lr, found in seen.items()}
    whole = {lr for lr, found in seen.items() if len(found) == len(cell.runs[lr]) and max(found) < math.inf}
    finite = [median if median < math.inf else math.nan for median in medians.values()]
    panel.plot([lr * shift for lr in medians], finite, **line.look, zorder=2)
    unsure = [lr for lr in medians if lr not in whole]
    places = [lr * shift for lr in unsure], [min(medians[lr], top) for lr in unsure]
    panel.plot(*places, line.look["marker"], color=line.look["color"], markerfacecolor="white", zorder=3)


def _axes(panel: Any, rates: list[float], low: float, top: float) -> None:
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log")
    panel.set_xlim(rates[0] / 2, rates[-1] * 2)
    whole = [lr for lr in rates if math.isclose(math.log10(lr), round(math.log10(lr)))]
    shown = whole if len(rates) > 6 and whole else rates
    panel.set_xticks(shown, [f"{lr:g}" for lr in shown])
    panel.set_xticks([lr for lr in rates if lr not in shown], minor=True)
    panel.xaxis.set_minor_formatter("")
    panel.set_yscale("log")
    panel.set_ylim(low / 1.4, top * 1.5)
    steps = [step * 10**power for power in range(7) for step in ((1,) if top / low > 100 else (1, 3))]
    ticks = [step for step in steps if low / 1.4 < step < top / 1.6]
    panel.set_yticks(ticks, [f"{step:g}" for step in ticks])
    panel.yaxis.set_minor_locator(NullLocator())


def _rows(cell: Cell) -> list[dict[str, Any]]:
    rows = []
    for lr in sorted(cell.runs):
        seen = list(cell.epochs_at(lr).values())
        median = float(statistics.median(seen)) if seen else math.inf
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
