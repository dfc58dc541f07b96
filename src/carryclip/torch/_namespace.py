"""PyTorch under the names the algorithm uses: array functions, and sums over arrays."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from carryclip._numpy import NumpyNamespace

LONG = 1024
"""Entries from which it pays to add up squares by rows."""
ROW = 256


def squared_norm(vector: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a vector, as a float64 scalar, to a few units in the last place however long it is.

    Rows are short enough for their own type, and their squares are added up in float64 and by halves: ``torch.dot``
    adds in long chains, and is off by 1e-4 for a million float32 entries.
    """
    count = vector.numel()
    if count < LONG or vector.dtype == torch.float64:
        entries = vector.double()
        return (entries * entries).sum()
    whole = count - count % ROW
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, ROW), dim=1).double()
    total = (rows * rows).sum()
    if whole == count:
        return total
    rest = vector[whole:].double()
    return total + (rest * rest).sum()


def row_squares(rows: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row of a matrix, in its own type, to a few units in the last place.

    ``vector_norm`` needs no array in between, and is accurate enough by itself up to some thousand entries; longer rows
    are cut like vectors.
    """
    count, width = rows.shape
    if width <= 16 * ROW or rows.dtype == torch.float64:
        return torch.linalg.vector_norm(rows, dim=1).square()
    if width % ROW:
        return (rows * rows).sum(1)
    parts = torch.linalg.vector_norm(rows.view(count, -1, ROW), dim=2)
    return (parts * parts).sum(1)


class TorchNamespace:
    """The array functions ``carryclip.algorithm`` needs; everything stays on the tensors' device."""

    where = staticmethod(torch.where)
    clip = staticmethod(torch.clip)
    abs = staticmethod(torch.abs)
    sign = staticmethod(torch.sign)
    sqrt = staticmethod(torch.sqrt)
    floor = staticmethod(torch.floor)
    expm1 = staticmethod(torch.expm1)
    lerp = staticmethod(torch.lerp)
    sum = staticmethod(torch.sum)
    isfinite = staticmethod(torch.isfinite)
    finfo = staticmethod(torch.finfo)
    maximum = staticmethod(torch.maximum)
    max = staticmethod(torch.amax)
    float32 = torch.float32

    @staticmethod
    def sort(values: torch.Tensor) -> torch.Tensor:
        """Each row in order, the smallest first."""
        return torch.sort(values).values

    @staticmethod
    def arange(count: int, like: torch.Tensor) -> torch.Tensor:
        """The numbers from 0 on, where ``like`` is and in its type."""
        return torch.arange(count, dtype=like.dtype, device=like.device)

    @staticmethod
    def plus(x: torch.Tensor, y: torch.Tensor, factor: Any) -> torch.Tensor:
        """The sum x + factor·y."""
        return x + y * factor

    @staticmethod
    def weighted(x: torch.Tensor, a: Any, y: torch.Tensor, b: Any) -> torch.Tensor:
        """The sum x·a + y·b."""
        return x * a + y * b

    @classmethod
    def between(cls, x: torch.Tensor, a: Any, y: torch.Tensor, weight: Any, scale: Any) -> torch.Tensor:
        """The vector (1 - weight)·a·x + weight·y, times ``scale``; where all else is 1 and x is y, that is x."""
        return cls.lerp(x * a, y, weight) * scale

    @staticmethod
    def size(values: torch.Tensor) -> float:
        """The number of entries."""
        return float(values.numel())

    @staticmethod
    def vector(values: Iterable[Any], like: torch.Tensor) -> torch.Tensor:
        """Numbers and scalars as a vector, where ``like`` is and in its type."""
        listed = list(values)
        if all(isinstance(value, (int, float)) for value in listed):
            return constant([_fitted(value, like.dtype) for value in listed], like.device, like.dtype)
        return torch.cat([_row(value, like) for value in listed])

    @staticmethod
    def full(count: int, value: Any, like: torch.Tensor) -> torch.Tensor:
        """A vector of equal numbers, where ``like`` is and in its type."""
        if isinstance(value, torch.Tensor):
            return _row(value, like).expand(count)
        return torch.full((count,), _fitted(value, like.dtype), device=like.device, dtype=like.dtype)

    @staticmethod
    def concat(values: Iterable[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Vectors end to end."""
        return torch.cat([_row(value, like) for value in values])

    @staticmethod
    def total(values: Iterable[Any]) -> Any:
        """The sum of a list of scalars."""
        listed = list(values)
        tensors = [value for value in listed if isinstance(value, torch.Tensor)]
        numbers = sum(value for value in listed if not isinstance(value, torch.Tensor))
        return torch.stack(tensors).sum() + numbers if tensors else numbers

    @staticmethod
    def allfinite(values: torch.Tensor) -> torch.Tensor:
        """Whether every entry is finite: smallest and largest tell (NaN is both), in one pass without temporaries."""
        low, high = torch.aminmax(values)
        return torch.isfinite(low) & torch.isfinite(high)

    @staticmethod
    def inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The sum of x·y; between vectors without an array in between, which a compiler does not make anyway."""
        if torch.compiler.is_compiling():
            # On the CPU compiled loops add up in long chains, which float64 forgives and memory hides the cost of.
            return torch.sum(x * y, dtype=torch.float64).to(x.dtype) if x.is_cpu else torch.sum(x * y)
        if x is y and x.dim() == 1 and x.is_contiguous():
            return squared_norm(x).to(x.dtype)
        return torch.sum(x * y)

    @staticmethod
    def sums(terms: Iterable[Any], *, largest: bool) -> list[torch.Tensor]:
        """The sum of each array or product of two, or of the last its maximum if ``largest``."""
        return one_by_one(TorchNamespace, terms, largest=largest)

    @staticmethod
    def as_bits(values: torch.Tensor) -> torch.Tensor:
        """The bits of float32 numbers, as integers."""
        return values.view(torch.int32)

    @staticmethod
    def from_bits(bits: torch.Tensor) -> torch.Tensor:
        """The float32 numbers that have these bits."""
        return bits.view(torch.float32)

    @staticmethod
    def positions(values: torch.Tensor) -> torch.Tensor:
        """Each entry's number."""
        return torch.arange(values.numel(), dtype=torch.int32, device=values.device).view(values.shape)

    @staticmethod
    def astype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``values`` in ``dtype``; the same tensor if it has it already."""
        return values.to(dtype)


class RowsNamespace(TorchNamespace):
    """The same, but with a sum for each part of an array along ``axis``; None: one sum, as a vector of one."""

    def __init__(self, axis: int | None) -> None:
        self.axis = axis

    def _added(self, values: torch.Tensor) -> torch.Tensor:
        if self.axis is None:
            return torch.sum(values).reshape(1)
        others = [k for k in range(values.dim()) if k != self.axis]
        return torch.sum(values, others)

    def inner(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The sum of x·y in each part."""
        return self._added(x * y)

    def squares(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of squares in each part, without an array in between."""
        if self.axis is None:
            return torch.linalg.vector_norm(values).reshape(1).square()
        others = [k for k in range(values.dim()) if k != self.axis]
        return torch.linalg.vector_norm(values, dim=others).square()

    def sums(self, terms: Iterable[Any], *, largest: bool) -> list[torch.Tensor]:  # type: ignore[override]
        """The sum of each product of two arrays, in each part."""
        assert not largest
        return [self.inner(*term) for term in terms]

    def size(self, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The number of entries of each part."""
        parts = 1 if self.axis is None else values.shape[self.axis]
        return torch.full((parts,), values.numel() / max(parts, 1), device=values.device)


def one_by_one(xp: Any, terms: Iterable[Any], *, largest: bool) -> list[Any]:
    """The ``sums`` of a namespace: each term is made when it is asked for, and let go before the one after the next."""

    def total(term: Any) -> Any:
        return xp.inner(*term) if isinstance(term, tuple) else xp.sum(term)

    found: list[Any] = []
    last: Any = None
    for term in terms:
        if last is not None:
            found.append(total(last))
        last = term
    return [*found, xp.max(last) if largest else total(last)]


def _row(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A number, a scalar or a vector as a vector, without a copy from the host."""
    if isinstance(value, torch.Tensor):
        return value.to(like.device, like.dtype, non_blocking=True).reshape(-1)
    return torch.full((1,), _fitted(value, like.dtype), device=like.device, dtype=like.dtype)


def _fitted(value: float, dtype: torch.dtype) -> float:
    """A number too large for the type as infinity, which torch would refuse to make of it."""
    return value if value != value or abs(value) <= torch.finfo(dtype).max else math.copysign(math.inf, value)


_constants: dict[tuple[Any, ...], torch.Tensor] = {}


def constant(values: Iterable[float], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A small tensor that is never written; away from the host it is copied there once, as copying would wait."""
    given = tuple(values)
    if device.type == "cpu":
        return torch.tensor(given, dtype=dtype)
    key = given, device, dtype
    if key not in _constants:
        made = torch.tensor(given, device=device, dtype=dtype)
        if type(made) is not torch.Tensor:  # traced
            return made
        if len(_constants) >= 256:
            _constants.clear()
        _constants[key] = made
    return _constants[key]


xp: Any = TorchNamespace
host_xp: Any = NumpyNamespace
