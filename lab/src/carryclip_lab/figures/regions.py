"""The appendix: epochs to the target against batch size in every constant and every adaptive region."""

from collections.abc import Sequence

from carryclip_lab.analysis.naming import OPTIMIZERS, Kind, region_name, region_order
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures.drawn import Drawn, caption, footer
from carryclip_lab.figures.epochs import zoomed
from carryclip_lab.figures.lines import (
    Line,
    batch_axis,
    draw_lines,
    draw_strip,
    epochs_axis,
    legend_of,
    lines_of,
    rows_of,
    strip_height,
)
from carryclip_lab.figures.sheet import Sheet, sheet

HOW = (
    "Lines: median over seeds at the best learning rate; bars: smallest to largest; drawn only if all seeds reached "
    "the target, the strips count those that did not (? if some have not run). Hollow: other learning rates not done."
)


def constant(summary: Summary) -> Drawn | None:
    """Component and norm clipping at every radius; one row per radius, one column per optimizer."""
    return _constant(summary, summary.batches, "")


def constant_small(summary: Summary) -> Drawn | None:
    """The same, only small batches."""
    small = zoomed(summary)
    return _constant(summary, small, ", small batches") if small else None


def _constant(summary: Summary, batches: Sequence[int], what: str) -> Drawn | None:
    sizes = _regions(summary, ("norm", "component"))
    if sum(map(len, sizes.values())) < 2:
        return None
    grid = [[lines_of(summary, name, regions, batches) for name in summary.optimizers] for regions in sizes.values()]
    titles = [[f"{OPTIMIZERS.get(name, name)}, radius {size}" for name in summary.optimizers] for size in sizes]
    text = f"Constant regions{what}: component and norm clipping with radius {', '.join(sizes)}. {HOW}"
    return _drawn(summary, grid, titles, batches, text, log=not what)


def adaptive(summary: Summary, optimizer: str) -> Drawn | None:
    """Welford and EWMA at every (a, b); one row each."""
    sizes = _regions(summary, ("Welford", "EWMA"))
    if not sizes or optimizer not in summary.optimizers:
        return None
    kinds = sorted({region_name(region).kind for regions in sizes.values() for region in regions}, reverse=True)
    grid, titles = [], []
    for size, regions in sizes.items():
        by_kind = {kind: [region for region in regions if region_name(region).kind == kind] for kind in kinds}
        grid.append([lines_of(summary, optimizer, by_kind[kind], summary.batches) for kind in kinds])
        titles.append([f"{kind} {size}" for kind in kinds])
    name = OPTIMIZERS.get(optimizer, optimizer)
    text = f"Adaptive regions with {name}: (a, b) = {', '.join(sizes)}, by {' and '.join(kinds)}. {HOW}"
    return _drawn(summary, grid, titles, summary.batches, text)


def _regions(summary: Summary, kinds: Sequence[Kind]) -> dict[str, list[str]]:
    """The regions of some kinds, by their size in words."""
    found: dict[str, list[str]] = {}
    for region in sorted(summary.regions, key=lambda each: region_order(each)[1:]):
        if region_name(region).kind in kinds:
            found.setdefault(region_name(region).size, []).append(region)
    return {
        size: sorted(regions, key=lambda each: kinds.index(region_name(each).kind)) for size, regions in found.items()
    }


def _drawn(
    summary: Summary,
    grid: list[list[list[Line]]],
    titles: list[list[str]],
    batches: Sequence[int],
    text: str,
    *,
    log: bool = True,
) -> Drawn:
    lines = [panel for row in grid for panel in row]
    cells = list(dict.fromkeys(cell for panel in lines for line in panel for cell in line.cells))
    legend = legend_of(lines)
    labels = [label for label, _ in legend]
    width = 3.4 if len(titles[0]) > 2 else 4.2
    made = sheet(
        len(grid),
        len(titles[0]),
        legend=legend,
        foot=footer(summary, cells),
        size=(width, 1.7),
        strip=strip_height(len(labels)),
        left=1.25,
    )
    _fill(made, grid, titles, labels)
    batch_axis(made.strips[0][0], batches, width)  # all the others share it
    epochs_axis(made.panels[0][0], cells, log=log)
    made.label("batch size", f"epochs to {100 * summary.target:g} %")
    rows = {tuple(row.items()): row for row in rows_of(lines)}
    return Drawn(made.figure, caption(summary, cells, text), list(rows.values()))


def _fill(
    made: Sheet,
    grid: list[list[list[Line]]],
    titles: list[list[str]],
    labels: list[str],
) -> None:
    for row, panels in enumerate(grid):
        for column, lines in enumerate(panels):
            panel, strip = made.panels[row][column], made.strips[row][column]
            draw_lines(panel, lines)
            panel.grid(axis="y", color="0.92", linewidth=0.6)
            panel.set_axisbelow(True)
            panel.set_title(titles[row][column])
            draw_strip(strip, lines, labels, named=column == 0)
