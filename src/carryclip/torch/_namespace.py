"""PyTorch under the names the algorithm uses."""

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
    max = staticmethod(torch.amax)
    isfinite = staticmethod(torch.isfinite)
    finfo = staticmethod(torch.finfo)

    @staticmethod
    def allfinite(values: torch.Tensor) -> torch.Tensor:
        """Whether every entry is finite: smallest and largest tell (NaN is both), in one pass without temporaries."""
        low, high = torch.aminmax(values)
        return torch.isfinite(low) & torch.isfinite(high)

    @staticmethod
    def astype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``values`` in ``dtype``; the same tensor if it has it already."""
        return values.to(dtype)


xp: Any = TorchNamespace
