"""PyTorch under the names the algorithm uses."""

from collections.abc import Iterable
from typing import Any

import torch


class TorchNamespace:
    """The array functions ``carryclip.algorithm`` needs; everything stays on the tensors' device."""

    where = staticmethod(torch.where)
    clip = staticmethod(torch.clip)
    abs = staticmethod(torch.abs)
    sign = staticmethod(torch.sign)
    sqrt = staticmethod(torch.sqrt)
    expm1 = staticmethod(torch.expm1)
    sum = staticmethod(torch.sum)
    isfinite = staticmethod(torch.isfinite)
    finfo = staticmethod(torch.finfo)

    @staticmethod
    def allfinite(values: torch.Tensor) -> torch.Tensor:
        """Whether every entry is finite: smallest and largest tell (NaN is both), in one pass without temporaries."""
        low, high = torch.aminmax(values)
        return torch.isfinite(low) & torch.isfinite(high)

    @staticmethod
    def sums(arrays: Iterable[torch.Tensor], *, largest: bool) -> list[torch.Tensor]:
        """The sum of each array, or of the last its maximum if ``largest``; each is made, reduced and let go."""
        found: list[torch.Tensor] = []
        waiting: torch.Tensor | None = None
        for array in arrays:
            found += [] if waiting is None else [torch.sum(waiting)]
            waiting = array
        assert waiting is not None
        return [*found, torch.amax(waiting) if largest else torch.sum(waiting)]

    @staticmethod
    def astype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``values`` in ``dtype``; the same tensor if it has it already."""
        return values.to(dtype)


xp: Any = TorchNamespace
