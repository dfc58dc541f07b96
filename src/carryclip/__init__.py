"""Gradient clipping that keeps what it cuts off and gives it back.

The paper's algorithm, U-Clip, is ``carry=True``:

    u_t         = clip(g_t + carry_t, radius_t)      the optimizer receives u_t
    carry_{t+1} = g_t + carry_t - u_t                what was cut waits for the next step

The default, ``Shrunk()``, clips each gradient by itself and adds clipping's bias back, as far as it stands out of its
own noise; it is safe with momentum and Adam.

This package imports no framework. The front ends are ``carryclip.torch``, ``carryclip.optax`` and, for checking them,
``carryclip.reference`` (NumPy).
"""

from carryclip.carry import Capped, Drip, Gated, Leaky, Shrunk
from carryclip.diagnosis import CarryClipWarning
from carryclip.moments import EWMA, Welford
from carryclip.radius import RMS, Average, OfWeights, Quantile, ZScore
from carryclip.regions import Adaptive, Component, Norm, Sign, Symmetric

__version__ = "0.1.0"

_ELSEWHERE = ("UClip", "uclip")
"""What people look for here, and what is in the front ends, because it needs a framework."""


def __getattr__(name: str) -> object:
    # The import machinery asks for __path__ and the like, and turns an AttributeError into its own bare message.
    if name in _ELSEWHERE:
        raise ImportError(
            "UClip is in carryclip.torch; uclip is in carryclip.optax. Write: from carryclip.torch import UClip, or: "
            "from carryclip.optax import uclip."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "EWMA",
    "RMS",
    "Adaptive",
    "Average",
    "Capped",
    "CarryClipWarning",
    "Component",
    "Drip",
    "Gated",
    "Leaky",
    "Norm",
    "OfWeights",
    "Quantile",
    "Shrunk",
    "Sign",
    "Symmetric",
    "Welford",
    "ZScore",
    "__version__",
]
