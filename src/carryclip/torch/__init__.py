"""U-Clip for PyTorch: one line beside any optimizer.

>>> import torch
>>> from carryclip.torch import Norm, UClip
>>> model = torch.nn.Linear(4, 1)
>>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
>>> clipper = UClip(optimizer, Norm(1.0))
>>> model(torch.ones(8, 4)).sum().backward()
>>> optimizer.step()
>>> round(clipper.metrics()["update_norm"], 3)
1.0
"""

from carryclip._checks import needs

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise needs("carryclip.torch", "PyTorch", "torch", error) from error

from carryclip import (
    EWMA,
    RMS,
    Adaptive,
    Average,
    Capped,
    CarryClipWarning,
    Component,
    Drip,
    Gated,
    Leaky,
    Norm,
    OfWeights,
    Quantile,
    Shrunk,
    Sign,
    Symmetric,
    Welford,
    ZScore,
)
from carryclip.advice import Advice
from carryclip.torch._agree import NonFiniteGradientError
from carryclip.torch._clipper import UClip
from carryclip.torch._factory import uclipped
from carryclip.torch._local import LocalUClip
from carryclip.torch._updates import ClippedUpdates, clip_updates
from carryclip.torch._watch import Metrics

__all__ = [
    "EWMA",
    "RMS",
    "Adaptive",
    "Advice",
    "Average",
    "Capped",
    "CarryClipWarning",
    "ClippedUpdates",
    "Component",
    "Drip",
    "Gated",
    "Leaky",
    "LocalUClip",
    "Metrics",
    "NonFiniteGradientError",
    "Norm",
    "OfWeights",
    "Quantile",
    "Shrunk",
    "Sign",
    "Symmetric",
    "UClip",
    "Welford",
    "ZScore",
    "clip_updates",
    "uclipped",
]
