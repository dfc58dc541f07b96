"""Where a figure can be cut, so that a phone can show its panels below each other instead of side by side."""

import itertools
import re

Box = tuple[float, float, float, float]
"""Left, top, width and height, in units of the figure."""
TITLE, LABELS, NARROW = 22.0, 34.0, 24.0
"""Room for a panel's title above it and for labels below it; a gap below which panels share their labels."""
_AXES = re.compile(r'<g id="axes_\d+">\s*<g id="patch_\d+">\s*<path d="M ([\d. LMz\n-]+)"')


def strips(svg: bytes) -> list[list[Box]]:
    """From top to bottom, what is shown in each line: the legend, then each column of panels.

    A column whose labels are at the first one's left has those beside it. Empty if there is only one column.
    """
    text = svg.decode("utf-8")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    axes = [_box(path) for path in _AXES.findall(text)]
    columns = _columns(axes)
    if size is None or len(columns) < 2:
        return []
    width, height = float(size[1]), float(size[2])
    top = max(0.0, min(y for _, y, _, _ in axes) - TITLE)
    tall = min(height, max(y + h for _, y, _, h in axes) + LABELS) - top
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(columns)]
    shared = min(gaps) < NARROW
    share = 0.5 if shared else 0.2  # of a gap; otherwise most of it is the labels of the next panel
    cuts = [before[1] + share * gap for before, gap in zip(columns, gaps, strict=False)]
    edges = [0.0, *cuts, width]
    lines = [[(left, top, right - left, tall)] for left, right in itertools.pairwise(edges)]
    if shared:
        labels = (0.0, top, columns[0][0], tall)
        lines = [lines[0], *([labels, *line] for line in lines[1:])]
    legend = [[(0.0, 0.0, width, top)]] if top > NARROW / 2 else []
    return [*legend, *lines]


def _box(path: str) -> Box:
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*", path)]
    x, y = numbers[::2], numbers[1::2]
    return min(x), min(y), max(x) - min(x), max(y) - min(y)


def _columns(axes: list[Box]) -> list[tuple[float, float]]:
    """Left and right of each column: axes above each other are one."""
    found: list[tuple[float, float]] = []
    for x, _, width, _ in sorted(axes):
        if found and x < found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], x + width))
        else:
            found.append((x, x + width))
    return found
