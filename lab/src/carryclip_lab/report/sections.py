"""What the page shows of one study: figures on disk and in the page, claims, environment, what went wrong."""

import base64
import gc
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carryclip_lab.analysis.answers import Answer
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.analysis.kinds import kind_of
from carryclip_lab.analysis.summary import Summary, summaries
from carryclip_lab.commands.output import save_figure, save_rows
from carryclip_lab.figures import draw
from carryclip_lab.figures.style import RC
from carryclip_lab.report.panels import strips
from carryclip_lab.store.records import OUTCOMES, Record
from carryclip_lab.store.store import Store

MESSAGES = 20
"""At most so many messages of runs that crashed are shown above the table of runs."""


@dataclass
class Picture:
    """A figure as the page has it."""

    anchor: str
    title: str
    caption: str
    svg: bytes
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def uri(self) -> str:
        """The picture itself, as an address that leads nowhere."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode("ascii")

    @property
    def strips(self) -> str:
        """How a phone shows it in parts, as JSON; empty for a single panel."""
        found = strips(self.svg)
        return json.dumps([[[round(number, 1) for number in box] for box in line] for line in found]) if found else ""

    @property
    def alt(self) -> str:
        """For those who cannot see it: the title and the caption's first sentence."""
        return f"{self.title}. {self.caption.partition('. ')[0]}."

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in CSS pixels, so that the page does not jump when it appears."""
        box = re.search(rb'viewBox="0 0 ([\d.]+) ([\d.]+)"', self.svg)  # in points
        return (round(float(box[1]) * 4 / 3), round(float(box[2]) * 4 / 3)) if box else (960, 540)


@dataclass
class Section:
    """One part of the page: a study on one data set, or the theory."""

    anchor: str
    name: str
    title: str
    tier: str
    data: str = ""
    command: str = ""
    done: int = 0
    planned: int = 0
    outcomes: list[tuple[str, int]] = field(default_factory=list)
    environment: list[tuple[str, str]] = field(default_factory=list)
    crashed: list[tuple[str, str]] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    """A table of results above the figures, and the names of its columns."""
    note: str = ""
    """How the table is to be read."""
    words: list[str] = field(default_factory=list)
    """The result in sentences; the last says how it is counted."""
    answers: list[Answer] = field(default_factory=list)
    """What a trial says to those who ask whether to turn the carry on."""
    trial: bool = False
    lines: dict[str, list[list[str]]] = field(default_factory=dict)
    """Its part of the tables of all trials, by their names."""
    claims: list[Claim] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    @property
    def partial(self) -> bool:
        """Whether runs are missing."""
        return self.done < self.planned


def sections(store: Store, study: str, folder: Path, formats: Sequence[str]) -> list[Section]:
    """All of a study; its figures are written to the folder as well."""
    parts = summaries(store, study)
    gc.freeze()  # figures wake the garbage collector often, and records are many
    try:
        anchors = [slug(study + _told_apart(number, part)) for number, part in enumerate(parts, 1)]
        if len(parts) == 1:
            anchors = [slug(study)]
        return [_section(part, anchor, folder, formats) for part, anchor in zip(parts, anchors, strict=True)]
    finally:
        gc.unfreeze()


def _told_apart(number: int, part: Summary) -> str:
    if kind_of(part).trial:
        return "-" + slug(part.data.lower())
    size = "" if part.examples is None else f"-{part.examples}"
    return f"-{number}-{part.task}{size}-{100 * part.target:g}"


def _section(summary: Summary, anchor: str, folder: Path, formats: Sequence[str]) -> Section:
    records = [record for cell in summary.cells for record in cell.records]
    counts, kind = summary.outcomes, kind_of(summary)
    heads, table, note = kind.table(summary)
    return Section(
        anchor=anchor,
        name=summary.study,
        title=summary.data if kind.trial else summary.title,
        tier=summary.tier,
        data=summary.described,
        command=summary.command,
        done=sum(counts[name] for name in OUTCOMES),
        planned=len(records),
        outcomes=[(name.replace("_", " "), counts[name]) for name in (*OUTCOMES, "running", "waiting") if counts[name]],
        environment=environment(records),
        crashed=crashed(records),
        pictures=_pictures(summary, anchor, folder / "figures" / anchor, formats),
        heads=heads,
        table=table,
        note=note,
        words=kind.words(summary),
        answers=kind.answers(summary),
        trial=kind.trial,
        lines=kind.parts(summary),
        claims=kind.judge(summary),
        records=records,
    )


def _pictures(summary: Summary, anchor: str, place: Path, formats: Sequence[str]) -> list[Picture]:
    """Every figure as files, with its numbers and caption; the picture as SVG is what the page shows."""
    import matplotlib

    place.mkdir(parents=True, exist_ok=True)
    found = []
    for name, entry in kind_of(summary).figures.items():
        drawn = draw(name, summary)
        if drawn is None:
            continue
        with matplotlib.rc_context(RC):
            save_figure(drawn.figure, place, name, list(dict.fromkeys(["svg", *formats])))
        save_rows(drawn.rows, place, name)
        (place / f"{name}.txt").write_text(drawn.caption + "\n", encoding="utf-8")
        svg = (place / f"{name}.svg").read_bytes()
        found.append(Picture(f"{anchor}-{name}", entry.title, drawn.caption, svg, drawn.rows))
    return found


def environment(records: Sequence[Record], most: int = 4) -> list[tuple[str, str]]:
    """What the runs say they ran on: every key with its values."""
    seen: dict[str, dict[str, None]] = {}
    for record in records:
        for key, value in record.environment.items():
            seen.setdefault(str(key), {})[str(value)] = None
    told = []
    for key, values in sorted(seen.items()):
        more = f" and {len(values) - most} more" if len(values) > most else ""
        shown = [value[:12] if key == "commit" else value for value in list(values)[:most]]
        told.append((key, ", ".join(shown) + more))
    return told


def crashed(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Each message of runs that crashed once, with how many runs it befell."""
    found: dict[str, list[str]] = {}
    for record in records:
        if record.outcome == "crashed":
            found.setdefault(record.message or "no message", []).append(record.spec.id)
    told = [
        (f"{len(runs)} runs, first {runs[0]}" if len(runs) > 1 else f"run {runs[0]}", text)
        for text, runs in found.items()
    ]
    return told[:MESSAGES]


def slug(text: str) -> str:
    """A name that is safe in a path and in an address."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "study"
