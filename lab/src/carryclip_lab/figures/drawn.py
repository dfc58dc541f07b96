"""What a figure is: a picture, the sentences below it, and the numbers behind it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from carryclip_lab.analysis.summary import Cell, Summary, runs_of
from carryclip_lab.figures.style import plain


@dataclass
class Drawn:
    """A figure as it is shown."""

    figure: Any
    caption: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """One entry of the table of figures."""

    title: str
    draw: Callable[[Summary], Drawn | None]
    """None if the study has nothing for it."""


def caption(summary: Summary, cells: Iterable[Cell], text: str) -> str:
    """The sentences below a figure: what is seen, of which data, how much of it, and how it is made."""
    done, planned = runs_of(cells)
    size = summary.tier if summary.tier == "paper" else f"{summary.tier}, not the paper's size"
    partial = "" if done == planned else "; partial, so all of it may still change"
    return (
        f"{text} Data: {summary.described}; study {summary.study}, "
        f"tier {size}; {done:,} of {planned:,} runs{partial}. Command: {summary.command}"
    )


def footer(summary: Summary, cells: Iterable[Cell]) -> str:
    """The same inside the picture, for pictures that travel alone."""
    done, planned = runs_of(cells)
    words = [summary.study, summary.data, f"tier {summary.tier}", f"{done:,} of {planned:,} runs"]
    if summary.tier != "paper":
        words[2] += " (not the paper's size)"
    return plain(" · ".join(words + (["PARTIAL"] if done < planned else [])), 160)


def named(cell: Cell) -> dict[str, Any]:
    """The first columns of the numbers behind a figure: which cell they are about."""
    setting = cell.setting
    region = "" if setting.region is None else setting.name.label
    return {"optimizer": setting.optimizer, "region": region, "method": setting.method.label, "batch": cell.batch}


def known(value: float | None) -> float | str:
    """A number for a table, empty where there is none."""
    return "" if value is None or not math.isfinite(value) else value
