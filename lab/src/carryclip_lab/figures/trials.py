"""Trials: what every method comes to at every learning rate, how it compares with plain clipping, and the way there."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Any

from carryclip_lab.analysis.naming import METHODS, Method
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.analysis.worth import Block, Row, blocks, row_name, stills
from carryclip_lab.figures.sheet import Drawn, Panel, known, sheet
from carryclip_lab.figures.style import Look, looks, plain
from carryclip_lab.spec import OPTIMIZERS

THIN = 0.9
"""Width of lines of methods that are not ours."""
Key = tuple[Method, float]
"""A method, and its batch size in those of the others."""


def worth(summary: Summary) -> Drawn | None:
    """One row per optimizer and region: the metric against the learning rate, and effects at the best one."""
    found = [block for block in blocks(summary) if any(row.scores for row in block.rows)]
    if not found:
        return None
    subject = found[0].subject
    given = _looks((row.method, row.times) for block in found for row in block.rows)
    size = (3.4, max(2.1, 0.17 * max(len(block.rows) for block in found) + 0.3))
    room = {"legend": _legend(given), "size": size, "gap": (1.75, 0.5)}
    made = sheet(summary, summary.cells, found, ["rates", "effects"], share="none", **room)
    for block, (left, right) in zip(found, made.panels, strict=True):
        _rates(left, block, given)
        _effects(right, block, given)
        left.axes.set_title(plain(f"{summary.data}, {block.stepped_by}, {block.label}"))
        right.axes.set_title("better than plain clipping by")
        left.axes.set(xlabel="learning rate", ylabel=plain(subject.words))
    better = f"{subject.words}, {'higher' if subject.higher else 'lower'} by"
    made.panels[-1][1].axes.set_xlabel(plain(better))
    text = (
        f"Left: {subject.words} after the last step against the learning rate, mean over seeds with the range; the "
        "best rate of each method, by its median, is marked. Right: how much better than plain clipping each method is "
        "at its best rate, seed by seed: mean and 95 % interval; the shaded band holds differences too small to matter."
    )
    return made.drawn(text, [_numbers(block, row) for block in found for row in block.rows])


def _looks(keys: Iterable[Key]) -> dict[Key, Look]:
    """What is not ours is thin, and so is a larger batch."""
    unique = list(dict.fromkeys(keys))
    given = looks([method if times == 1 else (method, times) for method, times in unique])
    return {
        key: look if method in METHODS else {**look, "linewidth": THIN}
        for key, (method, look) in zip(unique, given.items(), strict=True)
    }


def _legend(given: dict[Key, Look]) -> list[tuple[str, Look]]:
    return [(row_name(*key), look) for key, look in given.items()]


def _rates(panel: Panel, block: Block, given: dict[Key, Look]) -> None:
    for place, row in enumerate(block.rows):
        shift = 1.0 + 0.012 * (place - len(block.rows) / 2)
        _rate_line(panel, row, shift, given[row.method, row.times])
    rates = sorted({lr for row in block.rows for lr in row.cell.runs})
    panel.log_x({lr: f"{lr:g}" for lr in rates})
    panel.axes.set_xlim(rates[0] / 1.5, rates[-1] * 1.5)
    best = [value for row in block.rows for value in row.seen]
    if best:  # a rate that ruins a method would flatten all the rest: show what is near the best
        room = 0.35 * (max(best) - min(best)) or 0.1 * abs(best[0]) or 0.1
        low = min(best) - room
        panel.axes.set_ylim(low if min(best) < 0.0 else max(low, 0.0), max(best) + room)


def _rate_line(panel: Panel, row: Row, shift: float, look: Look) -> None:
    """Means with ranges at the rates at which every seed is done and came to something; the best rate marked."""
    seen: dict[float, list[float]] = {}
    for lr, runs in sorted(row.cell.runs.items()):
        values = [row.subject.shown(score) for score in row.cell.epochs_at(lr).values() if math.isfinite(score)]
        if len(values) == len(runs):
            seen[lr] = values
    x, means = [lr * shift for lr in seen], {lr: statistics.fmean(values) for lr, values in seen.items()}
    panel.axes.plot(x, list(means.values()), **{**look, "marker": "none"}, zorder=3)
    ends = [[end(values) for values in seen.values()] for end in (min, max)]
    panel.axes.vlines(x, *ends, color=look["color"], linewidth=0.6, zorder=2)
    if row.cell.lr in means:
        panel.axes.plot(row.cell.lr * shift, means[row.cell.lr], look["marker"], color=look["color"], zorder=4)


def _effects(panel: Panel, block: Block, given: dict[Key, Look]) -> None:
    little, axes = block.subject.little, panel.axes
    axes.axvspan(-little, little, color="0.93", zorder=0)
    axes.axvline(0.0, color="0.5", linewidth=0.7, zorder=1)
    shown = [row for row in block.rows if not row.is_plain]
    for place, row in enumerate(reversed(shown)):
        effect = block.over(row.method, times=row.times)
        if effect is None or not math.isfinite(effect.value):
            axes.text(0.0, place, "came to nothing" if row.scores else "not run yet", fontsize=6, va="center")
            continue
        look = given[row.method, row.times]
        if math.isfinite(effect.low):
            axes.plot([effect.low, effect.high], [place, place], color=look["color"], linewidth=1.2)
        axes.plot(effect.value, place, look["marker"], color=look["color"])
    panel.name_rows([plain(row.name, 26) for row in shown])


def _numbers(block: Block, row: Row) -> dict[str, Any]:
    effect = block.over(row.method, times=row.times)
    ends = {"better_by": None, "low": None, "high": None}
    if effect is not None and math.isfinite(effect.value):
        ends = {"better_by": effect.value, "low": effect.low, "high": effect.high}
    return {
        "optimizer": block.stepped_by,
        "region": block.label,
        "method": row.name,
        "lr": known(row.cell.lr),
        block.subject.metric: statistics.fmean(row.seen) if row.seen else "",
        "seeds": len(row.scores),
        "came_to_nothing": row.lost,
        **{name: known(value) for name, value in ends.items()},
        "bias": "" if row.bias is None else row.bias.size,
    }


def course(summary: Summary) -> Drawn | None:
    """One row per optimizer and region: metric, share that is clipped and carry over training, at the best rates."""
    found = blocks(summary)
    used = [(block, row) for block in found for row in block.rows if row.scores and row.method in METHODS]
    if not any(record.spec.epochs > 1 for _, row in used for record in row.cell.records):
        return None  # nothing is known but the end
    subject = found[0].subject
    titles = {subject.metric: subject.words, "clipped": "clipped share", "carry": "carry (radii)"}
    given = _looks((row.method, row.times) for _, row in used)
    cells = dict.fromkeys(row.cell for _, row in used)
    room = {"legend": _legend(given), "size": (2.5, 1.7), "gap": (0.6, 0.45)}
    made = sheet(summary, cells, found, list(titles), share="none", **room)
    made.label("steps", "")
    means = {row: _means(summary, row.cell, subject.metric) for _, row in used}
    for block, key, panel in made.each():
        for row in block.rows:
            seen = [(line["steps"], line[key]) for line in means.get(row, []) if line[key] is not None]
            if seen:
                panel.axes.plot(*zip(*seen, strict=True), **given[row.method, row.times], markersize=2.5)
        panel.axes.set_title(plain(titles[key], 40))
        if panel.first:
            panel.axes.set_ylabel(plain(f"{block.stepped_by}, {block.label}"))
        if key == "carry":
            panel.axes.set_yscale("symlog", linthresh=1.0)
            panel.axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    rows = [
        {"optimizer": block.stepped_by, "region": block.label, "method": row.name, **line}
        for block, row in used
        for line in means[row]
    ]
    text = (
        f"Over training, at the best learning rate of each method, means over seeds: {subject.words} (left), share of "
        "steps or coordinates that are clipped (middle), norm of the carry in radii (right)."
    )
    return made.drawn(text, rows)


def _means(summary: Summary, cell: Cell, metric: str) -> list[dict[str, Any]]:
    """By epoch, over the seeds at the best rate."""
    records = cell.runs[cell.lr].values() if cell.lr is not None else ()
    runs = [summary.epochs(record.spec.id) for record in records if record.state == "done"]
    spec, lines = cell.records[0].spec, []
    for epochs in zip(*runs, strict=False):
        ratios = [epoch.carry_norm / epoch.radius_norm for epoch in epochs if epoch.carry_norm and epoch.radius_norm]
        lines.append(
            {
                "steps": spec.recipe.epoch(spec)[0] * epochs[0].epoch,
                metric: _mean([epoch.metrics.get(metric) for epoch in epochs]),
                "clipped": _mean([epoch.clipped_fraction for epoch in epochs]),
                "carry": _mean(ratios),
            }
        )
    return lines


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite and len(finite) == len(values) else None


def frozen(summary: Summary) -> Drawn | None:
    """Bias at weights that do not move, against the radius."""
    found = stills(summary)
    if not found:
        return None
    given = _looks((still.method, 1.0) for still in found)
    optimizers = list(dict.fromkeys(still.optimizer for still in found))
    room = {"legend": _legend(given), "size": (5.2 if len(optimizers) == 1 else 3.0, 2.6), "left": 0.75}
    made = sheet(summary, summary.cells, [0], optimizers, share="none", gap=(0.5, 0.34), **room)
    for _, optimizer, panel in made.each():
        here = [still for still in found if still.optimizer == optimizer]
        for place, ((method, _), look) in enumerate(given.items()):
            mine = [still for still in here if still.method == method]
            x = [still.radius * (1.0 + 0.015 * (place - len(given) / 2)) for still in mine]
            panel.axes.plot(x, [100 * still.share.value for still in mine], **look)
            ends = [[100 * getattr(still.share, end) for still in mine] for end in ("low", "high")]
            panel.axes.vlines(x, *ends, color=look["color"], linewidth=0.8)
        panel.axes.axhline(0.0, color="0.5", linewidth=0.7)
        panel.log_x({radius: f"{radius:g}" for radius in sorted({still.radius for still in here})})
        panel.axes.set_title(OPTIMIZERS[optimizer])
    made.label("radius / norm of the mean gradient", "bias (%)")
    text = (
        "Mean step less the mean step without clipping, at weights that do not move, along the latter and as a share "
        "of it: mean over seeds with 95 % interval. With SGD a step is a gradient, and below 1 no clipping to that "
        "radius can pass the mean gradient on."
    )
    names = ("bias", "low", "high", "seeds")
    rows = [
        {
            "optimizer": OPTIMIZERS[still.optimizer],
            "method": still.method.label,
            "radius": still.radius,
            **dict(zip(names, astuple(still.share), strict=True)),
        }
        for still in found
    ]
    return made.drawn(text, rows)
