"""A study's result as a table for the terminal."""

import rich.table

from carryclip_lab.analysis.kinds import kind_of
from carryclip_lab.analysis.summary import Summary


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
