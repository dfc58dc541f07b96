"""Trials: what every method comes to at every learning rate, how it compares with plain clipping, and the way there."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from carryclip_lab.analysis.naming import METHODS
from carryclip_lab.analysis.subjects import Subject
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.analysis.worth import PLAIN, Block, Row, blocks, stills
from carryclip_lab.figures.drawn import Drawn, caption, footer
from carryclip_lab.figures.sheet import sheet
from carryclip_lab.figures.style import Look, looks, plain

SIZE = (3.4, 2.1)
THIN = 0.9
"""Width of lines of methods that are not ours."""


def worth(summary: Summary) -> Drawn | None:
    """One row per region: the metric against the learning rate, and effects at the best one."""
    subject, found = summary.subject, [block for block in blocks(summary) if any(row.scores for row in block.rows)]
    if subject is None or not found:
        return None
    given = _looks([row.name for block in found for row in block.rows])
    cells = list(summary.cells)
    most = max(len(block.rows) for block in found)
    size = (SIZE[0], max(SIZE[1], 0.17 * most + 0.3))
    made = sheet(
        len(found),
        2,
        legend=list(given.items()),
        foot=footer(summary, cells),
        size=size,
        gap=(1.75, 0.5),
        share="none",
    )
    for block, (left, right) in zip(found, made.panels, strict=True):
        _rates(left, block, subject, given)
        _effects(right, block, subject, given)
        left.set_title(plain(f"{summary.data}, {block.label}"))
        right.set_title("better than plain clipping by")
        left.set(xlabel="learning rate", ylabel=plain(subject.words))
    made.panels[-1][1].set_xlabel(plain(f"{subject.words}, {'higher' if subject.higher else 'lower'} by"))
    text = (
        f"Left: {subject.words} after the last step against the learning rate, mean over seeds with the range; the "
        "best rate of each method, by its median, is marked. Right: how much better than plain clipping each method is "
        "at its best rate, seed by seed: mean and 95 % interval; in the shaded band nobody would care."
    )
    rows = [_numbers(block, row, subject) for block in found for row in block.rows]
    return Drawn(made.figure, caption(summary, cells, text), rows)


def _looks(names: Sequence[str]) -> dict[str, Look]:
    """By name of a row; what is not ours is thin."""
    unique = list(dict.fromkeys(names))
    given = looks(["none" if name == "no clipping" else name for name in unique])
    return {
        name: look if method in METHODS else {**look, "linewidth": THIN}
        for name, (method, look) in zip(unique, given.items(), strict=True)
    }


def _rates(panel: Any, block: Block, subject: Subject, given: dict[str, Look]) -> None:
    rates = sorted({lr for row in block.rows for lr in row.cell.runs})
    for place, row in enumerate(block.rows):
        shift = 1.0 + 0.012 * (place - len(block.rows) / 2)
        x, middle, low, high = [], [], [], []
        for lr in sorted(row.cell.runs):
            seen = [subject.shown(score) for score in row.cell.epochs_at(lr).values() if math.isfinite(score)]
            if len(seen) == len(row.cell.runs[lr]):
                x.append(lr * shift)
                middle.append(statistics.fmean(seen))
                low.append(min(seen))
                high.append(max(seen))
        look = given[row.name]
        panel.plot(x, middle, **{**look, "marker": "none"}, zorder=3)
        panel.vlines(x, low, high, color=look["color"], linewidth=0.6, zorder=2)
        best = [
            (at, value) for at, value in zip(x, middle, strict=True) if math.isclose(at, (row.cell.lr or 0) * shift)
        ]
        panel.plot(*zip(*best, strict=True), look["marker"], color=look["color"], zorder=4) if best else None
    panel.set_xscale("log")
    panel.set_xticks(rates, [f"{lr:g}" for lr in rates])
    panel.xaxis.set_minor_formatter("")
    panel.set_xlim(rates[0] / 1.5, rates[-1] * 1.5)
    _limit(panel, block, subject)


def _limit(panel: Any, block: Block, subject: Subject) -> None:
    """Show what is near the best; a rate that ruins a method would flatten all the rest."""
    best = [subject.shown(score) for row in block.rows for score in row.scores.values() if math.isfinite(score)]
    if best:
        room = 0.35 * (max(best) - min(best)) or 0.1 * abs(best[0]) or 0.1
        low = min(best) - room
        panel.set_ylim(low if min(best) < 0.0 else max(low, 0.0), max(best) + room)


def _effects(panel: Any, block: Block, subject: Subject, given: dict[str, Look]) -> None:
    shown = [row for row in block.rows if row.name != PLAIN]
    panel.axvspan(-subject.little, subject.little, color="0.93", zorder=0)
    panel.axvline(0.0, color="0.5", linewidth=0.7, zorder=1)
    for place, row in enumerate(reversed(shown)):
        effect = block.over(row.name)
        if effect is None or not math.isfinite(effect.mean):
            panel.text(0.0, place, "came to nothing" if row.scores else "not run yet", fontsize=6, va="center")
            continue
        look = given[row.name]
        if math.isfinite(effect.low):
            panel.plot([effect.low, effect.high], [place, place], color=look["color"], linewidth=1.2)
        panel.plot(effect.mean, place, look["marker"], color=look["color"])
    panel.set_yticks(range(len(shown)), [plain(row.name, 26) for row in reversed(shown)])
    panel.set_ylim(-0.6, len(shown) - 0.4)
    panel.grid(axis="x", linewidth=0.4, color="0.88")


def _numbers(block: Block, row: Row, subject: Subject) -> dict[str, Any]:
    effect = block.over(row.name)
    seen = [subject.shown(score) for score in row.scores.values() if math.isfinite(score)]
    known = effect is not None and math.isfinite(effect.mean)
    return {
        "region": block.label,
        "method": row.name,
        "lr": "" if row.cell.lr is None else row.cell.lr,
        subject.metric: statistics.fmean(seen) if seen else "",
        "seeds": len(row.scores),
        "came_to_nothing": len(row.scores) - len(seen),
        "better_by": effect.mean if effect and known else "",
        "low": effect.low if effect and known and math.isfinite(effect.low) else "",
        "high": effect.high if effect and known and math.isfinite(effect.high) else "",
        "bias": "" if row.bias is None else row.bias.size,
    }


def course(summary: Summary) -> Drawn | None:
    """One row per region: the metric, the share that is clipped and the carry over training, at the best rates."""
    subject, found = summary.subject, blocks(summary)
    used = [row for block in found for row in block.rows if row.scores and row.method in METHODS]
    if subject is None or not used:
        return None
    given = _looks([row.name for row in used])
    cells = list(dict.fromkeys(row.cell for row in used))
    made = sheet(
        len(found),
        3,
        legend=list(given.items()),
        foot=footer(summary, cells),
        size=(2.5, 1.7),
        gap=(0.6, 0.45),
        share="none",
    )
    rows = []
    for block, panels in zip(found, made.panels, strict=True):
        for row in (row for row in block.rows if row in used):
            lines = _means(summary, row.cell, subject)
            rows += [{"region": block.label, "method": row.name, **line} for line in lines]
            look = {**given[row.name], "markersize": 2.5}
            for panel, key in zip(panels, (subject.metric, "clipped", "carry"), strict=True):
                seen = [(line["steps"], line[key]) for line in lines if line[key] is not None]
                panel.plot(*zip(*seen, strict=True), **look) if seen else None
        for panel, title in zip(panels, (subject.words, "clipped share", "carry (radii)"), strict=True):
            panel.set_title(plain(title, 40))
        panels[2].set_yscale("symlog", linthresh=1.0)
        panels[2].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    made.label("steps", "")
    for block, panels in zip(found, made.panels, strict=True):
        panels[0].set_ylabel(plain(block.label))
    text = (
        f"Over training, at the best learning rate of each method, means over seeds: {subject.words} (left), share of "
        "steps or coordinates that are clipped (middle), norm of the carry in radii (right)."
    )
    return Drawn(made.figure, caption(summary, cells, text), rows)


def _means(summary: Summary, cell: Cell, subject: Subject) -> list[dict[str, Any]]:
    """By epoch, over the seeds at the best rate."""
    if cell.lr is None:
        return []
    runs = [summary.epochs(record.spec.id) for record in cell.runs[cell.lr].values() if record.state == "done"]
    spec = cell.records[0].spec
    steps, _ = spec.recipe.epoch(spec)
    lines = []
    for epochs in zip(*runs, strict=False):
        ratios = [epoch.carry_norm / epoch.radius_norm for epoch in epochs if epoch.carry_norm and epoch.radius_norm]
        lines.append(
            {
                "steps": steps * epochs[0].epoch,
                subject.metric: _mean([epoch.metrics.get(subject.metric) for epoch in epochs]),
                "clipped": _mean([epoch.clipped_fraction for epoch in epochs]),
                "carry": _mean(ratios),
            }
        )
    return lines


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def frozen(summary: Summary) -> Drawn | None:
    """Bias at weights that do not move, against the radius."""
    found = stills(summary)
    if not found:
        return None
    given = _looks([still.method for still in found])
    made = sheet(
        1, 1, legend=list(given.items()), foot=footer(summary, summary.cells), size=(5.2, 2.6), left=0.75, share="none"
    )
    panel = made.panels[0][0]
    radii = sorted({still.radius for still in found})
    for place, (method, look) in enumerate(given.items()):
        mine = [still for still in found if still.method == method]
        x = [still.radius * (1.0 + 0.015 * (place - len(given) / 2)) for still in mine]
        panel.plot(x, [100 * still.share.mean for still in mine], **look)
        ends = [[100 * getattr(still.share, end) for still in mine] for end in ("low", "high")]
        panel.vlines(x, *ends, color=look["color"], linewidth=0.8)
    panel.axhline(0.0, color="0.5", linewidth=0.7)
    panel.set_xscale("log")
    panel.set_xticks(radii, [f"{radius:g}" for radius in radii])
    panel.xaxis.set_minor_formatter("")
    panel.set_title(plain(summary.data))
    made.label("radius / norm of the mean gradient", "bias along the mean gradient (%)")
    text = (
        "Mean update less mean gradient at weights that do not move, along the mean gradient and as a share of it: "
        "mean over seeds with 95 % interval. Below 1 no clipping to that radius can pass the mean gradient on."
    )
    rows = [
        {
            "method": still.method,
            "radius": still.radius,
            "bias": still.share.mean,
            "low": still.share.low,
            "high": still.share.high,
            "seeds": still.share.seeds,
        }
        for still in found
    ]
    return Drawn(made.figure, caption(summary, summary.cells, text), rows)
