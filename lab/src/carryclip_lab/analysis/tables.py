"""Tables of results: epochs to the target, one for each trial, and those of all trials together."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from carryclip_lab.analysis import naming
from carryclip_lab.analysis.answers import BETTER, BIAS, DROP_IN, FULL_BETTER, SAFE, THAN_NONE, answers, helps
from carryclip_lab.analysis.compare import Effect
from carryclip_lab.analysis.naming import CLIP, METHODS, SHRUNK, Method
from carryclip_lab.analysis.summary import Cell, Setting, Summary, runs_of
from carryclip_lab.analysis.worth import Block, Row, Still, blocks, row_name, stills
from carryclip_lab.spec import OPTIMIZERS
from carryclip_lab.store.records import last

MOST = 40
"""Lines beyond which a table of epochs helps nobody."""
DROP_IN_HEAD = "at plain clipping's best lr by"
MARKS = {"yes": "▲", "it hurts": "▼", "no difference": "=", "inconclusive": "·"}
"""Better than plain clipping, worse, the same, not known."""


class Table(NamedTuple):
    """Names of columns, lines of words, and what to say below."""

    heads: list[str]
    lines: list[list[str]]
    note: str = ""


# ---------------------------------------------------------------------- epochs to the target


def of_epochs(summary: Summary) -> Table:
    """A line for every setting, a column for every batch size."""
    lines = []
    for setting in _settings(summary):
        cells = [summary.find(setting.optimizer, setting.region, setting.method, batch) for batch in summary.batches]
        clipping = setting.method.label if setting.region is None else f"{setting.method.label}, {setting.name.label}"
        optimizer = OPTIMIZERS[setting.optimizer]
        lines.append([optimizer, clipping, *map(_epochs, cells)])
    heads = ["optimizer", "clipping", *(f"batch {batch:,}" for batch in summary.batches)]
    note = "epochs at the best learning rate: median (range) over seeds, or how many of the seeds reached the target"
    return Table(heads, lines, note)


def _settings(summary: Summary) -> list[Setting]:
    """In the study's order, the optimizer alone first; only the main region if there are many."""
    found = list(dict.fromkeys(cell.setting for cell in summary.cells))
    if len(found) > MOST:
        found = [setting for setting in found if setting.region in (None, summary.main_region)]
    return sorted(found, key=lambda setting: summary.optimizers.index(setting.optimizer))


def _epochs(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if not cell.chosen:
        return "no run done"
    if cell.missed:
        return f"{len(cell.chosen) - cell.missed} of {len(cell.chosen)} reached"
    low, high = min(cell.chosen.values()), max(cell.chosen.values())
    return f"{cell.median:g} ({low:g}-{high:g})" if low < high else f"{cell.median:g}"


# ---------------------------------------------------------------------- one trial


def of_trial(summary: Summary) -> Table:
    """Methods at their best learning rates, mean and range over seeds; their bias where nothing is learnt."""
    subject = summary.subject
    if subject is None:
        return Table([], [])
    if subject.kind == "frozen":
        heads = ["optimizer", "radius / mean gradient", "method"]
        heads += ["bias along the mean step without clipping (%)", "astray (%)"]
        return Table(heads, [_still(each) for each in stills(summary)])
    heads = ["optimizer", "clipping", "method", "best lr", subject.words]
    heads += ["better than plain clipping by", DROP_IN_HEAD]
    heads += (["bias"] if subject.bias else []) + [words for _, words in subject.also]
    return Table(heads, [_words(summary, block, row) for block in blocks(summary) for row in block.rows])


def _still(each: Still) -> list[str]:
    optimizer = OPTIMIZERS[each.optimizer]
    astray = "" if each.astray is None else f"{100 * each.astray:.1f}"
    return [optimizer, f"{each.radius:g}", each.method.label, _percent(each.share), astray]


def _percent(share: Effect) -> str:
    return f"{100 * share.value:+.1f} [{100 * share.low:+.1f}, {100 * share.high:+.1f}]"


def _words(summary: Summary, block: Block, row: Row) -> list[str]:
    gains = [None, None]
    if not row.is_plain:
        gains = [block.over(row.method, times=row.times), block.drop_in(row.method, row.times)]
    rate = "" if row.cell.lr is None else f"{row.cell.lr:g}"
    line = [block.stepped_by, block.label, row.name, rate, _metric(row)]
    line += ["" if gain is None else gain.as_gain for gain in gains]
    if block.subject.bias:
        line.append(str(row.bias or ""))
    return line + [_also(summary, row, name) for name, _ in block.subject.also]


def _also(summary: Summary, row: Row, name: str) -> str:
    """The mean of another metric over the seeds, at the best learning rate for the one that counts."""
    records = row.cell.runs[row.cell.lr].values() if row.cell.lr is not None else ()
    seen = [value for each in records if (value := last(summary.epochs(each.spec.id), name)) is not None]
    return f"{statistics.fmean(seen):.3g}" if seen else ""


def _metric(row: Row) -> str:
    """Mean and range over seeds; how many came to nothing."""
    if not row.seen:
        return "came to nothing" if row.lost else "no run done"
    told = f"{statistics.fmean(row.seen):.4g} ({min(row.seen):.4g}-{max(row.seen):.4g})"
    return told + (f", {row.lost} came to nothing" if row.lost else "")


# ---------------------------------------------------------------------- all trials together

Column = tuple[Method, float]
"""A method, and its batch size in those of the others."""
POLICIES: list[Column] = [(method, 1.0) for method in METHODS if method != CLIP]
RADII: list[Column] = [
    (Method(carry, radius=rule), 1.0) for rule in ("Quantile(0.9)", "RMS(1.0)") for carry in (False, SHRUNK.carry)
]
"""Radii that follow the gradients, without a carry and with the default."""
PEERS: list[Column] = [
    (CLIP, 4.0),
    *((Method(None, f"{name} loss"), 1.0) for name in ("Huber", "Poisson")),
    *((naming.peer(name), 1.0) for name in naming.PEERS),
    (naming.peer("ZScore", carry=True), 1.0),
]
ASKED = (SAFE, DROP_IN, BETTER, BIAS, THAN_NONE, FULL_BETTER)
KINDS = ("signal", "ordinary", "corruption")
"""What large gradients are, in the order of these tables."""
_FIRST = ("large gradients are", "trial", "optimizer", "clipping")
HEADS: dict[str, list[str]] = {
    "policies": [*_FIRST, "judged by", CLIP.label, *(row_name(*column) for column in POLICIES)],
    "radii": [*_FIRST, "judged by", CLIP.label, *(row_name(*column) for column in RADII)],
    "peers": [*_FIRST, "judged by", CLIP.label, *(row_name(*column) for column in PEERS)],
    "answers": [*_FIRST, *ASKED],
}
"""Names of their columns."""


def parts(summary: Summary) -> dict[str, list[list[str]]]:
    """A trial's part of each table of all trials, a line for each region."""
    found = [block for block in blocks(summary) if any(row.scores for row in block.rows)]
    if not found:
        return {}
    return {
        "policies": [_line(block, POLICIES) for block in found],
        "radii": [line for block in found if any((line := _line(block, RADII))[6:])],
        "peers": [line for block in found if any((line := _line(block, PEERS))[6:])],
        "answers": _verdicts(summary),
    }


def together(name: str, given: Iterable[dict[str, list[list[str]]]]) -> list[list[str]]:
    """One of these tables with all trials in it: signal first, corruption last."""
    return sorted((line for part in given for line in part.get(name, [])), key=lambda line: KINDS.index(line[0]))


def _line(block: Block, columns: Sequence[Column]) -> list[str]:
    """At plain clipping's best rate, with the interval; behind it what each comes to at a rate of its own."""
    subject, plain = block.subject, block.find(CLIP)
    cells = []
    for method, times in columns:
        same, own = block.drop_in(method, times), block.over(method, times=times)
        if same is None or own is None:
            cells.append("")
            continue
        cells.append(f"{_mark(same, subject.little)} {same.as_gain} ({_short(own)})")
    done, planned = runs_of(row.cell for row in block.rows)
    title = subject.title + ("" if done == planned else " (partial)")
    first = [subject.kind, title, block.stepped_by, block.label, subject.words]
    return [*first, _metric(plain) if plain else "", *cells]


def _mark(gain: Effect, little: float) -> str:
    """What is sure and too little to care about is no difference."""
    if -little <= gain.low and gain.high <= little:
        return MARKS["no difference"]
    return MARKS.get(helps(gain, little), "·")


def _short(gain: Effect) -> str:
    return f"{gain.value:+.3g}" if math.isfinite(gain.value) else "nothing"


def _verdicts(summary: Summary) -> list[list[str]]:
    subject, found = summary.subject, dict[tuple[str, str], dict[str, str]]()
    for answer in answers(summary):
        found.setdefault((answer.optimizer, answer.region), {})[answer.question] = answer.verdict or ""
    return [
        [subject.kind, subject.title, *place, *(said.get(question, "") for question in ASKED)]
        for place, said in found.items()
        if subject is not None
    ]
