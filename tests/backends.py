"""Every backend behind one function: gradients in, updates and carries out. A new backend is one entry of BACKENDS."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import carryclip.optax
from carryclip import Capped, reference
from carryclip.torch import UClip, _compiled
from cases import GROUPS
from seam import as_on_a_device, force


class Trace(NamedTuple):
    """A run: updates and carries of every step as float64 arrays, and the sum of what was dropped."""

    updates: list[list[np.ndarray | None]]
    carries: list[list[np.ndarray]]
    dropped: float
    """NaN where it was not measured."""
    skipped: int


def run_reference(region: Any, policy: Any, gradients: list, dtype: str, nonfinite: str = "skip") -> Trace:
    clipper = reference.UClip(region, policy, nonfinite, GROUPS, dtype if dtype == "bfloat16" else None)
    kind, sizes = np.float32 if dtype == "bfloat16" else dtype, shapes(gradients)
    updates, carries = [], []
    for arrays in gradients:
        sent = clipper.step([None if a is None else np.asarray(a).astype(kind) for a in arrays])
        updates.append([None if u is None else u.astype(float) for u in sent])
        held = zip(clipper.carry, sizes, strict=True)
        carries.append([np.zeros(shape) if c is None else c.astype(float) for c, shape in held])
    return Trace(updates, carries, clipper.dropped_norm, clipper.skipped_steps)


def run_torch(
    region: Any,
    policy: Any,
    gradients: list,
    dtype: str,
    nonfinite: str = "skip",
    prepare: Callable[[UClip], None] = lambda clipper: None,
    **options: Any,
) -> Trace:
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))) for shape in shapes(gradients)]
    groups = [{"params": [p for p, g in zip(params, GROUPS, strict=False) if g == k]} for k in sorted(set(GROUPS))]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=0.01)
    options = {"metrics_every": 10**6} | options  # drops are counted
    clipper = UClip(optimizer, region, carry=policy, nonfinite=nonfinite, **options)
    prepare(clipper)
    updates, carries = [], []
    for arrays in gradients:
        for p, a in zip(params, arrays, strict=True):
            p.grad = None if a is None else torch.tensor(a).to(p.dtype)
        optimizer.step()
        updates.append([None if p.grad is None else p.grad.double().numpy().copy() for p in params])
        carries.append([clipper.carry(p).double().numpy().copy() for p in params])
    return Trace(updates, carries, clipper.metrics()["dropped_norm"], int(clipper.metrics()["skipped_steps"]))


def run_compiled(*case: Any) -> Trace:
    """Tensors however small as compiled functions; only single numbers stay out, for which a second one is made."""

    def prepare(clipper: UClip) -> None:
        force(clipper, small=2, worth=2)

    found = run_torch(*case, prepare=prepare, compile=True)
    assert not _compiled._broken, "it went on uncompiled, so nothing was tested"
    return found


def run_device(*case: Any) -> Trace:
    """As on a device whose values cannot be read without waiting."""
    return run_torch(*case, prepare=as_on_a_device)


def run_optax(region: Any, policy: Any, gradients: list, dtype: str, nonfinite: str = "skip") -> Trace:
    with jax.enable_x64(dtype == "float64"):
        params = [jnp.zeros(shape, dtype) for shape in shapes(gradients)]
        # Metrics double the time to compile, and dropping is compared where there is some.
        every = 1 if dtype == "float64" and policy == Capped(3) else 0
        groups = list(GROUPS[: len(params)])
        tx = carryclip.optax.uclip(region, policy, nonfinite, groups=groups, metrics_every=every)
        state, step = tx.init(params), jax.jit(tx.update)
        updates, carries = [], []
        for arrays in gradients:
            sent, state = step([None if a is None else jnp.asarray(a, dtype) for a in arrays], state)
            updates.append([None if u is None else np.asarray(u, float) for u in sent])
            carries.append([np.asarray(c, float) for c in state.carry or map(jnp.zeros_like, params)])
        figures = carryclip.optax.metrics(state)
        return Trace(updates, carries, float(figures["dropped_norm"]), int(figures["skipped_steps"]))


def shapes(gradients: list) -> list[tuple[int, ...]]:
    """The parameters' shapes; each has a gradient at some step."""
    return [next(np.shape(row[k]) for row in gradients if row[k] is not None) for k in range(len(gradients[0]))]


BACKENDS: dict[str, Callable[..., Trace]] = {
    "torch": run_torch,
    "torch compiled": run_compiled,
    "torch on a device": run_device,
    "optax": run_optax,
}
