"""U-Clip: gradient clipping that keeps what it cuts off and gives it back.

    u_t         = clip(g_t + carry_t, radius_t)      the optimizer receives u_t
    carry_{t+1} = g_t + carry_t - u_t                what was cut waits for the next step

This package imports no framework. The front ends are ``carryclip.torch``, ``carryclip.optax`` and, for checking them,
``carryclip.reference`` (NumPy).
"""

from carryclip.carry import Capped, Gated, Leaky
from carryclip.diagnosis import CarryClipWarning
from carryclip.moments import EWMA, Welford
from carryclip.regions import Adaptive, Component, Norm, Sign, Symmetric

__version__ = "0.1.0"

__all__ = [
    "EWMA",
    "Adaptive",
    "Capped",
    "CarryClipWarning",
    "Component",
    "Gated",
    "Leaky",
    "Norm",
    "Sign",
    "Symmetric",
    "Welford",
    "__version__",
]
