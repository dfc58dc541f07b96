"""A study's result as a table for the terminal."""

import math
import statistics

from rich.table import Table

from carryclip.experiments.analysis import accuracy
from carryclip.experiments.analysis.naming import OPTIMIZERS
from carryclip.experiments.analysis.summary import Cell, Setting, Summary

MOST = 40
"""Lines beyond which a table helps nobody."""


def table(summary: Summary) -> Table:
    """Epochs to the target at the best learning rate, by setting and batch size; of ImageNet, accuracies."""
    if summary.task == "imagenet":
        shown = Table(*accuracy.heads(summary), title=summary.described, title_justify="left")
        for line in accuracy.words(summary, accuracy.rows_of(summary)):
            shown.add_row(*line)
        return shown
    if summary.target == math.inf:
        return _metrics(summary)
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


def _metrics(summary: Summary) -> Table:
    """Where there is no target: what was measured at the end, by setting and learning rate."""
    lines = []
    for cell in summary.cells:
        for lr, seeds in cell.runs.items():
            ends = [found[-1].metrics for record in seeds.values() if (found := summary.epochs(record.spec.id))]
            name = (
                cell.setting.method
                if cell.setting.region is None
                else f"{cell.setting.method}, {cell.setting.name.label}"
            )
            lines.append(([cell.setting.optimizer, name, f"{cell.batch:,}", f"{lr:g}"], ends))
    numbers = dict.fromkeys(
        key for _, ends in lines for end in ends for key, value in end.items() if isinstance(value, float)
    )
    heads = ("optimizer", "clipping", "batch", "lr", *numbers)
    shown = Table(*heads, title=f"{summary.described}: medians over seeds at the end", title_justify="left")
    for words, ends in lines:
        found = ([end[key] for end in ends if isinstance(end.get(key), float)] for key in numbers)
        shown.add_row(*words, *(f"{statistics.median(values):.4g}" if values else "" for values in found))
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
