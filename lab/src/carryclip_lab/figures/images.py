"""ImageNet: the paper's table as a picture."""

from carryclip_lab.analysis.accuracy import is_papers, rows_of, table
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures.sheet import Drawn, sheet
from carryclip_lab.figures.style import Look, looks, plain

THEIRS: Look = {"marker": "d", "markerfacecolor": "none", "color": "0.3", "linestyle": "none"}


def accuracy(summary: Summary) -> Drawn | None:
    """Best top-1 accuracy of every way of clipping, the best on top."""
    rows, own = rows_of(summary), is_papers(summary)
    if not any(row.best for row in rows):
        return None
    given = {method: {**look, "linestyle": "none"} for method, look in looks(summary.methods).items()}
    legend = [(method.label, look) for method, look in given.items()]
    if own:
        legend.append(("the paper", THEIRS))
    made = sheet(summary, summary.cells, [0], [0], legend=legend, size=(4.6, 0.24 * len(rows) + 0.2), left=1.75)
    panel = made.panels[0][0]
    for place, row in enumerate(reversed(rows)):
        if row.median is not None:
            look = given[row.method]
            panel.axes.plot([min(row.best), max(row.best)], [place, place], color=look["color"], linewidth=1.2)
            panel.axes.plot(row.median, place, **look)
        if own and row.paper:
            panel.axes.plot(row.paper[0], place, **THEIRS)
    panel.name_rows([row.name for row in rows])
    panel.axes.set_title(plain(summary.title))
    made.label("best top-1 accuracy over the epochs (%)", "")
    heads, lines, _ = table(summary)
    text = "Best top-1 accuracy over the epochs, by way of clipping: median and range over seeds."
    return made.drawn(text, [dict(zip(heads, line, strict=True)) for line in lines])
