"""The tables of trials: one for each, and one of all of them."""

import math
import statistics
from collections.abc import Iterable

from carryclip.experiments.analysis.answers import helps, removes
from carryclip.experiments.analysis.subjects import Kind
from carryclip.experiments.analysis.summary import Summary
from carryclip.experiments.analysis.worth import FULL, GATED, PLAIN, Block, Row, blocks, stills

POLICIES = ("no clipping", FULL, GATED, "U-Clip, Capped(10)")
"""The columns of the table of all trials."""
KINDS: dict[Kind, str] = {"signal": "signal", "ordinary": "ordinary", "corruption": "corruption"}
"""What large gradients are, in the order of that table."""
MARKS = {"yes": "▲", "it hurts": "▼", "no difference": "=", "inconclusive": "·"}
"""Better than plain clipping, worse, the same, not known."""


def heads(summary: Summary) -> list[str]:
    """Names of the columns of a trial's table."""
    subject = summary.subject
    assert subject is not None
    if subject.kind == "frozen":
        return ["radius / mean gradient", "method", "bias along the mean gradient (%)"]
    bias = ["bias"] if subject.bias else []
    return ["clipping", "method", "best lr", subject.words, "better than plain clipping by", *bias]


def words(summary: Summary) -> list[list[str]]:
    """A trial's table: methods at their best learning rates, mean and range over seeds."""
    subject = summary.subject
    assert subject is not None
    if subject.kind == "frozen":
        return [
            [f"{still.radius:g}", still.method, _percent(still.share.mean, still.share.low, still.share.high)]
            for still in stills(summary)
        ]
    table = []
    for block in blocks(summary):
        for row in block.rows:
            over = block.over(row.name) if row.name != PLAIN else None
            line = [
                block.label,
                row.name,
                "" if row.cell.lr is None else f"{row.cell.lr:g}",
                _metric(summary, row),
                "" if over is None else str(over),
            ]
            table.append([*line, str(row.bias or "")] if subject.bias else line)
    return table


def _percent(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _metric(summary: Summary, row: Row) -> str:
    """Mean and range over seeds; how many came to nothing."""
    assert summary.subject is not None
    seen = [summary.subject.shown(score) for score in row.scores.values() if math.isfinite(score)]
    lost = len(row.scores) - len(seen)
    if not seen:
        return "came to nothing" if lost else "not yet"
    told = f"{statistics.fmean(seen):.4g} ({min(seen):.4g}-{max(seen):.4g})"
    return told + (f", {lost} came to nothing" if lost else "")


def lines(summary: Summary) -> list[list[str]]:
    """A trial's part of the table of all: how much better than plain clipping, a line for each region."""
    if summary.subject is None or summary.subject.kind == "frozen":
        return []
    return [_line(summary, block) for block in blocks(summary)]


def overview(parts: Iterable[list[list[str]]]) -> list[list[str]]:
    """All trials in one table: signal first, corruption last."""
    order = list(KINDS.values())
    return sorted((line for part in parts for line in part), key=lambda line: order.index(line[0]))


def overview_heads() -> list[str]:
    """Names of its columns."""
    return [
        "large gradients are",
        "trial",
        "clipping",
        "judged by",
        PLAIN,
        *POLICIES,
        "does the carry remove the bias?",
    ]


def _line(summary: Summary, block: Block) -> list[str]:
    subject = summary.subject
    assert subject is not None
    plain, full = block.find(PLAIN), block.find(FULL)
    cells = []
    for name in POLICIES:
        gain = block.over(name)
        cells.append("" if gain is None else f"{MARKS.get(helps(gain, subject.little), '·')} {gain}")
    bias = removes(plain.bias, full.bias) if subject.bias and plain and full else ""
    seen = _metric(summary, plain) if plain else ""
    return [KINDS[subject.kind], subject.title, block.label, subject.words, seen, *cells, bias]
