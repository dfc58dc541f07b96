"""How runs ended: the share of each outcome, by method and batch size, over all learning rates and regions."""

from collections import Counter
from typing import Any

from carryclip_lab.analysis.naming import OPTIMIZERS
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures.drawn import Drawn, caption, footer
from carryclip_lab.figures.lines import thousands
from carryclip_lab.figures.sheet import sheet
from carryclip_lab.figures.style import Look, plain
from carryclip_lab.store.records import OUTCOMES

LOOKS: dict[str, Look] = {
    "reached": {"facecolor": "#9ecae1", "edgecolor": "#3a7ca5", "hatch": ""},
    "not_reached": {"facecolor": "#fdd9a0", "edgecolor": "#b5761f", "hatch": "////"},
    "diverged": {"facecolor": "#e8836b", "edgecolor": "#8f2d1b", "hatch": "xxxx"},
    "oom": {"facecolor": "#c7b3dd", "edgecolor": "#5e3c99", "hatch": "...."},
    "timeout": {"facecolor": "#dddddd", "edgecolor": "#666666", "hatch": "----"},
    "crashed": {"facecolor": "#333333", "edgecolor": "#000000", "hatch": ""},
    "open": {"facecolor": "white", "edgecolor": "#aaaaaa", "hatch": ""},
}
"""``open`` stands for runs that wait or run."""


def draw(summary: Summary) -> Drawn | None:
    """One row per optimizer; bars in groups by batch size, one for each method."""
    counts = _counts(summary)
    if not any(outcome in OUTCOMES for found in counts.values() for outcome in found):
        return None
    used = [name for name in LOOKS if any(found[name] for found in counts.values())]
    groups = len(summary.batches) * (len(summary.methods) + 1)
    legend = [(name.replace("_", " ").replace("open", "not done"), LOOKS[name]) for name in used]
    size = (min(11.0, max(4.5, 0.26 * groups)), 1.25)
    rows = len(summary.optimizers)
    made = sheet(rows, 1, legend=legend, foot=footer(summary, summary.cells), size=size, gap=(0.2, 0.55))
    for row, name in enumerate(summary.optimizers):
        panel = made.panels[row][0]
        for place, batch in enumerate(summary.batches):
            for number, method in enumerate(summary.methods):
                x = place * (len(summary.methods) + 1) + number
                _bar(panel, x, counts[name, method, batch], used)
        _axes(panel, summary)
        panel.set_title(OPTIMIZERS.get(name, name), loc="left", pad=12, weight="bold")
    made.label("", "share of runs")
    text = (
        "How runs ended, by batch size and method, over all learning rates and regions together: this is about how "
        "forgiving a method is, not about its best setting."
    )
    numbers = [
        {"optimizer": name, "method": method, "batch": batch, **{outcome: found[outcome] for outcome in LOOKS}}
        for (name, method, batch), found in counts.items()
        if found
    ]
    return Drawn(made.figure, caption(summary, summary.cells, text), numbers)


def _counts(summary: Summary) -> dict[tuple[str, str, int], Counter[str]]:
    counts = {
        (name, method, batch): Counter[str]()
        for name in summary.optimizers
        for method in summary.methods
        for batch in summary.batches
    }
    for cell in summary.cells:
        found = counts[cell.setting.optimizer, cell.setting.method, cell.batch]
        found.update(record.outcome or "open" for record in cell.records)
    return counts


def _bar(panel: Any, x: int, found: Counter[str], used: list[str]) -> None:
    bottom = 0.0
    for outcome in used:
        share = found[outcome] / max(found.total(), 1)
        if share:
            panel.bar(x, share, 0.86, bottom, linewidth=0.5, **LOOKS[outcome])
        bottom += share


def _axes(panel: Any, summary: Summary) -> None:
    """Methods under their bars, batch sizes under their groups."""
    step = len(summary.methods) + 1
    places = [place * step + number for place in range(len(summary.batches)) for number in range(step - 1)]
    short = [method.replace("U-Clip, ", "") for method in summary.methods] * len(summary.batches)
    panel.set_xticks(places, [plain(name, 12) for name in short], fontsize=5.5, rotation=90 if step > 2 else 0)
    panel.tick_params(axis="x", length=0, pad=1)
    panel.set_xlim(-0.8, len(summary.batches) * step - 1.2)
    panel.set(ylim=(0, 1), yticks=[0, 0.5, 1])
    for place, batch in enumerate(summary.batches):
        middle = (place * step + (step - 2) / 2, 1.02)
        where = {"transform": panel.get_xaxis_transform(), "ha": "center", "fontsize": 7}
        panel.text(*middle, f"batch {thousands(batch)}", **where)
