"""The chance that a run with a carry needs fewer epochs than one without clipping, or than one with plain clipping."""

from collections.abc import Iterable, Iterator
from typing import Any

from carryclip_lab.analysis.compare import Comparison, compare
from carryclip_lab.analysis.naming import CLIP, NONE, Method, region_name
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures.lines import apart, batch_axis
from carryclip_lab.figures.sheet import DOTTED, Drawn, Panel, known, named, sheet
from carryclip_lab.figures.style import Look, looks
from carryclip_lab.spec import OPTIMIZERS

Pair = tuple[Method, Method]
"""A method with a carry, and what it is compared with."""


def draw(summary: Summary) -> Drawn | None:
    """One column per optimizer; one line for each method with carry and each it is compared with."""
    region = summary.main_region
    seen = {name: _compared(summary, name) for name in summary.optimizers}
    given = _looks(summary, seen.values())
    if region is None or not given:
        return None
    cells = [cell for cell in summary.cells if cell.setting.region in (region, None)]
    legend = [(f"{ours.label} against {other.label}", look) for (ours, other), look in given.items()]
    made = sheet(summary, cells, [region], summary.optimizers, legend=legend, size=(3.5, 2.4))
    for _, name, panel in made.each():
        panel.axes.axhline(0.5, **DOTTED)
        for place, (pair, look) in enumerate(given.items()):
            _points(panel, seen[name].get(pair, []), look, apart(place, len(given), 0.05))
        if not seen[name]:
            panel.remark("nothing to compare yet", 0.3)
        panel.axes.set_title(OPTIMIZERS[name])
    first = made.panels[0][0]  # the others share its axes
    batch_axis(first, summary.batches)
    first.axes.set_ylim(-0.04, 1.04)
    made.label("batch size", "chance of fewer epochs")
    text = (
        f"Chance that a run with a carry needs fewer epochs to {100 * summary.target:g} % than one without carry, "
        f"{region_name(region).label}, each at its best learning rate; ties count half, not reaching the target counts "
        "as infinitely many. Bars: 95 % bootstrap intervals over seeds, in pairs where seeds agree; where every run of "
        "one is ahead of every run of the other they have no width, however few the seeds."
    )
    return made.drawn(text, [row for found in seen.values() for pair in found for row in _rows(found[pair], pair[1])])


def _compared(summary: Summary, optimizer: str) -> dict[Pair, list[Comparison]]:
    """Every pair by batch size, where both have runs."""
    region, seen = summary.main_region, dict[Pair, list[Comparison]]()
    for method in (method for method in summary.methods if method.is_uclip):
        for other in (NONE, CLIP):
            for batch in summary.batches:
                base = summary.find(optimizer, None if other == NONE else region, other, batch)
                found = compare(summary.find(optimizer, region, method, batch), base)
                if found is not None:
                    seen.setdefault((method, other), []).append(found)
    return seen


def _looks(summary: Summary, seen: Iterable[dict[Pair, Any]]) -> dict[Pair, Look]:
    """The method's own against none; hollow and dashed against clipping."""
    used = {pair for found in seen for pair in found}
    dashed: Look = {"linestyle": (0, (2, 2)), "markerfacecolor": "white"}
    given = {}
    for method, look in looks(summary.methods).items():
        given[method, NONE] = {**look, "linestyle": "-"}
        given[method, CLIP] = {**look, **dashed}
    return {pair: look for pair, look in given.items() if pair in used}


def _points(panel: Panel, found: list[Comparison], look: Look, shift: float) -> None:
    x = [each.cell.batch * shift for each in found]
    middle = [each.fewer[0] for each in found]
    bars = [[max(0.0, each.fewer[0] - each.fewer[1]) for each in found]]
    bars.append([max(0.0, each.fewer[2] - each.fewer[0]) for each in found])
    panel.axes.errorbar(x, middle, bars, **look, linewidth=1.0, elinewidth=0.9, capsize=2)


def _rows(found: list[Comparison], other: Method) -> Iterator[dict[str, Any]]:
    for each in found:
        names, effect = named(each.cell), each.effect
        batch = names.pop("batch")
        yield {
            **names,
            "against": other.label,
            "batch": batch,
            **dict(zip(("fewer", "fewer_low", "fewer_high"), each.fewer, strict=True)),
            "ratio": known(effect.value),
            "ratio_low": known(effect.low),
            "ratio_high": known(effect.high),
            "seeds": effect.seeds,
        }
