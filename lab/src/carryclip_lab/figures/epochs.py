"""Epochs to the target against batch size: the paper's figure 5 at norm 0.5, and all regions of its appendix."""

from collections.abc import Sequence

from carryclip_lab.analysis.naming import Kind, region_name, region_order
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures.lines import (
    Line,
    batch_axis,
    cell_row,
    cells_of,
    draw_lines,
    draw_strip,
    epochs_axis,
    legend_of,
    lines_of,
    strip_height,
)
from carryclip_lab.figures.sheet import Drawn, sheet
from carryclip_lab.spec import OPTIMIZERS

SMALL = 100
"""The largest of the paper's small batches."""
HOW = (
    "Lines: median over seeds at the best learning rate; bars: smallest to largest. A point is drawn only if all seeds "
    "reached the target; the strips count those that did not (? if some have not run). It is hollow if other learning "
    "rates have not run yet."
)
Grid = list[list[tuple[str, list[Line]]]]
"""The panels by row and column: title and lines."""


def main_region(summary: Summary) -> Drawn | None:
    """One column per optimizer; a second row for small batches, if there are enough."""
    region = summary.main_region
    if region is None:
        return None
    views = [view for view in (summary.batches, _zoomed(summary)) if view]
    grid = []
    for view, what in zip(views, ("", ", small batches"), strict=False):
        names = [OPTIMIZERS[name] + what for name in summary.optimizers]
        lines = [lines_of(summary, name, [region], view) for name in summary.optimizers]
        grid.append(list(zip(names, lines, strict=True)))
    what = f"Epochs to {100 * summary.target:g} % train accuracy against batch size, {region_name(region).label}"
    return _draw(summary, grid, views, f"{what}. {HOW}", size=(3.5, 2.5), left=1.15)


def constant(summary: Summary) -> Drawn | None:
    """Component and norm clipping at every radius; one row per radius, one column per optimizer."""
    return _constant(summary, summary.batches, "")


def constant_small(summary: Summary) -> Drawn | None:
    """The same, only small batches."""
    small = _zoomed(summary)
    return _constant(summary, small, ", small batches") if small else None


def _constant(summary: Summary, batches: Sequence[int], what: str) -> Drawn | None:
    sizes = _regions(summary, ("norm", "component"))
    if sum(map(len, sizes.values())) < 2:
        return None
    grid = [
        [
            (f"{OPTIMIZERS[name]}, radius {size}", lines_of(summary, name, regions, batches))
            for name in summary.optimizers
        ]
        for size, regions in sizes.items()
    ]
    text = f"Constant regions{what}: component and norm clipping with radius {', '.join(sizes)}. {HOW}"
    return _draw(summary, grid, [batches], text)


def adaptive(summary: Summary, optimizer: str) -> Drawn | None:
    """Welford and EWMA at every (a, b); one row each."""
    sizes = _regions(summary, ("Welford", "EWMA"))
    if not sizes or optimizer not in summary.optimizers:
        return None
    kinds = sorted({region_name(region).kind for regions in sizes.values() for region in regions}, reverse=True)
    grid: Grid = []
    for size, regions in sizes.items():
        by_kind = {kind: [region for region in regions if region_name(region).kind == kind] for kind in kinds}
        grid.append(
            [(f"{kind} {size}", lines_of(summary, optimizer, by_kind[kind], summary.batches)) for kind in kinds]
        )
    name = OPTIMIZERS[optimizer]
    text = f"Adaptive regions with {name}: (a, b) = {', '.join(sizes)}, by {' and '.join(kinds)}. {HOW}"
    return _draw(summary, grid, [summary.batches], text)


def _zoomed(summary: Summary) -> list[int]:
    """The small batch sizes, if there are enough of them to be looked at alone."""
    small = [batch for batch in summary.batches if batch <= SMALL]
    return small if 3 <= len(small) < len(summary.batches) else []


def _regions(summary: Summary, kinds: Sequence[Kind]) -> dict[str, list[str]]:
    """The regions of some kinds, by their size in words."""
    chosen = [region for region in summary.regions if region_name(region).kind in kinds]
    found: dict[str, list[str]] = {}
    for region in sorted(chosen, key=lambda each: (region_order(each)[1:], kinds.index(region_name(each).kind))):
        found.setdefault(region_name(region).size, []).append(region)
    return found


def _draw(
    summary: Summary,
    grid: Grid,
    views: Sequence[Sequence[int]],
    text: str,
    *,
    size: tuple[float, float] | None = None,
    left: float = 1.25,
) -> Drawn:
    """One view of the batch sizes for all rows of panels, or one for each; a part of them is shown on a linear axis."""
    columns = range(len(grid[0]))
    size = size or (3.4 if len(columns) > 2 else 4.2, 1.7)
    rows = [[line for _, lines in row for line in lines] for row in grid]
    every = [line for row in rows for line in row]
    cells, legend = cells_of(every), legend_of(every)
    made = sheet(
        summary,
        cells,
        range(len(grid)),
        columns,
        legend=legend.items(),
        size=size,
        strip=strip_height(len(legend)),
        left=left,
        share="all" if len(views) == 1 else "row",
    )
    for row, column, panel in made.each():
        title, lines = grid[row][column]
        draw_lines(panel, lines)
        draw_strip(panel, lines, list(legend))
        panel.axes.set_title(title)
    for panels, row, view in zip(made.panels, rows, views, strict=False):
        batch_axis(panels[0], view, size[0])  # the others share both axes
        epochs_axis(panels[0], cells if len(views) == 1 else cells_of(row), log=view == summary.batches)
    made.label("batch size", f"epochs to {100 * summary.target:g} %")
    return made.drawn(text, [cell_row(cell) for cell in cells])
