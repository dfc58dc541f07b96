"""What the carry does while a network trains: norms of gradient, carry and radius, and how the carry is fed."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from carryclip_lab.analysis.naming import OPTIMIZERS, region_name
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.figures.drawn import Drawn, caption, footer
from carryclip_lab.figures.lines import centred
from carryclip_lab.figures.sheet import sheet
from carryclip_lab.figures.style import Look, looks
from carryclip_lab.store.records import Epoch

GRADIENT: Look = {"color": "0.55", "linestyle": "-", "linewidth": 1.0}
RADIUS: Look = {"color": "black", "linestyle": (0, (1, 1)), "linewidth": 1.2}
Trace = tuple[Cell, list[Epoch]]


def draw(summary: Summary) -> Drawn | None:
    """One column per optimizer, one row for a small, a middle and a large batch; the feed below the norms."""
    region = summary.main_region
    methods = [method for method in summary.methods if method not in ("none", "clip")]
    batches = _few(summary.batches)
    traces = {
        (batch, name): [
            trace for method in methods if (trace := _trace(summary, summary.find(name, region, method, batch)))
        ]
        for batch in batches
        for name in summary.optimizers
    }
    if region is None or not any(traces.values()):
        return None
    given = looks(summary.methods)
    used = [method for method in methods if any(method == _method(each) for found in traces.values() for each in found)]
    legend = [(f"carry, {method}", _line(given[method])) for method in used]
    cells = [
        cell for batch, name in traces for method in methods if (cell := summary.find(name, region, method, batch))
    ]
    made = sheet(
        len(batches),
        len(summary.optimizers),
        legend=[("gradient", GRADIENT), ("radius", RADIUS), *legend],
        foot=footer(summary, cells),
        size=(3.5, 1.7),
        strip=0.55,
        left=0.75,
        share="none",
        gap=(0.2, 0.4),
    )
    limits = limits_of(epoch for found in traces.values() for _, each in found for epoch in each)
    for (batch, name), found in traces.items():
        row, column = batches.index(batch), summary.optimizers.index(name)
        panel, strip = made.panels[row][column], made.strips[row][column]
        panel.set_title(f"{OPTIMIZERS.get(name, name)}, batch {batch}")
        _norms(panel, found, given)
        _axes(panel, limits, first=column == 0)
        _feed(strip, found, given, first=column == 0)
    made.label("epoch", "norm")
    text = (
        f"Norms of gradient, carry and radius by epoch, {region_name(region).label}, for the first seed at the best "
        "learning rate of each method; the gradient is that of the first method shown. Below: the carry's feed, the "
        "share of a radius that each gradient adds in the carry's direction; above 0.5 (dotted) the carry winds up."
    )
    rows = [_row(cell, epoch) for found in traces.values() for cell, epochs in found for epoch in epochs]
    return Drawn(made.figure, caption(summary, cells, text), rows)


def _few(batches: Sequence[int]) -> list[int]:
    """The smallest, the middle and the largest."""
    return list(dict.fromkeys([batches[0], batches[(len(batches) - 1) // 2], batches[-1]]))


def _trace(summary: Summary, cell: Cell | None) -> Trace | None:
    """The first seed at the chosen learning rate, if it has measured a carry."""
    if cell is None or cell.lr is None or not cell.chosen:
        return None
    epochs = list(summary.epochs(cell.runs[cell.lr][min(cell.chosen)].spec.id))
    return (cell, epochs) if any(epoch.carry_norm is not None for epoch in epochs) else None


def _method(trace: Trace) -> str:
    return trace[0].setting.method


def _line(look: Look) -> Look:
    return {"color": look["color"], "linestyle": look["linestyle"]}


def _values(epochs: Sequence[Epoch], name: str) -> list[float]:
    """Zero cannot be shown on a logarithmic axis, and is left out like what is not known."""
    return [getattr(epoch, name) or math.nan for epoch in epochs]


def _norms(panel: Any, found: Sequence[Trace], given: dict[str, Look]) -> None:
    if not found:
        panel.text(0.5, 0.5, "not run yet", **centred(panel))
    for place, (cell, epochs) in enumerate(found):
        x = [epoch.epoch for epoch in epochs]
        if place == 0:
            panel.plot(x, _values(epochs, "grad_norm"), **GRADIENT)
            panel.plot(x, _values(epochs, "radius_norm"), **RADIUS)
        panel.plot(x, _values(epochs, "carry_norm"), **_line(given[cell.setting.method]))


def limits_of(epochs: Iterable[Epoch]) -> tuple[float, float]:
    """The range of all norms."""
    names = ("grad_norm", "carry_norm", "radius_norm")
    seen = [value for epoch in epochs for name in names if (value := getattr(epoch, name))]
    return min(seen, default=0.1) / 1.5, max(seen, default=1.0) * 1.5


def log_norms(panel: Any, limits: tuple[float, float]) -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panel.set_yscale("log")
    panel.set_ylim(*limits)
    steps = (1.0,) if limits[1] / limits[0] > 1000 else (1.0, 2.0, 5.0)
    panel.yaxis.set_major_locator(LogLocator(subs=steps, numticks=9))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())


def _axes(panel: Any, limits: tuple[float, float], *, first: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    log_norms(panel, limits)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panel.tick_params(labelleft=first)


def _feed(strip: Any, found: Sequence[Trace], given: dict[str, Look], *, first: bool) -> None:
    for cell, epochs in found:
        feed = [math.nan if epoch.carry_feed is None else epoch.carry_feed for epoch in epochs]
        strip.plot([epoch.epoch for epoch in epochs], feed, **_line(given[cell.setting.method]))
    if found:
        strip.axhline(0.5, color="black", linewidth=0.6, linestyle=(0, (1, 3)))
    else:
        strip.set_xticks([])
    strip.set(ylim=(-1.08, 1.08), yticks=[-0.5, 0, 0.5])
    if first:
        strip.set_ylabel("feed")


def _row(cell: Cell, epoch: Epoch) -> dict[str, Any]:
    names = ("epoch", "loss", "train_accuracy", "grad_norm", "carry_norm", "radius_norm", "carry_feed")
    told = {name: "" if getattr(epoch, name) is None else getattr(epoch, name) for name in names}
    setting = cell.setting
    return {"optimizer": setting.optimizer, "method": setting.method, "batch": cell.batch, "lr": cell.lr, **told}
