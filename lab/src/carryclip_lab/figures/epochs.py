"""The paper's figure 5: epochs to the target against batch size at norm 0.5."""

from carryclip_lab.analysis.naming import OPTIMIZERS, region_name
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures.drawn import Drawn, caption, footer
from carryclip_lab.figures.lines import (
    batch_axis,
    draw_lines,
    draw_strip,
    epochs_axis,
    legend_of,
    lines_of,
    rows_of,
    strip_height,
)
from carryclip_lab.figures.sheet import sheet

SMALL = 100
"""The largest of the paper's small batches."""


def zoomed(summary: Summary) -> list[int]:
    """The small batch sizes, if there are enough of them to be looked at alone."""
    small = [batch for batch in summary.batches if batch <= SMALL]
    return small if 3 <= len(small) < len(summary.batches) else []


def draw(summary: Summary) -> Drawn | None:
    """One column per optimizer; a second row for small batches, if there are enough."""
    region = summary.main_region
    if region is None:
        return None
    views = [summary.batches] + [small for small in [zoomed(summary)] if small]
    panels = [[lines_of(summary, name, [region], view) for name in summary.optimizers] for view in views]
    cells = [cell for lines in panels[0] for line in lines for cell in line.cells]
    legend = legend_of(panels[0])
    made = sheet(
        len(views),
        len(summary.optimizers),
        legend=legend,
        foot=footer(summary, cells),
        size=(3.5, 2.5),
        strip=strip_height(len(legend)),
        left=1.15,
        share="row",
    )
    for row, view in enumerate(views):
        for column, name in enumerate(summary.optimizers):
            panel, strip = made.panels[row][column], made.strips[row][column]
            draw_lines(panel, panels[row][column])
            panel.grid(axis="y", color="0.92", linewidth=0.6)
            panel.set_axisbelow(True)
            draw_strip(strip, panels[row][column], [label for label, _ in legend], named=column == 0)
            panel.set_title(OPTIMIZERS.get(name, name) + (", small batches" if row else ""))
        batch_axis(made.strips[row][0], view, 3.5)  # the others of the row share it
        shown = [cell for lines in panels[row] for line in lines for cell in line.cells]
        epochs_axis(made.panels[row][0], shown, log=row == 0)
    made.label("batch size", f"epochs to {100 * summary.target:g} %")
    text = (
        f"Epochs to {100 * summary.target:g} % train accuracy against batch size, {region_name(region).label}, at the "
        "learning rate with the smallest median. Lines: median over seeds; bars: smallest to largest. A point is drawn "
        "only if all seeds reached the target; the strip below counts the seeds that did not (? if some have not run). "
        "Hollow points: other learning rates are not done."
    )
    return Drawn(made.figure, caption(summary, cells, text), rows_of(panels[0]))
