"""Which carry is the default, and what is said of it: by rules that were written down before the runs were made.

The rules are a file that a study names. Here they are read and applied; no number of theirs stands in this code.
"""

import functools
import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from carryclip_lab.analysis.answers import keeps_up
from carryclip_lab.analysis.compare import Effect
from carryclip_lab.analysis.naming import CLIP, NONE, Method
from carryclip_lab.analysis.summary import Summary, runs_of
from carryclip_lab.analysis.worth import Block, blocks
from carryclip_lab.checks import check_keys
from carryclip_lab.spec import policy_of
from carryclip_lab.task import Judged

Word = Literal["wins", "wins in part", "costs", "mixed", "keeps up", "nothing seen"]


@dataclass(frozen=True)
class Rules:
    """What was fixed before.

    Attributes:
        candidates: policies of which one is the default.
        exempt: titles of trials in which the default may lose to plain clipping.
        margins: by metric, the difference that nobody would care about.
        perfect: by metric, the value that cannot be bettered.
        families: by name, the titles of trials that are spoken of together.
        controls: by the title of a trial, that of its twin where there is nothing to win.
    """

    candidates: tuple[Method, ...]
    exempt: frozenset[str]
    margins: Mapping[str, float]
    perfect: Mapping[str, float]
    families: Mapping[str, Sequence[str]]
    controls: Mapping[str, str]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Rules":
        """From what the file says."""
        check_keys("rules", given, ["candidates", "exempt", "margins", "perfect", "family", "controls"])
        return cls(
            candidates=tuple(Method(policy_of(text)) for text in given["candidates"]),
            exempt=frozenset(given["exempt"]),
            margins=given["margins"],
            perfect=given["perfect"],
            families={family["name"]: tuple(family["trials"]) for family in given["family"]},
            controls=given["controls"],
        )


@functools.cache
def read(name: str) -> Rules:
    """The rules of that name, which ship.

    >>> read("evidence").margins["validation_loss"]
    0.01
    """
    text = (resources.files("carryclip_lab") / "rules" / f"{name}.toml").read_text(encoding="utf-8")
    return Rules.of(tomllib.loads(text))


@dataclass(frozen=True)
class Line:
    """One trial with one optimizer in one region, all of its runs done."""

    subject: Judged
    block: Block
    margin: float

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.subject.title} ({self.block.stepped_by})"

    def same(self, method: Method) -> Effect | None:
        """A method against plain clipping, at plain clipping's best rate."""
        return self.block.drop_in(method)

    def better(self, method: Method) -> bool:
        """Surely, and by more than the margin."""
        effect = self.same(method)
        return effect is not None and effect.low > 0.0 and effect.value > self.margin

    def worse(self, method: Method) -> bool:
        """The same the other way round; a method that came to nothing is worse."""
        effect = self.same(method)
        return effect is not None and effect.high < 0.0 and -effect.value > self.margin

    def won_back(self, method: Method, perfect: float) -> float | None:
        """The part of plain clipping's error that is gone, at worst -1."""
        effect, plain = self.same(method), self.block.find(CLIP)
        if effect is None or plain is None or not plain.seen:
            return None
        error = abs(statistics.fmean(plain.seen) - perfect)
        return max(effect.value / error, -1.0) if error > 0.0 else None


def lines(parts: Iterable[Summary], rules: Rules) -> list[Line]:
    """Of all trials that are learnt from, but for those whose runs are not all done."""
    found = []
    for part in parts:
        subject = part.subject
        if subject is None:
            continue
        for block in blocks(part):
            done, planned = runs_of(row.cell for row in block.rows)
            if done == planned:
                found.append(Line(subject, block, rules.margins[subject.metric]))
    return found


def harms(found: Iterable[Line], rules: Rules, method: Method) -> list[Line]:
    """Lines in which a method is surely worse than plain clipping, where it must not be."""
    return [line for line in found if line.subject.title not in rules.exempt and line.worse(method)]


def won_back(found: Iterable[Line], rules: Rules, method: Method) -> float:
    """The mean part of plain clipping's error that is gone where large gradients are signal."""
    parts = [
        part
        for line in found
        if line.subject.kind == "signal" and line.subject.metric in rules.perfect
        if (part := line.won_back(method, rules.perfect[line.subject.metric])) is not None
    ]
    return statistics.fmean(parts) if parts else math.nan


def default(found: Sequence[Line], rules: Rules) -> Method | None:
    """The candidate that harms nowhere and wins most back; None if all of them harm, or were not all tried.

    What they win back is compared over the lines in which all of them have been run.
    """
    alike = common(found, rules)
    if not alike:
        return None
    safe = [method for method in rules.candidates if not harms(found, rules, method)]
    return max(safe, key=lambda method: won_back(alike, rules, method), default=None)


def common(found: Iterable[Line], rules: Rules) -> list[Line]:
    """Lines in which all candidates have been run."""
    return [line for line in found if all(line.same(method) is not None for method in rules.candidates)]


@dataclass(frozen=True)
class Verdict:
    """What a method does to a family of trials."""

    family: str
    trials: tuple[str, ...]
    """Titles of those that have lines."""
    word: Word
    lines: int
    better: int
    worse: int
    gone: float
    """The mean part of plain clipping's error that is gone; NaN where that is not known."""
    than_none: tuple[int, int]
    """Lines in which it is surely better, and surely worse, than no clipping, each at its own best rate."""


def verdicts(found: Sequence[Line], rules: Rules, method: Method) -> list[Verdict]:
    """Of every family that has lines."""
    told = []
    for family, titles in rules.families.items():
        mine = [line for line in found if line.subject.title in titles and line.same(method) is not None]
        if not mine:
            continue
        better, worse = (sum(getattr(line, side)(method) for line in mine) for side in ("better", "worse"))
        safe = all(keeps_up(line.same(method), line.margin) == "yes" for line in mine)
        word = word_of(len(mine), better, worse, safe=safe)
        seen = tuple(dict.fromkeys(line.subject.title for line in mine))
        gone, than_none = won_back(mine, rules, method), _than_none(mine, method)
        told.append(Verdict(family, seen, word, len(mine), better, worse, gone, than_none))
    return told


def word_of(count: int, better: int, worse: int, *, safe: bool) -> Word:
    """The rule behind the word.

    >>> word_of(4, 2, 0, safe=True), word_of(4, 0, 1, safe=False), word_of(4, 0, 0, safe=True)
    ('wins', 'costs', 'keeps up')
    """
    if worse:
        return "mixed" if better else "costs"
    if better:
        return "wins" if 2 * better >= count else "wins in part"
    return "keeps up" if safe else "nothing seen"


def _than_none(found: Iterable[Line], method: Method) -> tuple[int, int]:
    gains = [(line.block.over(method, NONE), line.margin) for line in found]
    better = sum(gain is not None and gain.low > 0.0 and gain.value > margin for gain, margin in gains)
    worse = sum(gain is not None and gain.high < 0.0 and -gain.value > margin for gain, margin in gains)
    return better, worse


@dataclass(frozen=True)
class Edge:
    """A method whose best learning rate is the first or the last of its list: another one might be better still."""

    line: str
    method: str
    lr: float
    side: Literal["low", "high"]


def edges(parts: Iterable[Summary]) -> list[Edge]:
    """All of them, but for methods that come to nothing at every rate or do not depend on it."""
    found = []
    for part in parts:
        for block in blocks(part):
            for row in block.rows:
                rates = sorted(row.cell.runs)
                lr = row.cell.lr
                if lr is None or lr not in (rates[0], rates[-1]) or not row.seen:
                    continue
                side: Literal["low", "high"] = "low" if lr == rates[0] else "high"
                found.append(Edge(f"{block.subject.title} ({block.stepped_by})", row.name, lr, side))
    return found


# ---------------------------------------------------------------------- in words


PHRASES: Mapping[Word, str] = {
    "wins": "the default wins back what clipping takes",
    "wins in part": "the default wins back some of what clipping takes",
    "costs": "the default costs; plain clipping is better",
    "mixed": "the default wins in some trials and costs in others",
    "keeps up": "the default is as good as plain clipping, and there is nothing to win",
    "nothing seen": "no difference between the default and plain clipping was seen",
}
"""What each word means to who has to choose."""


def sentence(verdict: Verdict) -> str:
    """A family's verdict with the numbers behind it."""
    said = f"{PHRASES[verdict.word]}: surely better in {verdict.better} and surely worse in {verdict.worse} of "
    said += f"{verdict.lines} comparisons"
    if verdict.better and not math.isnan(verdict.gone):  # else it is noise
        said += f", {verdict.gone:.0%} of plain clipping's error gone"
    better, worse = verdict.than_none
    return f"{said}. The default against no clipping, each at its best rate: better in {better}, worse in {worse}."


def controlled(found: Sequence[Line], rules: Rules) -> list[tuple[str, str, str]]:
    """Every win of a candidate over plain clipping that is not seen to be absent from the trial's twin.

    (line, method, why): the twin has no such line, was not run, or the candidate is surely better there too.
    """
    places = {(line.subject.title, line.block.optimizer): line for line in found}
    open_ends = []
    for line in found:
        for method in rules.candidates:
            if not line.better(method):
                continue
            twin = places.get((rules.controls.get(line.subject.title, ""), line.block.optimizer))
            if twin is None:
                open_ends.append((line.name, method.label, "no control"))
            elif twin.same(method) is None:
                open_ends.append((line.name, method.label, f"not run in {twin.subject.title}"))
            elif twin.better(method):
                open_ends.append((line.name, method.label, f"wins in {twin.subject.title} as well"))
    return open_ends


def told(parts: Sequence[Summary], rules: Rules, method: Method) -> dict[str, Any]:
    """All that the rules say of a study, for a page or a file; ``method`` is the default as it is."""
    found = lines(parts, rules)
    chosen = default(found, rules)
    alike = common(found, rules)
    candidates = []
    for each in (*rules.candidates, NONE):  # no clipping is none, and stands beside them
        bad, tried = harms(found, rules, each), sum(line.same(each) is not None for line in found)
        gone = won_back(alike, rules, each)
        part = "" if math.isnan(gone) else f"{gone:.0%}"
        candidates.append([each.words, f"{len(bad)} of {tried}", ", ".join(line.name for line in bad), part])
    return {
        "lines": len(found),
        "compared": len(alike),
        "default": None if chosen is None else chosen.label,
        "confirmed": chosen == method,
        "candidates": candidates,
        "families": [
            [each.family, each.word, sentence(each), ", ".join(each.trials)] for each in verdicts(found, rules, method)
        ],
        "uncontrolled": [list(each) for each in controlled(found, rules)],
        "edges": [[each.line, each.method, f"{each.lr:g}", each.side] for each in edges(parts)],
    }
