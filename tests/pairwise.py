"""Grids too large to run each time: a few cells that still have every pair of values, the others marked ``exhaustive``.

What goes wrong for one value, or for two values together, goes wrong in a cell that ``make test`` runs. What takes
three is found by ``make test-all``, which runs every cell. A test that is marked ``pairwise`` has its parameters
thinned out so, one whose cells are a table of their own takes them from ``cells``.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement
from operator import itemgetter
from typing import Any

import pytest


def covering(cells: Iterable[Sequence[Any]], together: int = 2) -> list[tuple[Any, ...]]:
    """Some of the cells: every two values, at their places, that some cell has together, one of these has too.

    With ``together=1`` every value. Greedy, with values that were chosen less often first, so that none has its only
    cells in one corner; the same in all processes.
    """
    # With replacement: a value is a pair with itself, so that a single axis keeps all of its values.
    unseen = {tuple(cell): set(combinations_with_replacement(enumerate(cell), together)) for cell in cells}
    chosen, uses = [], Counter()
    while unseen:
        best = max(unseen, key=lambda cell: (len(unseen[cell]), -sum(uses[place] for place in enumerate(cell))))
        seen = unseen.pop(best)
        chosen.append(best)
        uses.update(enumerate(best))
        unseen = {cell: pairs - seen for cell, pairs in unseen.items() if not pairs <= seen}
    return chosen


def cells(table: Iterable[Sequence[Any]], quick: Iterable[Sequence[Any]]) -> list[Any]:
    """A table of cells as parameters of a test, those beside the quick ones marked."""
    kept = set(map(tuple, quick))
    rows = map(tuple, table)
    return [pytest.param(*row, marks=() if row in kept else pytest.mark.exhaustive) for row in rows]


def mark_the_others(items: Iterable[pytest.Item]) -> None:
    """Of tests marked ``pairwise``, or ``pairwise(together=1)``: every combination of parameters that is not needed."""
    tests: dict[tuple[str, int], dict[tuple[Any, ...], pytest.Item]] = {}
    numbers: dict[tuple[str, int], int] = {}  # values may be of any kind, so they are told apart as objects
    for item in items:
        mark = item.get_closest_marker("pairwise")
        if mark is not None and isinstance(item, pytest.Function):
            name, _, _ = item.nodeid.partition("[")
            objects = [(axis, id(value)) for axis, value in sorted(item.callspec.params.items(), key=itemgetter(0))]
            combination = tuple(numbers.setdefault(each, len(numbers)) for each in objects)
            tests.setdefault((name, mark.kwargs.get("together", 2)), {})[combination] = item
    for (_, together), combinations in tests.items():
        for combination in combinations.keys() - set(covering(combinations, together)):
            combinations[combination].add_marker(pytest.mark.exhaustive)
