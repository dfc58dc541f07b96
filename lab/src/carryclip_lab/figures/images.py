"""ImageNet: the paper's table as a picture, and its figure of one run from beginning to end."""

import math
from typing import Any

from carryclip_lab.analysis.accuracy import PAPER, Row, heads, is_papers, rows_of, words
from carryclip_lab.analysis.naming import RegionName, region_name
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.engine.methods import sampling
from carryclip_lab.figures.carry import GRADIENT, RADIUS, limits_of, log_norms
from carryclip_lab.figures.drawn import Drawn, caption, footer
from carryclip_lab.figures.sheet import sheet
from carryclip_lab.figures.style import Look, looks, plain
from carryclip_lab.store.records import Epoch

SHOWN = RegionName("EWMA", (1.0, 2.0))
"""The region of the paper's figure."""
THEIRS: Look = {"marker": "d", "markerfacecolor": "none", "color": "0.3", "linestyle": "none"}


def accuracy(summary: Summary) -> Drawn | None:
    """Best top-1 accuracy of every way of clipping, the best on top."""
    rows = rows_of(summary)
    if not any(row.best for row in rows):
        return None
    given = looks(summary.methods)
    own = is_papers(summary)
    legend = [(method, {**given[method], "linestyle": "none"}) for method in summary.methods]
    height = 0.24 * len(rows) + 0.2
    made = sheet(
        1,
        1,
        legend=[*legend, *([("the paper", THEIRS)] if own else [])],
        foot=footer(summary, summary.cells),
        size=(4.6, height),
        left=1.75,
    )
    panel = made.panels[0][0]
    for place, row in enumerate(rows):
        _dots(panel, len(rows) - 1 - place, row, given[row.cell.setting.method])
        if own and row.key in PAPER:
            panel.plot(PAPER[row.key][0], len(rows) - 1 - place, **THEIRS)
    panel.set_yticks(range(len(rows)), [row.name for row in reversed(rows)])
    panel.set_ylim(-0.6, len(rows) - 0.4)
    panel.set_title(plain(summary.title))
    panel.grid(axis="x", linewidth=0.4, color="0.85")
    made.label("best top-1 accuracy over the epochs (%)", "")
    names = heads(summary)
    table = [dict(zip(names, line, strict=True)) for line in words(summary, rows)]
    text = "Best top-1 accuracy over the epochs, by way of clipping: median and range over seeds."
    return Drawn(made.figure, caption(summary, summary.cells, text), table)


def _dots(panel: Any, place: int, row: Row, look: Look) -> None:
    if row.median is None:
        return
    panel.plot([min(row.best), max(row.best)], [place, place], color=look["color"], linewidth=1.2)
    panel.plot(row.median, place, **{**look, "linestyle": "none"})


def trajectory(summary: Summary) -> Drawn | None:
    """Norms of gradient, carry and radius, and the training loss, for the paper's choice of region."""
    cell, epochs = _shown(summary)
    if cell is None or not epochs:
        return None
    carry: Look = {"color": looks(["U-Clip"])["U-Clip"]["color"], "linestyle": "-"}
    loss: Look = {"color": "black", "linestyle": "-", "linewidth": 1.2}
    lines = {"grad_norm": GRADIENT, "carry_norm": carry, "radius_norm": RADIUS}
    legend = list(zip(("gradient", "carry", "radius", "training loss"), [*lines.values(), loss], strict=True))
    made = sheet(1, 2, legend=legend, foot=footer(summary, [cell]), size=(3.4, 2.2), share="none", gap=(0.75, 0.3))
    norms, losses = made.panels[0]
    x = [epoch.epoch for epoch in epochs]
    for name, look in lines.items():
        norms.plot(x, [getattr(epoch, name) or math.nan for epoch in epochs], **look)
    log_norms(norms, limits_of(epochs))
    losses.plot(x, [epoch.loss for epoch in epochs], **loss)
    norms.set_title("Norms")
    losses.set_title("Cross-entropy with smoothed labels")
    made.label("epoch", "")
    text = (
        f"One run with U-Clip and {region_name(cell.setting.region).label}, first seed: Euclidean norms of gradient, "
        f"carry and radius (left; means over {_sampled(cell)} of each epoch), and training loss (right)."
    )
    names = ("epoch", "loss", "running_accuracy", "test_accuracy", *lines, "carry_feed")
    rows = [{name: getattr(epoch, name) for name in names} for epoch in epochs]
    return Drawn(made.figure, caption(summary, [cell], text), rows)


def _sampled(cell: Cell) -> str:
    """The steps whose norms are kept."""
    spec = cell.records[0].spec
    every = sampling(spec.recipe.epoch(spec)[0])
    return "all steps" if every == 1 else f"one step in {every}"


def _shown(summary: Summary) -> tuple[Cell | None, list[Epoch]]:
    """The cell of the paper's figure, or the first with a carry; and the epochs of its first seed."""
    carried = [cell for cell in summary.cells if cell.setting.method == "U-Clip"]
    carried.sort(key=lambda cell: region_name(cell.setting.region) != SHOWN)
    for cell in carried:
        first = min(cell.records, key=lambda record: record.spec.seed)
        epochs = list(summary.epochs(first.spec.id))
        if epochs:
            return cell, epochs
    return None, []
