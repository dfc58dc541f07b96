"""What the carry does while a network trains: norms of gradient, carry and radius, and how the carry is fed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from carryclip_lab.analysis.naming import CLIP, FULL, NONE, Method, RegionName, region_name
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.engine.methods import sampling
from carryclip_lab.figures.sheet import DOTTED, Drawn, Panel, known, named, sheet
from carryclip_lab.figures.style import Look, looks
from carryclip_lab.spec import OPTIMIZERS
from carryclip_lab.store.records import Epoch

GRADIENT: Look = {"color": "0.55", "linestyle": "-", "linewidth": 1.0}
RADIUS: Look = {"color": "black", "linestyle": (0, (1, 1)), "linewidth": 1.2}
LOSS: Look = {"color": "black", "linestyle": "-", "linewidth": 1.2}
NORMS = ("grad_norm", "carry_norm", "radius_norm")
SHOWN = RegionName("EWMA", (1.0, 2.0))
"""The region of the paper's figure of one run on ImageNet."""
Trace = tuple[Cell, list[Epoch]]


def draw(summary: Summary) -> Drawn | None:
    """One column per optimizer, one row for a small, a middle and a large batch; the feed below the norms."""
    region, batches = summary.main_region, _few(summary.batches)
    here = [cell for cell in summary.cells if cell.setting.region == region and cell.batch in batches]
    cells = [cell for cell in here if cell.setting.method not in (NONE, CLIP)]
    traces = _traces(summary, cells)
    if region is None or not traces:
        return None
    given = {method: _line(look) for method, look in looks(summary.methods).items()}
    room = {"size": (3.5, 1.7), "strip": 0.55, "left": 0.75, "gap": (0.2, 0.4)}
    legend = _legend(traces, given).items()
    made = sheet(summary, cells, batches, summary.optimizers, legend=legend, share="none", **room)
    for batch, name, panel in made.each():
        found = [trace for trace in traces if (trace[0].batch, trace[0].setting.optimizer) == (batch, name)]
        _norms(panel, found, given)
        _log_norms(panel, traces)
        _feed(panel, found, given)
        panel.axes.set_title(f"{OPTIMIZERS[name]}, batch {batch}")
    made.label("epoch", "norm")
    text = (
        f"Norms of gradient, carry and radius by epoch, {region_name(region).label}, for the first seed at the best "
        "learning rate of each method; the gradient is that of the first method shown. Below: the carry's feed, the "
        "share of a radius that each gradient adds in the carry's direction; above 0.5 (dotted) the carry winds up."
    )
    return made.drawn(text, [_row(cell, epoch) for cell, epochs in traces for epoch in epochs])


def _few(batches: Sequence[int]) -> list[int]:
    """The smallest, the middle and the largest."""
    return list(dict.fromkeys([batches[0], batches[(len(batches) - 1) // 2], batches[-1]]))


def _traces(summary: Summary, cells: Iterable[Cell]) -> list[Trace]:
    """Of each cell the first seed at the chosen learning rate, if it has measured a carry; in the order of panels."""
    found = []
    for cell in cells:
        if cell.lr is not None and cell.chosen:
            epochs = list(summary.epochs(cell.runs[cell.lr][min(cell.chosen)].spec.id))
            if any(epoch.carry_norm is not None for epoch in epochs):
                found.append((cell, epochs))
    places = summary.optimizers
    found.sort(key=lambda each: (each[0].batch, places.index(each[0].setting.optimizer), each[0].setting.method.order))
    return found


def _legend(traces: Iterable[Trace], given: Mapping[Method, Look]) -> dict[str, Look]:
    methods = sorted({cell.setting.method for cell, _ in traces}, key=lambda method: method.order)
    return {"gradient": GRADIENT, "radius": RADIUS, **{f"carry, {each.label}": given[each] for each in methods}}


def _line(look: Look) -> Look:
    return {"color": look["color"], "linestyle": look["linestyle"]}


def _plot(axes: Any, epochs: Sequence[Epoch], name: str, look: Look) -> None:
    """Norms by epoch. Zero cannot be shown on a logarithmic axis, and is left out like what is not known."""
    axes.plot([epoch.epoch for epoch in epochs], [getattr(epoch, name) or math.nan for epoch in epochs], **look)


def _norms(panel: Panel, found: Sequence[Trace], given: Mapping[Method, Look]) -> None:
    from matplotlib.ticker import MaxNLocator

    if not found:
        panel.remark("not run yet")
    for place, (cell, epochs) in enumerate(found):
        if place == 0:
            _plot(panel.axes, epochs, "grad_norm", GRADIENT)
            _plot(panel.axes, epochs, "radius_norm", RADIUS)
        _plot(panel.axes, epochs, "carry_norm", given[cell.setting.method])
    panel.axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.axes.tick_params(labelleft=panel.first)


def _log_norms(panel: Panel, traces: Iterable[Trace]) -> None:
    """An axis for all norms of these runs."""
    norms = [getattr(epoch, name) for _, epochs in traces for epoch in epochs for name in NORMS]
    seen = [norm for norm in norms if norm]
    low, high = min(seen, default=0.1) / 1.5, max(seen, default=1.0) * 1.5
    panel.log_y(low, high, (1.0,) if high / low > 1000 else (1.0, 2.0, 5.0))


def _feed(panel: Panel, found: Sequence[Trace], given: Mapping[Method, Look]) -> None:
    strip = panel.strip
    for cell, epochs in found:
        feed = [math.nan if epoch.carry_feed is None else epoch.carry_feed for epoch in epochs]
        strip.plot([epoch.epoch for epoch in epochs], feed, **given[cell.setting.method])
    if found:
        strip.axhline(0.5, **DOTTED)
    else:
        strip.set_xticks([])
    strip.set(ylim=(-1.08, 1.08), yticks=[-0.5, 0, 0.5], ylabel="feed" if panel.first else "")


def _row(cell: Cell, epoch: Epoch) -> dict[str, Any]:
    names = named(cell)
    del names["region"]
    measured = ("epoch", "loss", "train_accuracy", *NORMS, "carry_feed")
    return {**names, "lr": cell.lr, **{name: known(getattr(epoch, name)) for name in measured}}


def trajectory(summary: Summary) -> Drawn | None:
    """Norms of gradient, carry and radius, and the training loss of one run, for the paper's choice of region."""
    cell, epochs = _shown(summary)
    if cell is None:
        return None
    lines = dict(zip(NORMS, (GRADIENT, _line(looks([FULL])[FULL]), RADIUS), strict=True))
    legend = zip(("gradient", "carry", "radius", "training loss"), (*lines.values(), LOSS), strict=True)
    made = sheet(summary, [cell], [0], ["norms", "loss"], legend=legend, size=(3.4, 2.2), share="none", gap=(0.75, 0.3))
    norms, losses = made.panels[0]
    for name, look in lines.items():
        _plot(norms.axes, epochs, name, look)
    _log_norms(norms, [(cell, epochs)])
    losses.axes.plot([epoch.epoch for epoch in epochs], [epoch.loss for epoch in epochs], **LOSS)
    norms.axes.set_title("Norms")
    losses.axes.set_title("Cross-entropy with smoothed labels")
    made.label("epoch", "")
    spec = cell.records[0].spec
    every = sampling(spec.recipe.epoch(spec)[0])
    sampled = "all steps" if every == 1 else f"one step in {every}"
    text = (
        f"One run with U-Clip and {cell.setting.name.label}, first seed: Euclidean norms of gradient, "
        f"carry and radius (left; means over {sampled} of each epoch), and training loss (right)."
    )
    names = ("epoch", "loss", "running_accuracy", "test_accuracy", *NORMS, "carry_feed")
    return made.drawn(text, [{name: getattr(epoch, name) for name in names} for epoch in epochs])


def _shown(summary: Summary) -> tuple[Cell | None, list[Epoch]]:
    """The cell of the paper's figure, or the first with a carry; and the epochs of its first seed."""
    carried = [cell for cell in summary.cells if cell.setting.method == FULL]
    for cell in sorted(carried, key=lambda cell: cell.setting.name != SHOWN):
        first = min(cell.records, key=lambda record: record.spec.seed)
        epochs = list(summary.epochs(first.spec.id))
        if epochs:
            return cell, epochs
    return None, []
