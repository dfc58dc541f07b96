"""Every cell at a glance: median epochs divided by those of the optimizer alone."""

import math
from typing import Any

import numpy as np

from carryclip_lab.analysis.compare import Comparison, compare, number
from carryclip_lab.analysis.naming import OPTIMIZERS, method_order, region_name, region_order
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.analysis.verdicts import SEEDS
from carryclip_lab.figures.drawn import Drawn, caption, footer
from carryclip_lab.figures.lines import thousands
from carryclip_lab.figures.sheet import sheet
from carryclip_lab.figures.style import plain

Row = tuple[str | None, str]
"""A region and what is done in it."""


def draw(summary: Summary) -> Drawn | None:
    """One map per optimizer: a row per region and method, a column per batch size."""
    rows = sorted(
        {(cell.setting.region, cell.setting.method) for cell in summary.cells} - {(None, "none")},
        key=lambda row: (region_order(row[0]), method_order(row[1])),
    )
    seen = {
        (name, row, batch): found
        for name in summary.optimizers
        for row in rows
        for batch in summary.batches
        if (found := compare(summary.find(name, *row, batch), summary.find(name, None, "none", batch)))
    }
    if not seen:
        return None
    labels = [_label(row) for row in rows]
    left = 0.35 + 0.058 * max(len(label) for label in labels)
    size = (max(1.9, 0.34 * len(summary.batches)), max(0.5, 0.19 * len(rows)))
    foot = footer(summary, summary.cells)
    made = sheet(1, len(summary.optimizers), legend=[], foot=foot, size=size, left=left, gap=(0.15, 0.0))
    for column, name in enumerate(summary.optimizers):
        panel = made.panels[0][column]
        _map(panel, {(row, batch): found for (who, row, batch), found in seen.items() if who == name}, rows, summary)
        panel.set_title(OPTIMIZERS.get(name, name))
    made.panels[0][0].set_yticks(range(len(rows)), labels)
    made.label("batch size", "")
    text = (
        "Median epochs at the best learning rate, divided by those of the optimizer alone: blue is faster, red "
        "slower, bold if the 95 % bootstrap interval of three seeds or more leaves out 1, slanted while runs are "
        "missing. Signs: + reached the target where the optimizer alone did not (in the median), × the other way "
        "round, – neither; blank: not run yet."
    )
    numbers = [_row(key, found) for key, found in seen.items()]
    return Drawn(made.figure, caption(summary, summary.cells, text), numbers)


def _label(row: Row) -> str:
    region, method = row
    return plain(method if region is None else f"{region_name(region).label}, {method}", 34)


def _map(panel: Any, seen: dict[tuple[Row, int], Comparison], rows: list[Row], summary: Summary) -> None:
    shades = np.full((len(rows), len(summary.batches)), np.nan)
    for (row, batch), found in seen.items():
        y, x = rows.index(row), summary.batches.index(batch)
        effect = found.effect
        shades[y, x] = _shade(effect.ratio)
        sure = effect.seeds >= SEEDS and (effect.high < 1.0 or effect.low > 1.0)
        style = "italic" if found.cell.partial or found.base.partial else "normal"
        color = "white" if abs(shades[y, x]) > 1.45 else "black"
        weight = "bold" if sure else "normal"
        look = {"fontsize": 5.5, "color": color, "weight": weight, "style": style}
        panel.text(x, y, _sign(effect.ratio), ha="center", va="center", **look)
    panel.imshow(shades, cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto", interpolation="nearest")
    panel.set_facecolor("0.93")
    names = [thousands(batch) for batch in summary.batches]
    panel.set_xticks(range(len(summary.batches)), names, fontsize=6.5)
    for line in range(1, len(rows)):
        if rows[line][0] != rows[line - 1][0]:
            panel.axhline(line - 0.5, color="white", linewidth=1.2)
    panel.tick_params(length=0)


def _shade(ratio: float) -> float:
    """In powers of two, from a quarter to four times; 0 for neither."""
    return 0.0 if math.isnan(ratio) else float(np.clip(math.log2(max(ratio, 1e-9)) if ratio < math.inf else 2, -2, 2))


def _sign(ratio: float) -> str:
    if math.isnan(ratio):
        return "–"
    return "×" if ratio == math.inf else "+" if ratio == 0 else number(ratio) if ratio < 9.995 else f"{ratio:.0f}"


def _row(key: tuple[str, Row, int], found: Comparison) -> dict[str, Any]:
    optimizer, (region, method), batch = key
    effect = found.effect
    told = {"ratio": effect.ratio, "low": effect.low, "high": effect.high}
    return {
        "optimizer": optimizer,
        "region": "" if region is None else found.cell.setting.name.label,
        "method": method,
        "batch": batch,
        **{name: value if math.isfinite(value) else "" for name, value in told.items()},
        "sign": _sign(effect.ratio),
        "missed": found.cell.missed,
        "missed_alone": found.base.missed,
        "seeds": effect.seeds,
        "partial": found.cell.partial or found.base.partial,
    }
