"""A study's result as a table for the terminal."""

import re

import rich.table
from rich.console import Console
from rich.measure import Measurement

from carryclip_lab.analysis import rule
from carryclip_lab.analysis.answers import DEFAULT
from carryclip_lab.analysis.kinds import kind_of
from carryclip_lab.analysis.summary import Summary, summaries
from carryclip_lab.analysis.tables import DROP_IN_HEAD
from carryclip_lab.store.store import Store

KEPT = 5
"""Columns of a trial that are always shown: whose runs, and what they are judged by."""
ROOMY = 1000
"""A width that no table reaches."""


def table(summary: Summary, width: int = ROOMY) -> rich.table.Table:
    """What the study's kind has to show, under the name of its data.

    Numbers are never cut. On a narrow terminal optimizer and clipping head a block of lines, and columns that do not
    fit are named below the table.
    """
    heads, lines, note = kind_of(summary).table(summary)
    lines = [[word.removesuffix(" reached") for word in line] for line in lines]  # which the note says
    whole = _drawn(summary.described, heads, lines, note)
    if summary.subject is None or heads[1] != "clipping" or _width(whole) <= width:
        return whole
    # What the default does at plain clipping's own rate is what most readers ask, so it goes last.
    leaving = sorted(range(KEPT, len(heads)), key=lambda k: (heads[k] == DROP_IN_HEAD, -k))
    shown = list(range(len(heads)))
    while True:
        left_out = [heads[k] for k in range(len(heads)) if k not in shown]
        said = [note] if note else []
        if left_out:
            said.append(f"In the report, and on a wider terminal: {', '.join(left_out)}.")
        picked = [[line[k] for k in shown] for line in lines]
        narrow = _in_blocks(summary.described, [heads[k] for k in shown], picked, " ".join(said))
        if _width(narrow) <= width or not leaving:
            return narrow
        shown.remove(leaving.pop(0))


def _drawn(title: str, heads: list[str], lines: list[list[str]], note: str) -> rich.table.Table:
    shown = rich.table.Table(title=title, caption=note or None)
    shown.title_justify = shown.caption_justify = "left"
    for head in heads:
        numbers = head.startswith("batch ")
        shown.add_column(
            head, justify="right" if numbers else "left", no_wrap=numbers or head in ("optimizer", "clipping")
        )
    for line in lines:
        shown.add_row(*line)
    return shown


def _in_blocks(title: str, heads: list[str], lines: list[list[str]], note: str) -> rich.table.Table:
    """The first two columns as a line above those that share them."""
    shown = _drawn(title, heads[2:], [], note)
    block = None
    for line in lines:
        if line[:2] != block:
            block = line[:2]
            shown.add_section()
            shown.add_row(", ".join(block), style="bold")
        shown.add_row(*line[2:])
    for column in shown.columns:
        column.min_width = _longest([str(column.header), *map(str, column.cells)])
    return shown


def _width(shown: rich.table.Table) -> int:
    """How wide a table must be so that nothing is broken but heads, and numbers before their intervals."""
    words = rich.table.Table(box=shown.box)
    for column in shown.columns:
        parts = [part for cell in column.cells for part in re.split(r" (?=[(\[])", str(cell))]
        words.add_column("-" * max(_longest([str(column.header)]), *map(len, parts)), no_wrap=True)
    console = Console(width=ROOMY)
    return Measurement.get(console, console.options, words).maximum


def _longest(texts: list[str]) -> int:
    """The length of the longest word."""
    return max((len(word) for text in texts for word in text.split()), default=0)


def verdicts(store: Store, study: str, rules: str | None) -> list[str]:
    """What follows from a study by the rules that it names; nothing if it names none."""
    if rules is None:
        return []
    said = rule.told(summaries(store, study), rule.read(rules), DEFAULT)
    if not said["lines"]:
        return []
    lines = [f"{family}: {words}" for family, _, words, _ in said["families"]]
    if not said["compared"]:  # a smoke tier has a few of the carries
        return lines
    picked = said["default"] or "none of the carries"
    return [*lines, f"By the rules of {study} the default is {picked}."]
