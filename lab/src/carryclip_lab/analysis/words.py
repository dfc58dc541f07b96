"""The result of a study in sentences, for readers who want the answer before the figures."""

import math

from carryclip_lab.analysis.naming import CLIP, NONE, Method, region_name
from carryclip_lab.analysis.summary import Cell, Summary

HOW = (
    "Compared at the same optimizer, region and batch size, each method at its best learning rate. One is ahead if "
    "every seed of it needed fewer epochs to the target than every seed of the other."
)


def of_epochs(summary: Summary) -> list[str]:
    """For each method how often it was ahead of plain clipping, and how often behind; then how that is counted.

    A study without plain clipping is compared with no clipping.
    """
    base = CLIP if CLIP in summary.methods else NONE
    told = [said for method in summary.methods if method != base and (said := _told(summary, method, base))]
    return [*told, _how(summary, base)] if told else []


def _told(summary: Summary, method: Method, base: Method) -> str:
    """A method's sentence; empty while runs wait."""
    name = "No clipping" if method == NONE else method.label
    pairs = [(cell, other) for cell, other in _pairs(summary, method, base) if other is not None]
    if not pairs:
        return f"{name}: not compared, as {_words(base)} was not run beside it."
    known = [found for cell, other in pairs if (found := _ahead(cell, other)) is not None]
    if not known:
        return ""
    ahead, behind = known.count(1), known.count(-1)
    same = len(known) - ahead - behind
    among = f"{len(known)} comparison" if len(known) == 1 else f"{len(known)} comparisons"
    said = f"{name}: ahead of {_words(base)} in {ahead} of {among}, behind in {behind}"
    return f"{said}; no clear difference in {same}." if same else f"{said}."


def _pairs(summary: Summary, method: Method, base: Method) -> list[tuple[Cell, Cell | None]]:
    """Cells of a method, each beside that of plain clipping, or of no clipping.

    What has no region, such as a method of one's own, is compared with plain clipping at the main one.
    """
    pairs = []
    for cell in summary.cells:
        setting = cell.setting
        if setting.method == method:
            region = None if base == NONE else setting.region or summary.main_region
            pairs.append((cell, summary.find(setting.optimizer, region, base, cell.batch)))
    return pairs


def _how(summary: Summary, base: Method) -> str:
    """How it is counted, and which plain clipping stands for all where a method has no region."""
    if base == NONE:
        return HOW.replace("optimizer, region and", "optimizer and")
    without = [cell for cell in summary.cells if cell.setting.region is None]
    if len(summary.regions) < 2 or not without:
        return HOW
    return f"{HOW} What has no region is compared with plain clipping at {region_name(summary.main_region).label}."


def _words(base: Method) -> str:
    return "no clipping" if base == NONE else "plain clipping"


def _ahead(cell: Cell, other: Cell) -> int | None:
    """1 if every seed of the first needed fewer epochs, -1 if every seed needed more, else 0; None while runs wait."""
    if cell.partial or other.partial or not cell.chosen or not other.chosen:
        return None
    mine, theirs = cell.chosen.values(), other.chosen.values()
    if max(mine) < min(theirs):
        return 1
    if max(theirs) < min(mine) or (min(mine) == math.inf and max(theirs) < math.inf):
        return -1
    return 0
