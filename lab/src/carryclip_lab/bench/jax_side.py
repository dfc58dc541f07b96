"""The same question in JAX: compiled transformations with the state donated."""

import time
from collections.abc import Callable
from typing import Any

from carryclip_lab.bench.models import Shape


def transformations() -> dict[str, Callable[[float], Any]]:
    """From the norm's radius to a transformation."""
    import optax

    from carryclip import EWMA, Adaptive, Component, Norm, Shrunk
    from carryclip.optax import uclip
    from carryclip_lab.bench.contestants import COMPONENT_RADIUS

    return {
        "optax.clip": lambda radius: optax.clip(COMPONENT_RADIUS),
        "optax.clip_by_global_norm": lambda radius: optax.clip_by_global_norm(radius),
        "uclip Component": lambda radius: uclip(Component(COMPONENT_RADIUS), carry=True),
        "uclip Component, propagate": lambda radius: uclip(
            Component(COMPONENT_RADIUS), carry=True, nonfinite="propagate"
        ),
        "uclip Norm": lambda radius: uclip(Norm(radius), carry=True),
        "uclip Norm, Shrunk": lambda radius: uclip(Norm(radius), Shrunk()),
        "uclip Norm, propagate": lambda radius: uclip(Norm(radius), carry=True, nonfinite="propagate"),
        "uclip Adaptive EWMA": lambda radius: uclip(Adaptive(mean=1, std=1, moments=EWMA()), carry=True),
        "adamw update": lambda radius: optax.adamw(1e-3),
    }


def measure(shapes: list[Shape], repeats: int, tick: Callable[[], Any]) -> dict[str, tuple[list[float], float]]:
    """Per transformation the seconds of each step, and the bytes XLA says it moves, in model sizes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    entries = sum(int(np.prod(shape)) for shape in shapes)
    radius = 0.01 * entries**0.5 / 2
    source = np.random.default_rng(0).standard_normal(max(int(np.prod(shape)) for shape in shapes), np.float32) * 0.01

    def gradients() -> list[Any]:
        return [jnp.array(source[: int(np.prod(shape))].reshape(shape)) for shape in shapes]

    found = {}
    for name, make in transformations().items():
        tx, params = make(radius), None
        state, given = tx.init(gradients()), gradients()
        if name == "adamw update":
            params = gradients()
        update = jax.jit(tx.update, donate_argnums=1)
        compiled = update.lower(given, state, params).compile()
        moved = (compiled.cost_analysis() or {})["bytes accessed"] / (4 * entries)
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            sent, state = compiled(given, state, params)
            jax.block_until_ready((sent, state))
            times.append(time.perf_counter() - start)
            tick()
        found[name] = (times[1:], float(moved))
        del given, state, params
    return found
