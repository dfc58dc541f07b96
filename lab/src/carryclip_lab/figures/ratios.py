"""Every cell at a glance: median epochs divided by those of the optimizer alone."""

import math
from typing import Any

import numpy as np

from carryclip_lab.analysis.compare import Comparison, compare, number
from carryclip_lab.analysis.naming import NONE, Method, region_name, region_order
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.analysis.verdicts import SEEDS
from carryclip_lab.figures.lines import thousands
from carryclip_lab.figures.sheet import Drawn, Panel, known, named, sheet
from carryclip_lab.figures.style import plain
from carryclip_lab.spec import OPTIMIZERS

Row = tuple[str | None, Method]
"""A region and what is done in it."""


def draw(summary: Summary) -> Drawn | None:
    """One map per optimizer: a row per region and method, a column per batch size."""
    rows = list({(cell.setting.region, cell.setting.method) for cell in summary.cells} - {(None, NONE)})
    rows.sort(key=lambda row: (region_order(row[0]), row[1].order))
    maps = {name: _compared(summary, name, rows) for name in summary.optimizers}
    if not any(maps.values()):
        return None
    labels = [_label(row) for row in rows]
    left = 0.35 + 0.058 * max(map(len, labels))
    size = (max(1.9, 0.34 * len(summary.batches)), max(0.5, 0.19 * len(rows)))
    made = sheet(summary, summary.cells, [0], summary.optimizers, size=size, left=left, gap=(0.15, 0.0))
    for _, name, panel in made.each():
        _map(panel, maps[name], rows, summary.batches)
        panel.axes.set_title(OPTIMIZERS[name])
    made.panels[0][0].axes.set_yticks(range(len(rows)), labels)
    made.label("batch size", "")
    text = (
        "Median epochs at the best learning rate, divided by those of the optimizer alone: blue is faster, red "
        "slower, bold if the 95 % bootstrap interval of three seeds or more leaves out 1, slanted while runs are "
        "missing. Signs: + reached the target where the optimizer alone did not (in the median), × the other way "
        "round, – neither; blank: not run yet."
    )
    return made.drawn(text, [_row(found) for seen in maps.values() for found in seen.values()])


def _compared(summary: Summary, optimizer: str, rows: list[Row]) -> dict[tuple[Row, int], Comparison]:
    """Every row at every batch size against the optimizer alone, where both have runs."""
    seen = {}
    for row in rows:
        for batch in summary.batches:
            found = compare(summary.find(optimizer, *row, batch), summary.find(optimizer, None, NONE, batch))
            if found is not None:
                seen[row, batch] = found
    return seen


def _label(row: Row) -> str:
    region, method = row
    return plain(method.label if region is None else f"{region_name(region).label}, {method.label}", 34)


def _map(panel: Panel, seen: dict[tuple[Row, int], Comparison], rows: list[Row], batches: list[int]) -> None:
    shades = np.full((len(rows), len(batches)), np.nan)
    for (row, batch), found in seen.items():
        y, x = rows.index(row), batches.index(batch)
        effect = found.effect
        shades[y, x] = _shade(effect.value)
        sure = effect.seeds >= SEEDS and (effect.high < 1.0 or effect.low > 1.0)
        look = {
            "color": "white" if abs(shades[y, x]) > 1.45 else "black",
            "weight": "bold" if sure else "normal",
            "style": "italic" if _partial(found) else "normal",
        }
        panel.axes.text(x, y, _sign(effect.value), ha="center", va="center", fontsize=5.5, **look)
    panel.axes.imshow(shades, cmap="RdBu_r", vmin=-2, vmax=2, aspect="auto", interpolation="nearest")
    panel.axes.set_facecolor("0.93")
    panel.axes.set_xticks(range(len(batches)), [thousands(batch) for batch in batches], fontsize=6.5)
    for line in range(1, len(rows)):
        if rows[line][0] != rows[line - 1][0]:
            panel.axes.axhline(line - 0.5, color="white", linewidth=1.2)
    panel.axes.tick_params(length=0)


def _partial(found: Comparison) -> bool:
    return found.cell.partial or found.base.partial


def _shade(ratio: float) -> float:
    """In powers of two, from a quarter to four times; 0 for neither."""
    return 0.0 if math.isnan(ratio) else float(np.clip(math.log2(max(ratio, 1e-9)) if ratio < math.inf else 2, -2, 2))


def _sign(ratio: float) -> str:
    if math.isnan(ratio):
        return "–"
    return "×" if ratio == math.inf else "+" if ratio == 0 else number(ratio) if ratio < 9.995 else f"{ratio:.0f}"


def _row(found: Comparison) -> dict[str, Any]:
    effect = found.effect
    return {
        **named(found.cell),
        "ratio": known(effect.value),
        "low": known(effect.low),
        "high": known(effect.high),
        "sign": _sign(effect.value),
        "missed": found.cell.missed,
        "missed_alone": found.base.missed,
        "seeds": effect.seeds,
        "partial": _partial(found),
    }
