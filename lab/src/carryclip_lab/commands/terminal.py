"""A study's result as a table for the terminal."""

from rich.table import Table

from carryclip_lab.analysis import accuracy, tables
from carryclip_lab.analysis.naming import OPTIMIZERS
from carryclip_lab.analysis.summary import Cell, Setting, Summary

MOST = 40
"""Lines beyond which a table helps nobody."""


def table(summary: Summary) -> Table:
    """Epochs to the target at the best learning rate, by setting and batch size; accuracies or effects elsewhere."""
    if summary.task == "imagenet":
        shown = Table(*accuracy.heads(summary), title=summary.described, title_justify="left")
        for line in accuracy.words(summary, accuracy.rows_of(summary)):
            shown.add_row(*line)
        return shown
    if summary.subject is not None:
        return _trial(summary)
    shown = Table(
        title=f"{summary.data}: epochs to {summary.target:.0%}, median (range) over seeds at the best learning rate",
        title_justify="left",
        caption="k of n: only so many seeds reached it",
        caption_justify="left",
    )
    for column in ("optimizer", "clipping"):
        shown.add_column(column, no_wrap=True)
    for batch in summary.batches:
        shown.add_column(f"batch {batch:,}", justify="right", no_wrap=True)
    for row in rows(summary):
        shown.add_row(*(word.removesuffix(" reached") for word in row))
    return shown


def _trial(summary: Summary) -> Table:
    """Methods at their best learning rates, and how they compare with plain clipping."""
    shown = Table(title=summary.described, title_justify="left")
    for head in tables.heads(summary):
        shown.add_column(head)
    for line in tables.words(summary):
        shown.add_row(*line)
    return shown


def rows(summary: Summary) -> list[list[str]]:
    """Optimizer, method, and a word for each batch size."""
    found = []
    for setting in _settings(summary):
        cells = [summary.find(setting.optimizer, setting.region, setting.method, batch) for batch in summary.batches]
        found.append([*_names(setting), *map(_said, cells)])
    return found


def _names(setting: Setting) -> list[str]:
    """Optimizer and method in words."""
    words = [setting.method] if setting.region is None else [setting.method, setting.name.label]
    return [OPTIMIZERS.get(setting.optimizer, setting.optimizer), ", ".join(words)]


def _settings(summary: Summary) -> list[Setting]:
    """In the study's order, the optimizer alone first; only the main region if there are many."""
    found = list(dict.fromkeys(cell.setting for cell in summary.cells))
    if len(found) > MOST:
        found = [setting for setting in found if setting.region in (None, summary.main_region)]
    return sorted(found, key=lambda setting: summary.optimizers.index(setting.optimizer))


def _said(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if not cell.chosen:
        return "not yet"
    if cell.missed:
        return f"{len(cell.chosen) - cell.missed} of {len(cell.chosen)} reached"
    low, high = min(cell.chosen.values()), max(cell.chosen.values())
    return f"{cell.median:g} ({low:g}-{high:g})" if low < high else f"{cell.median:g}"
