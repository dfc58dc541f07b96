"""U-Clip for JAX: a gradient transformation for ``optax.chain``.

>>> import jax.numpy as jnp, optax
>>> from carryclip.optax import Norm, metrics, uclip
>>> tx = optax.chain(uclip(Norm(1.0), metrics_every=10), optax.adamw(3e-4))
>>> params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
>>> state = tx.init(params)
>>> updates, state = tx.update({"w": jnp.full(3, 5.0), "b": jnp.ones(())}, state, params)
>>> params = optax.apply_updates(params, updates)
>>> float(metrics(state)["clipped_fraction"])
1.0
"""

from carryclip._checks import needs

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise needs("carryclip.optax", "JAX and optax", "jax optax", error) from error

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
from carryclip.optax._graft import graft
from carryclip.optax._parallel import DataParallel, TrainState, aggregate_then_clip, clip_then_aggregate
from carryclip.optax._state import UClipState, Watch, check, metrics
from carryclip.optax._transform import uclip
from carryclip.optax._updates import clip_updates

__all__ = [
    "EWMA",
    "RMS",
    "Adaptive",
    "Average",
    "Capped",
    "CarryClipWarning",
    "Component",
    "DataParallel",
    "Drip",
    "Gated",
    "Leaky",
    "Norm",
    "OfWeights",
    "Quantile",
    "Shrunk",
    "Sign",
    "Symmetric",
    "TrainState",
    "UClipState",
    "Watch",
    "Welford",
    "ZScore",
    "aggregate_then_clip",
    "check",
    "clip_then_aggregate",
    "clip_updates",
    "graft",
    "metrics",
    "uclip",
]
