"""The chance that a run with U-Clip needs fewer epochs than one without, or than one with plain clipping."""

import math
from typing import Any

from carryclip_lab.analysis.compare import Comparison, compare
from carryclip_lab.analysis.naming import OPTIMIZERS, region_name
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures.drawn import Drawn, caption, footer
from carryclip_lab.figures.lines import batch_axis, centred
from carryclip_lab.figures.sheet import sheet
from carryclip_lab.figures.style import Look, looks


def draw(summary: Summary) -> Drawn | None:
    """One column per optimizer; one line for each method with carry and each it is compared with."""
    region = summary.main_region
    ours = [method for method in summary.methods if method.startswith("U-Clip")]
    pairs = [(method, other) for method in ours for other in ("none", "clip")]
    seen = {
        (name, pair): [
            found
            for batch in summary.batches
            if (found := compare(summary.find(name, region, pair[0], batch), _other(summary, name, pair[1], batch)))
        ]
        for name in summary.optimizers
        for pair in pairs
    }
    used = [pair for pair in pairs if any(seen[name, pair] for name in summary.optimizers)]
    if region is None or not used:
        return None
    legend = {pair: _look(looks(summary.methods), pair) for pair in used}
    cells = [cell for cell in summary.cells if cell.setting.region in (region, None)]
    named = [(f"{ours} against {other}", look) for (ours, other), look in legend.items()]
    made = sheet(1, len(summary.optimizers), legend=named, foot=footer(summary, cells), size=(3.5, 2.4))
    for column, name in enumerate(summary.optimizers):
        panel = made.panels[0][column]
        panel.axhline(0.5, color="black", linewidth=0.6, linestyle=(0, (1, 3)))
        for place, pair in enumerate(used):
            _points(panel, seen[name, pair], legend[pair], place - (len(used) - 1) / 2)
        if not any(seen[name, pair] for pair in used):
            panel.text(0.5, 0.3, "nothing to compare yet", **centred(panel))
        panel.set_title(OPTIMIZERS.get(name, name))
    batch_axis(made.panels[0][0], summary.batches, 3.5)  # the others share it
    made.panels[0][0].set_ylim(-0.04, 1.04)
    made.label("batch size", "chance of fewer epochs")
    text = (
        f"Chance that a run with U-Clip needs fewer epochs to {100 * summary.target:g} % than one without carry, "
        f"{region_name(region).label}, each at its best learning rate; ties count half, not reaching the target counts "
        "as infinitely many. Bars: 95 % bootstrap intervals over seeds, in pairs where seeds agree; where every run of "
        "one is ahead of every run of the other they have no width, however few the seeds."
    )
    rows = [_row(pair, each) for (_, pair), found in seen.items() for each in found]
    return Drawn(made.figure, caption(summary, cells, text), rows)


def _other(summary: Summary, optimizer: str, method: str, batch: int) -> Any:
    return summary.find(optimizer, None if method == "none" else summary.main_region, method, batch)


def _look(given: dict[str, Look], pair: tuple[str, str]) -> Look:
    """The method's own against none; hollow and dashed against clipping."""
    look = given[pair[0]]
    if pair[1] == "none":
        return {**look, "linestyle": "-"}
    return {**look, "linestyle": (0, (2, 2)), "markerfacecolor": "white"}


def _points(panel: Any, found: list[Comparison], look: Look, place: float) -> None:
    shift = 10 ** (0.05 * place)
    x = [each.cell.batch * shift for each in found]
    middle = [each.fewer[0] for each in found]
    bars = [[max(0.0, each.fewer[0] - each.fewer[1]) for each in found]]
    bars.append([max(0.0, each.fewer[2] - each.fewer[0]) for each in found])
    panel.errorbar(x, middle, bars, **look, linewidth=1.0, elinewidth=0.9, capsize=2)


def _row(pair: tuple[str, str], each: Comparison) -> dict[str, Any]:
    effect = each.effect
    ratio = {"ratio": effect.ratio, "ratio_low": effect.low, "ratio_high": effect.high}
    return {
        "optimizer": each.cell.setting.optimizer,
        "region": each.cell.setting.name.label,
        "method": pair[0],
        "against": pair[1],
        "batch": each.cell.batch,
        "fewer": each.fewer[0],
        "fewer_low": each.fewer[1],
        "fewer_high": each.fewer[2],
        **{key: value if math.isfinite(value) else "" for key, value in ratio.items()},
        "seeds": effect.seeds,
    }
