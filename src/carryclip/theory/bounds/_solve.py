"""Numerical roots that err on the safe side, and the sums behind the random-walk bounds; vectorised."""

import math
from collections.abc import Callable

import numpy as np

from carryclip.theory.bounds._conditions import Array

ROUNDS = 200
TERMS = 4096
"""Largest number of terms added at once."""

erfc = np.frompyfunc(math.erfc, 1, 1)


def last_true(holds: Callable[[np.ndarray], np.ndarray], low: Array, high: Array) -> np.ndarray:
    """The largest number known to satisfy a condition that holds at ``low``, fails at ``high``, and switches once."""
    low, high = (np.array(x, float) for x in np.broadcast_arrays(low, high))
    for _ in range(ROUNDS):
        middle = low + (high - low) / 2.0
        good = holds(middle)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
        if np.all(high - low <= 1e-13 * high):
            break
    return low


def lowest(function: Callable[[np.ndarray], np.ndarray], low: Array, high: Array, points: int = 256) -> np.ndarray:
    """The smallest value found over a geometric grid between ``low`` and ``high``, refined twice around the best.

    For bounds with a free parameter: each value of it gives a valid bound, so the search need not be exact.
    """
    low, high = (np.asarray(x, float)[..., None] for x in np.broadcast_arrays(low, high))
    best = np.asarray(0.0)
    for _ in range(3):
        grid = low * (high / low) ** np.linspace(0.0, 1.0, points)
        values = function(grid)
        place = np.argmin(values, axis=-1)[..., None]
        best = np.take_along_axis(values, place, -1)[..., 0]
        low = np.take_along_axis(grid, np.maximum(place - 1, 0), -1)
        high = np.take_along_axis(grid, np.minimum(place + 1, points - 1), -1)
    return best


def sum_over_steps(
    term: Callable[[np.ndarray], np.ndarray], count: Array, rest: Callable[[np.ndarray], Array]
) -> Array:
    """Sum of term(j) over j = 1..count, where ``rest(n)`` bounds what comes after n; stops once that is negligible.

    ``term`` gets j along a new last axis.
    """
    count = np.asarray(count, float)
    total = np.zeros(count.shape)
    start, size = 0, 64
    while True:
        j = np.arange(start + 1, start + size + 1, dtype=float)
        total = total + np.sum(np.where(j <= count[..., None], term(j), 0.0), axis=-1)
        start += size
        left = np.where(count <= start, 0.0, rest(np.asarray(float(start))))
        if np.all(left <= 1e-12 * total) or np.all(count <= start):
            return total + left
        size = min(2 * size, TERMS)
