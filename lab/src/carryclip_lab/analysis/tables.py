"""The tables of trials: one for each, and one of all of them."""

import math
import statistics
from collections.abc import Iterable, Sequence

from carryclip_lab.analysis import naming
from carryclip_lab.analysis.answers import BETTER, BIAS, GATE_BETTER, KEEPS_UP, THAN_NONE, answers, helps
from carryclip_lab.analysis.subjects import Kind, last
from carryclip_lab.analysis.summary import Summary, runs_of
from carryclip_lab.analysis.worth import FULL, GATED, PLAIN, Block, Row, blocks, stills

ASKED = (BIAS, BETTER, GATE_BETTER, THAN_NONE, KEEPS_UP)
POLICIES = ("no clipping", FULL, GATED, "U-Clip, Capped(10)")
"""The columns of the table of all trials."""
PEERS = ("clip, batch × 4", *naming.PEERS.values(), "ZClip + U-Clip")
"""The columns of a second one, of others' remedies."""
KINDS: dict[Kind, str] = {"signal": "signal", "ordinary": "ordinary", "corruption": "corruption"}
"""What large gradients are, in the order of that table."""
_FIRST = ("large gradients are", "trial", "clipping")
MARKS = {"yes": "▲", "it hurts": "▼", "no difference": "=", "inconclusive": "·"}
"""Better than plain clipping, worse, the same, not known."""


def heads(summary: Summary) -> list[str]:
    """Names of the columns of a trial's table."""
    subject = summary.subject
    assert subject is not None
    if subject.kind == "frozen":
        return ["radius / mean gradient", "method", "bias along the mean gradient (%)"]
    bias = ["bias"] if subject.bias else []
    also = [words for _, words in subject.also]
    return ["clipping", "method", "best lr", subject.words, "better than plain clipping by", *bias, *also]


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
            bias = [str(row.bias or "")] if subject.bias else []
            table.append([*line, *bias, *(_also(summary, row, name) for name, _ in subject.also)])
    return table


def _also(summary: Summary, row: Row, name: str) -> str:
    """The mean of another metric over the seeds, at the best learning rate for the one that counts."""
    records = row.cell.runs[row.cell.lr].values() if row.cell.lr is not None else ()
    seen = [value for each in records if (value := last(summary.epochs(each.spec.id), name)) is not None]
    return f"{statistics.fmean(seen):.3g}" if seen else ""


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


def parts(summary: Summary) -> dict[str, list[list[str]]]:
    """A trial's part of each table of all trials, a line for each region."""
    if summary.subject is None or summary.subject.kind == "frozen":
        return {}
    found = [block for block in blocks(summary) if any(row.scores for row in block.rows)]
    return {
        "policies": [_line(summary, block, POLICIES) for block in found],
        "peers": [line for block in found if any((line := _line(summary, block, PEERS))[5:])],
        "answers": _verdicts(summary),
    }


def together(name: str, given: Iterable[dict[str, list[list[str]]]]) -> list[list[str]]:
    """One of these tables with all trials in it: signal first, corruption last."""
    order = list(KINDS.values())
    return sorted((line for part in given for line in part.get(name, [])), key=lambda line: order.index(line[0]))


HEADS: dict[str, list[str]] = {
    "policies": [*_FIRST, "judged by", PLAIN, *POLICIES],
    "peers": [*_FIRST, "judged by", PLAIN, *PEERS],
    "answers": [*_FIRST, *ASKED],
}
"""Names of their columns."""


def _line(summary: Summary, block: Block, names: Sequence[str]) -> list[str]:
    subject = summary.subject
    assert subject is not None
    plain = block.find(PLAIN)
    cells = []
    for name in names:
        gain = block.over(name)
        cells.append("" if gain is None else f"{MARKS.get(helps(gain, subject.little), '·')} {gain}")
    seen = _metric(summary, plain) if plain else ""
    done, planned = runs_of(row.cell for row in block.rows)
    title = subject.title + ("" if done == planned else " (partial)")
    return [KINDS[subject.kind], title, block.label, subject.words, seen, *cells]


def _verdicts(summary: Summary) -> list[list[str]]:
    found: dict[str, dict[str, str]] = {}
    for answer in answers(summary):
        found.setdefault(answer.region, {})[answer.question] = answer.verdict or ""
    subject = summary.subject
    return [
        [KINDS[subject.kind], subject.title, region, *(said.get(question, "") for question in ASKED)]
        for region, said in found.items()
        if subject is not None
    ]
