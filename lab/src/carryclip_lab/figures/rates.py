"""How much the learning rate matters: epochs to the target against it, for every optimizer and batch size."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from carryclip_lab.analysis.naming import region_name
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.figures.lines import Line, apart, cells_of, legend_of, lines_of
from carryclip_lab.figures.sheet import Drawn, Panel, known, named, sheet
from carryclip_lab.spec import OPTIMIZERS


def draw(summary: Summary) -> Drawn | None:
    """One row per batch size, one column per optimizer; a shaded band on top stands for "not reached"."""
    region = summary.main_region
    lines = {
        (batch, name): lines_of(summary, name, [region] if region else [], [batch])
        for batch in summary.batches
        for name in summary.optimizers
    }
    every = [line for found in lines.values() for line in found]
    cells = cells_of(every)
    if max((len(cell.runs) for cell in cells), default=0) < 2:
        return None
    low, top = _ends(cells)
    room = {"legend": legend_of(every).items(), "size": (3.5, 1.35), "gap": (0.22, 0.2)}
    made = sheet(summary, cells, summary.batches, summary.optimizers, share="none", **room)
    for batch, name, panel in made.each():
        rates = sorted({lr for cell in cells if cell.setting.optimizer == name for lr in cell.runs})
        _lines(panel, lines[batch, name], rates, top)
        _axes(panel, rates, low, top)
        panel.axes.set_title(f"{OPTIMIZERS[name]}, batch {batch}")
    made.label("learning rate", "epochs")
    text = (
        f"Epochs to {100 * summary.target:g} % against the learning rate"
        f"{f', {region_name(region).label}' if region else ''}: median over the seeds done. Filled: all seeds reached "
        "the target; hollow: some did not, or have not run; in the shaded band: the median did not."
    )
    return made.drawn(text, [_row(cell, lr) for cell in cells for lr in sorted(cell.runs)])


def _ends(cells: Sequence[Cell]) -> tuple[float, float]:
    """The fewest epochs that were needed, and the middle of the band for "not reached"."""
    needed = [epochs for cell in cells for epochs in cell.chosen.values() if epochs < math.inf]
    return max(1.0, min(needed, default=1.0)), 2.0 * max(cell.limit for cell in cells)


def _lines(panel: Panel, lines: Sequence[Line], rates: Sequence[float], top: float) -> None:
    decades = math.log10(rates[-1] / rates[0]) + 0.6
    for place, line in enumerate(lines):
        _line(panel, line, apart(place, len(lines), 0.014 * decades), top)
    panel.axes.axhspan(top / 1.55, top * 1.55, color="0.93", zorder=0)


def _line(panel: Panel, line: Line, shift: float, top: float) -> None:
    (cell,) = line.cells
    seen = {lr: found for lr in sorted(cell.runs) if (found := list(cell.epochs_at(lr).values()))}
    medians = {lr: float(statistics.median(found)) for lr, found in seen.items()}
    whole = {lr for lr, found in seen.items() if len(found) == len(cell.runs[lr]) and max(found) < math.inf}
    finite = [median if median < math.inf else math.nan for median in medians.values()]
    panel.axes.plot([lr * shift for lr in medians], finite, **line.look, zorder=2)
    panel.hollow([(lr * shift, min(medians[lr], top)) for lr in medians if lr not in whole], line.look, zorder=3)


def _axes(panel: Panel, rates: list[float], low: float, top: float) -> None:
    from matplotlib.ticker import NullLocator

    whole = [lr for lr in rates if math.isclose(math.log10(lr), round(math.log10(lr)))]
    shown = whole if len(rates) > 6 and whole else rates
    panel.log_x({lr: f"{lr:g}" for lr in shown}, [lr for lr in rates if lr not in shown])
    panel.axes.set_xlim(rates[0] / 2, rates[-1] * 2)
    panel.axes.set_yscale("log")
    panel.axes.set_ylim(low / 1.4, top * 1.5)
    steps = [step * 10**power for power in range(7) for step in ((1,) if top / low > 100 else (1, 3))]
    ticks = [step for step in steps if low / 1.4 < step < top / 1.6]
    panel.axes.set_yticks(ticks, [f"{step:g}" for step in ticks])
    panel.axes.yaxis.set_minor_locator(NullLocator())
    panel.axes.tick_params(labelbottom=panel.last, labelleft=panel.first)
    if panel.first:
        panel.beside(top, "not reached")


def _row(cell: Cell, lr: float) -> dict[str, Any]:
    seen = list(cell.epochs_at(lr).values())
    return {
        **named(cell),
        "lr": lr,
        "median": known(float(statistics.median(seen)) if seen else None),
        "reached": sum(epochs < math.inf for epochs in seen),
        "done": len(seen),
        "seeds": len(cell.runs[lr]),
        "chosen": lr == cell.lr,
    }
