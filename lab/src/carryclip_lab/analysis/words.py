"""The result of a study in sentences, for readers who want the answer before the figures."""

import math

from carryclip_lab.analysis.naming import CLIP, NONE, Method
from carryclip_lab.analysis.summary import Cell, Summary

HOW = (
    "Compared at the same optimizer, region and batch size, each method at its best learning rate. One is ahead if "
    "every seed of it needed fewer epochs to the target than every seed of the other."
)


def of_epochs(summary: Summary) -> list[str]:
    """For each method how often it was ahead of plain clipping, and how often behind; then how that is counted."""
    told = []
    for method in summary.methods:
        if method == CLIP:
            continue
        found = [_ahead(cell, plain) for cell, plain in _pairs(summary, method)]
        known = [each for each in found if each is not None]
        if known:
            told.append(_sentence(method, known.count(1), known.count(-1), len(known)))
    return [*told, HOW] if told else []


def _sentence(method: Method, ahead: int, behind: int, among: int) -> str:
    name = "No clipping" if method == NONE else method.label
    same = among - ahead - behind
    said = f"{name}: ahead of plain clipping in {ahead} of {among} comparisons, behind in {behind}"
    return f"{said}; no clear difference in {same}." if same else f"{said}."


def _pairs(summary: Summary, method: Method) -> list[tuple[Cell | None, Cell | None]]:
    """Cells of a method beside those of plain clipping; no clipping is compared with the main region's."""
    regions = [summary.main_region] if method == NONE else summary.regions
    return [
        (
            summary.find(optimizer, None if method == NONE else region, method, batch),
            summary.find(optimizer, region, CLIP, batch),
        )
        for optimizer in summary.optimizers
        for region in regions
        for batch in summary.batches
    ]


def _ahead(cell: Cell | None, other: Cell | None) -> int | None:
    """1 if every seed of the first needed fewer epochs, -1 if every seed needed more, else 0; None while runs wait."""
    if cell is None or other is None or cell.partial or other.partial or not cell.chosen or not other.chosen:
        return None
    mine, theirs = cell.chosen.values(), other.chosen.values()
    if max(mine) < min(theirs):
        return 1
    if max(theirs) < min(mine) or (min(mine) == math.inf and max(theirs) < math.inf):
        return -1
    return 0
