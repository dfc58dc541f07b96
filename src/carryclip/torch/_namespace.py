"""PyTorch under the names the algorithm uses."""

from collections.abc import Iterable
from typing import Any

import torch

from carryclip._numpy import NumpyNamespace

LONG = 1024
"""Entries from which ``torch.dot`` loses more than a few units in the last place: it adds up in long chains."""
ROW = 256


def squared_norm(vector: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a vector, to a few units in the last place however long it is.

    Rows are short enough for float32, and their sum is taken in float64: for a million entries torch.dot is off by
    1e-4.
    """
    count = vector.numel()
    if count < LONG or vector.dtype == torch.float64:
        return torch.dot(vector, vector)
    whole = count - count % ROW
    rows = torch.linalg.vector_norm(vector[:whole].reshape(-1, ROW), dim=1).double()
    rest = vector[whole:].double()
    return (torch.dot(rows, rows) + torch.dot(rest, rest)).to(vector.dtype)


class TorchNamespace:
    """The array functions ``carryclip.algorithm`` needs; everything stays on the tensors' device."""

    where = staticmethod(torch.where)
    clip = staticmethod(torch.clip)
    abs = staticmethod(torch.abs)
    sign = staticmethod(torch.sign)
    sqrt = staticmethod(torch.sqrt)
    expm1 = staticmethod(torch.expm1)
    lerp = staticmethod(torch.lerp)
    sum = staticmethod(torch.sum)
    isfinite = staticmethod(torch.isfinite)
    finfo = staticmethod(torch.finfo)
    float32 = torch.float32

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
        vectors = x.dim() == 1 and x.dtype == y.dtype
        if vectors and (x is y or x.numel() < LONG):
            return squared_norm(x) if x is y else torch.dot(x, y)
        return torch.sum(x * y)

    @staticmethod
    def sums(terms: Iterable[Any], *, largest: bool) -> list[torch.Tensor]:
        """The sum of each array or product of two, or of the last its maximum if ``largest``.

        Each is made, reduced and let go before the next.
        """
        found: list[torch.Tensor] = []
        last: Any = None
        for term in terms:
            found += [] if last is None else [_sum(last)]
            last = term
        return [*found, torch.amax(last) if largest else _sum(last)]

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


def _sum(term: Any) -> torch.Tensor:
    return torch.sum(term) if isinstance(term, torch.Tensor) else TorchNamespace.inner(*term)


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
