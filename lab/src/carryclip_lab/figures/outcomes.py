"""How runs ended: the share of each outcome, by method and batch size, over all learning rates and regions."""

import itertools
from collections import Counter

from carryclip_lab.analysis.naming import Method
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures.lines import thousands
from carryclip_lab.figures.sheet import Drawn, Panel, sheet
from carryclip_lab.figures.style import Look, plain
from carryclip_lab.spec import OPTIMIZERS

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
    used = [name for name in LOOKS if any(found[name] for found in counts.values())]
    if used == ["open"]:
        return None
    step = len(summary.methods) + 1
    width = min(11.0, max(4.5, 0.26 * len(summary.batches) * step))
    legend = [(name.replace("_", " ").replace("open", "not done"), LOOKS[name]) for name in used]
    made = sheet(summary, summary.cells, summary.optimizers, [0], legend=legend, size=(width, 1.25), gap=(0.2, 0.55))
    for name, _, panel in made.each():
        for place, batch in enumerate(summary.batches):
            for number, method in enumerate(summary.methods):
                _bar(panel, place * step + number, counts[name, method, batch], used)
        _axes(panel, summary)
        panel.axes.set_title(OPTIMIZERS[name], loc="left", pad=12, weight="bold")
    made.label("", "share of runs")
    text = (
        "How runs ended, by batch size and method, over all learning rates and regions together: this is about how "
        "forgiving a method is, not about its best setting."
    )
    numbers = [
        {"optimizer": name, "method": method.label, "batch": batch, **{outcome: found[outcome] for outcome in LOOKS}}
        for (name, method, batch), found in counts.items()
        if found
    ]
    return made.drawn(text, numbers)


def _counts(summary: Summary) -> dict[tuple[str, Method, int], Counter[str]]:
    """By optimizer, method and batch size."""
    places = itertools.product(summary.optimizers, summary.methods, summary.batches)
    counts = {place: Counter[str]() for place in places}
    for cell in summary.cells:
        found = counts[cell.setting.optimizer, cell.setting.method, cell.batch]
        found.update(record.outcome or "open" for record in cell.records)
    return counts


def _bar(panel: Panel, x: int, found: Counter[str], used: list[str]) -> None:
    bottom = 0.0
    for outcome in used:
        share = found[outcome] / max(found.total(), 1)
        if share:
            panel.axes.bar(x, share, 0.86, bottom, linewidth=0.5, **LOOKS[outcome])
        bottom += share


def _axes(panel: Panel, summary: Summary) -> None:
    """Methods under their bars, batch sizes under their groups."""
    step = len(summary.methods) + 1
    places = [place * step + number for place in range(len(summary.batches)) for number in range(step - 1)]
    short = [plain(method.label, 12) for method in summary.methods] * len(summary.batches)
    axes = panel.axes
    axes.set_xticks(places, short, fontsize=5.5, rotation=90 if step > 2 else 0)
    axes.tick_params(axis="x", length=0, pad=1)
    axes.set_xlim(-0.8, len(summary.batches) * step - 1.2)
    axes.set(ylim=(0, 1), yticks=[0, 0.5, 1])
    for place, batch in enumerate(summary.batches):
        where = {"transform": axes.get_xaxis_transform(), "ha": "center", "fontsize": 7}
        axes.text(place * step + (step - 2) / 2, 1.02, f"batch {thousands(batch)}", **where)
