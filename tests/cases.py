"""The tables behind the battery: a new region, policy or type is one row here."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carryclip import (
    EWMA,
    RMS,
    Adaptive,
    Capped,
    Component,
    Drip,
    Gated,
    Leaky,
    Norm,
    Quantile,
    Shrunk,
    Sign,
    Symmetric,
    Welford,
)


def halving(step: Any) -> Any:
    """A radius schedule of exact numbers that also visits infinity and zero; plain or traced."""
    xp = jnp if isinstance(step, jax.Array) else np
    radius = 2.0 / 2 ** xp.minimum(step // 20, 3)
    radius = xp.where((step == 0) | (step == 30), np.inf, xp.where(step == 7, 0.0, radius))
    return radius if xp is jnp else float(radius)


SHAPES = ((3, 4), (), (2, 1, 3))
GROUPS = (0, 0, 1)

REGIONS: dict[str, Any] = {
    "component": Component(0.3),
    "component schedule": Component(halving),
    "component per tensor": Component([0.1, 0.4, 2.5]),
    "component per coordinate": Component([np.linspace(0.1, 2, 12).reshape(3, 4), 0.4, np.full((2, 1, 3), 0.7)]),
    "sign": Sign(0.7),
    "sign per tensor": Sign([0.5, 1.0, 2.0]),
    "norm": Norm(1.1),
    "norm schedule": Norm(halving),
    "norm per group": Norm(0.9, over="group"),
    "norm per tensor": Norm(0.6, over="tensor"),
    "norm per row": Norm(0.5, over="row"),
    "norm per column": Norm(0.5, over="column"),
    "norm by rms": Norm(RMS(0.7, warmup=3)),
    "norm by quantile, per row": Norm(Quantile(0.7, window=20), over="row"),
    "adaptive welford": Adaptive(mean=1, std=1, moments=Welford()),
    "adaptive welford, current included": Adaptive(mean=1, std=1, moments=Welford(), include_current=True),
    "adaptive ewma": Adaptive(mean=1, std=0.5, moments=EWMA()),
    "adaptive ewma, biased": Adaptive(mean=2, std=0, moments=EWMA(decay=0.9, debias=False), min_radius=0.05),
    "adaptive, past schedule": Adaptive(mean=1, std=halving),
    "symmetric schedule": Symmetric(std=halving, moments=EWMA()),
    "sign schedule": Sign(lambda step: 1.0 / (1 + step // 20 % 2)),
    "adaptive schedule": Adaptive(mean=1, std=halving, moments=EWMA(), include_current=True),
    "symmetric": Symmetric(std=1.0, moments=Welford()),
    "symmetric ewma": Symmetric(std=1.5, moments=EWMA(), include_current=True),
}
CONSTANT_COORDINATES = {name for name in REGIONS if name.startswith(("component", "sign"))}

POLICIES: dict[str, Any] = {
    "full": True,
    "none": False,
    "capped": Capped(3),
    "leaky": Leaky(0.8),
    "gated": Gated(),
    "gated early": Gated(decay=0.7, threshold=0.2, cap=5),
    "gated at the threshold": Gated(decay=0.0, threshold=1.0, cap=50),  # the clamped feed meets it exactly
    "drip": Drip(),
    "drip quickly": Drip(rate=0.3, decay=0.8),
    "drip, not centred": Drip(rate=0.2, centred=False),
    "shrunk": Shrunk(),
    "shrunk, short": Shrunk(memory=5),
}


STEPS = {"float64": 500, "float32": 100, "float16": 100, "bfloat16": 100}
WIDE_ONLY = {"gated early", "gated at the threshold", "drip quickly", "drip, not centred", "shrunk, short"}
"""Gates that open and close so easily that in a narrow type the last bit of an update decides it; and variants."""
MIXING = {name for name in POLICIES if name.startswith(("drip", "shrunk"))}
CELLS = [
    (region, policy, dtype)
    for region in REGIONS
    for dtype in STEPS
    for policy in POLICIES
    if "float16" not in dtype or policy not in WIDE_ONLY
]
KINDS = (
    "component",
    "component per coordinate",
    "sign",
    "norm",
    "norm per tensor",
    "adaptive welford",
    "adaptive welford, current included",
    "adaptive ewma",
    "adaptive ewma, biased",
    "symmetric",
    "symmetric ewma",
)
"""Regions of which none compiles to the code of another."""
LEARNING = ("norm per row", "norm per column", "norm by rms", "norm by quantile, per row")
"""What is tried elsewhere too, with all rules for the radius: ``test_radius``."""
OPTAX_CELLS = [
    (region, policy, dtype)
    for region, policy, dtype in CELLS
    if region not in LEARNING or (dtype == "float64" and policy in ("full", "shrunk"))
    if region in KINDS or policy in ("full", "capped", "gated", "drip", "shrunk")
    if dtype != "float16" or policy in ("full", "gated")
]
"""Each takes a second to compile, so variants of a kind have fewer policies, and float16 as well."""
COMPILED_CELLS = [
    (region, policy, dtype)
    for region, policy, dtype in CELLS
    if (region in KINDS and policy == "full" and dtype == "bfloat16")
    or (region == "norm" and policy == "full" and dtype == "float32")
    or (region in ("component", "adaptive ewma") and policy == "full")
    or (region in ("component", "norm") and policy in ("none", "gated") and dtype == "float32")
    or (region == "component" and policy in ("capped", "leaky") and dtype == "bfloat16")
    or (region in ("component", "norm") and policy in ("drip", "shrunk") and dtype in ("float32", "bfloat16"))
    or (region == "adaptive ewma" and policy == "shrunk" and dtype == "float32")
]
"""Each takes several seconds to compile: every kind in the type that rounds most, some in all, policies somewhere."""
DEVICE_CELLS = [
    (region, policy, dtype)
    for region, policy, dtype in CELLS
    if region.startswith(("component", "norm")) and (policy == "full" or dtype in ("float32", "bfloat16"))
    if region not in LEARNING or dtype != "bfloat16"
]
"""What is done in place has code of its own for devices that must not be waited for."""


@dataclass(frozen=True)
class Tolerance:
    """Largest difference of updates and carry from the reference, relative to the largest carry; 0 is bit-equal."""

    relative: float
    strays: int = 0
    """Coordinates, of all 19, that may go their own way."""


def tolerance(dtype: str, region: str, policy: str) -> Tolerance:
    """The one tolerance table: constant coordinate-wise regions are exact in every type."""
    if region in CONSTANT_COORDINATES and policy not in MIXING:
        return Tolerance(0.0)
    # In a narrow type the last bit of an update decides the sign of what rounding leaves in the carry, and with it
    # whether a gate opens: a coordinate is then either exact or goes its own way. Other policies have no such choice.
    strays = 1 if policy == "gated" else 0
    # A norm or a moment may differ in its last bits, and a bfloat16 update then in its last of eight bits.
    return {
        "float64": Tolerance(1e-13),
        "float32": Tolerance(2e-6),
        "float16": Tolerance(2**-11, strays),
        "bfloat16": Tolerance(2**-8, strays),
    }[dtype]


def heavy_tailed(seed: int, steps: int, missing: float = 0.1) -> list[list[np.ndarray | None]]:
    """Gradients with tails so heavy that their variance is infinite.

    Now and then some of the parameters have none, always the same ones, and one coordinate is always exactly 0.
    """
    rng = np.random.default_rng(seed)
    absent = rng.permutation(len(SHAPES))[: rng.integers(1, len(SHAPES))]
    rows: list[list[np.ndarray | None]] = []
    for _ in range(steps):
        row = [0.4 * rng.standard_t(1.5, size=shape) + 0.05 for shape in SHAPES]
        row[0][1, 1] = 0.0
        gone = set(absent) if rng.random() < missing else set()
        rows.append([None if k in gone else g for k, g in enumerate(row)])
    return rows
