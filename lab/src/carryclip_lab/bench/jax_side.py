"""The same question in JAX: compiled transformations with the state donated."""

import math
import time
from typing import Any

from carryclip_lab.bench.meters import Times, quartiles
from carryclip_lab.bench.models import Shape


def transformations(radius: float) -> dict[str, Any]:
    """By name; the radius is the norm's."""
    import optax

    from carryclip import EWMA, Adaptive, Component, Norm, Shrunk
    from carryclip.optax import uclip
    from carryclip_lab.bench.contestants import COMPONENT_RADIUS

    component, norm = Component(COMPONENT_RADIUS), Norm(radius)
    return {
        "optax.clip": optax.clip(COMPONENT_RADIUS),
        "optax.clip_by_global_norm": optax.clip_by_global_norm(radius),
        "uclip Component": uclip(component, carry=True),
        "uclip Component, propagate": uclip(component, carry=True, nonfinite="propagate"),
        "uclip Norm": uclip(norm, carry=True),
        "uclip Norm, Shrunk": uclip(norm, Shrunk()),
        "uclip Norm, propagate": uclip(norm, carry=True, nonfinite="propagate"),
        "uclip Adaptive EWMA": uclip(Adaptive(mean=1, std=1, moments=EWMA()), carry=True),
        "adamw update": optax.adamw(1e-3),
    }


def measure(shapes: list[Shape], repeats: int) -> dict[str, tuple[Times, float]]:
    """Per transformation the seconds of a step, and the bytes XLA says it moves, in model sizes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    entries = sum(map(math.prod, shapes))
    source = np.random.default_rng(0).standard_normal(max(map(math.prod, shapes)), np.float32) * 0.01

    def gradients() -> list[Any]:
        return [jnp.array(source[: math.prod(shape)].reshape(shape)) for shape in shapes]

    found = {}
    for name, tx in transformations(0.01 * entries**0.5 / 2).items():
        state, given = tx.init(gradients()), gradients()
        params = gradients() if name == "adamw update" else None
        compiled = jax.jit(tx.update, donate_argnums=1).lower(given, state, params).compile()
        moved = (compiled.cost_analysis() or {})["bytes accessed"] / (4 * entries)
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            sent, state = compiled(given, state, params)
            jax.block_until_ready((sent, state))
            times.append(time.perf_counter() - start)
        found[name] = (quartiles(times[1:]), float(moved))
        del given, state, params
    return found
