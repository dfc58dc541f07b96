"""NumPy under the names the algorithm uses: for a few numbers on the host, and for many runs side by side."""

from typing import Any

import numpy as np


class NumpyNamespace:
    """The array functions ``carryclip.algorithm`` needs to decide and to apply; sums run over whole arrays."""

    where = staticmethod(np.where)
    clip = staticmethod(np.clip)
    abs = staticmethod(np.abs)
    sign = staticmethod(np.sign)
    sqrt = staticmethod(np.sqrt)
    floor = staticmethod(np.floor)
    sort = staticmethod(np.sort)
    expm1 = staticmethod(np.expm1)
    sum = staticmethod(np.sum)
    isfinite = staticmethod(np.isfinite)
    finfo = staticmethod(np.finfo)
    maximum = staticmethod(np.maximum)
    max = staticmethod(np.max)

    vector = staticmethod(np.array)

    @staticmethod
    def full(count: int, value: float, like: Any) -> np.ndarray:
        """A vector of equal numbers."""
        return np.full(count, value)

    @staticmethod
    def concat(values: list[Any], like: Any) -> np.ndarray:
        """Vectors end to end."""
        return np.concatenate(values)

    @staticmethod
    def added_at(vector: np.ndarray, numbers: np.ndarray, values: Any) -> np.ndarray:
        """The vector with values added to the entries with these numbers, each of which occurs once."""
        found = vector.copy()
        found[numbers] += values
        return found

    @staticmethod
    def total(values: list[Any]) -> Any:
        """The sum of a list of numbers."""
        return sum(values)

    @staticmethod
    def allfinite(values: np.ndarray) -> Any:
        """Whether every entry is finite."""
        return np.isfinite(values).all()

    @staticmethod
    def arange(count: int, like: np.ndarray) -> np.ndarray:
        """The numbers from 0 on, in the type of ``like``."""
        return np.arange(count, dtype=like.dtype)

    @staticmethod
    def size(values: np.ndarray) -> float:
        """The number of entries."""
        return float(values.size)

    @staticmethod
    def lerp(start: Any, end: Any, weight: float) -> Any:
        """The point a part ``weight`` of the way from start to end."""
        return start + weight * (end - start)

    @staticmethod
    def plus(x: Any, y: Any, factor: Any) -> Any:
        """The sum x + factor·y."""
        return x + factor * y

    @staticmethod
    def weighted(x: Any, a: Any, y: Any, b: Any) -> Any:
        """The sum x·a + y·b."""
        return x * a + y * b

    @classmethod
    def between(cls, x: Any, a: Any, y: Any, weight: float, scale: Any) -> Any:
        """The vector (1 - weight)·a·x + weight·y, times ``scale``; where all else is 1 and x is y, that is x."""
        return cls.lerp(x * a, y, weight) * scale

    @staticmethod
    def inner(x: np.ndarray, y: np.ndarray) -> Any:
        """The sum of x·y."""
        return np.sum(x * y)

    @staticmethod
    def astype(values: Any, dtype: Any) -> Any:
        """``values`` in ``dtype``; the same array if it has it already."""
        return values.astype(dtype, copy=False)


class LanesNamespace(NumpyNamespace):
    """Independent runs side by side: the last axis holds a run's coordinates, and sums run along it alone."""

    @staticmethod
    def inner(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The sum of x·y in each run, with an axis of one left to broadcast by."""
        return np.einsum("...i,...i->...", x, y)[..., None]
