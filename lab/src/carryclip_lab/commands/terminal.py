"""A study's result as a table for the terminal."""

import rich.table

from carryclip_lab.analysis import rule
from carryclip_lab.analysis.answers import DEFAULT
from carryclip_lab.analysis.kinds import kind_of
from carryclip_lab.analysis.summary import Summary, summaries
from carryclip_lab.store.store import Store


def table(summary: Summary) -> rich.table.Table:
    """What the study's kind has to show, under the name of its data."""
    heads, lines, note = kind_of(summary).table(summary)
    shown = rich.table.Table(title=summary.described, caption=note or None)
    shown.title_justify = shown.caption_justify = "left"
    for head in heads:
        numbers = head.startswith("batch ")
        shown.add_column(
            head, justify="right" if numbers else "left", no_wrap=numbers or head in ("optimizer", "clipping")
        )
    for line in lines:
        shown.add_row(*(word.removesuffix(" reached") for word in line))  # which the note says
    return shown


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
