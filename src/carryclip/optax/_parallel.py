"""The two ways to clip when several devices share a batch: after their gradients are averaged, or before."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from carryclip.algorithm import NonFinite
from carryclip.carry import DEFAULT, CarryPolicy
from carryclip.optax._transform import uclip
from carryclip.regions import Region

Tree = Any
Loss = Callable[[Tree, Tree], jax.Array]
"""(parameters, batch) -> mean loss over the batch."""


class TrainState(NamedTuple):
    """What a data-parallel run keeps: parameters, the state of ``uclip``, the state of the optimizer."""

    params: Tree
    clip: Any
    optimizer: Any


class DataParallel(NamedTuple):
    """A training loop in two functions."""

    init: Callable[[Tree], TrainState]
    """parameters -> state, placed on the mesh."""
    step: Callable[[TrainState, Tree], tuple[TrainState, jax.Array]]
    """(state, batch) -> (new state, mean loss). Compiled; the old state is donated and must not be used again."""


def aggregate_then_clip(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    region: Region | Mapping[Any, Region | None],
    carry: CarryPolicy = DEFAULT,
    nonfinite: NonFinite = "skip",
    *,
    axis: str = "data",
    **options: Any,
) -> DataParallel:
    """Average the gradients of all devices, then clip the average: one carry, and the run of a single device.

    What is noise between devices cancels before anything is cut, so this clips less; it is the order to take unless
    single devices bring outliers. The state is replicated, the batch is split along ``axis`` of ``mesh``.

    Args:
        loss: (parameters, batch) -> mean loss over the batch.
        optimizer: what follows the clip, ``optax.adamw(3e-4)`` for example.
        mesh: the devices.
        region: as in ``uclip``.
        carry: as in ``uclip``.
        nonfinite: as in ``uclip``.
        axis: name of the mesh axis along which the batch is split.
        options: more for ``uclip``.

    >>> import jax, jax.numpy as jnp, optax
    >>> from carryclip import Norm
    >>> from carryclip.optax import aggregate_then_clip
    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
    >>> loss = lambda params, batch: jnp.mean((batch @ params) ** 2)
    >>> run = aggregate_then_clip(loss, optax.sgd(0.1), mesh, Norm(1.0))
    >>> state = run.init(jnp.ones(3))
    >>> state, value = run.step(state, jnp.ones((8, 3)))
    >>> float(value)
    9.0
    """
    clip = uclip(region, carry, nonfinite, **options)
    everywhere = _sharding(mesh, axis, P())

    def init(params: Tree) -> TrainState:
        params = _copied(params, everywhere)
        return TrainState(params, *_copied((clip.init(params), optimizer.init(params)), everywhere))

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state.params, batch)
        updates, clipped = clip.update(gradients, state.clip, state.params)
        return _advanced(state, updates, clipped, optimizer), value

    return DataParallel(init, _checked(jax.jit(step, donate_argnums=0, out_shardings=everywhere), mesh, axis))


def clip_then_aggregate(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    region: Region | Mapping[Any, Region | None],
    carry: CarryPolicy = DEFAULT,
    nonfinite: NonFinite = "skip",
    *,
    axis: str = "data",
    **options: Any,
) -> DataParallel:
    """Clip each device's gradient with a carry of its own, then average the updates.

    An outlier on one device moves the average by at most a radius divided by the number of devices, and the others are
    not scaled down with it; but each device sees a smaller batch, so more is clipped. Summed over devices, gradients
    minus updates equal the carries. ``TrainState.clip`` has a leading axis of devices, split along ``axis``: save all
    of it. If one device's gradient is not finite, all of them skip the step. A checkpoint fits this number of devices
    only.

    Arguments and result are those of ``aggregate_then_clip``.
    """
    clip = uclip(region, carry, nonfinite, axis_name=axis, **options)
    everywhere, split = _sharding(mesh, axis, P()), _sharding(mesh, axis, P(axis))
    devices = mesh.shape[axis]

    def init(params: Tree) -> TrainState:
        params = _copied(params, everywhere)
        own = jax.jit(lambda p: _stacked(clip.init(p), devices), out_shardings=split)(params)
        return TrainState(params, own, _copied(optimizer.init(params), everywhere))

    def local(params: Tree, own: Any, batch: Tree) -> tuple[Tree, Any, jax.Array]:
        # Without this the gradients of replicated parameters would arrive already summed over the devices.
        params = lax.pcast(params, axis, to="varying")
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, own = clip.update(gradients, jax.tree.map(lambda x: x[0], own), params)
        return lax.pmean(updates, axis), jax.tree.map(lambda x: x[None], own), lax.pmean(value, axis)

    spread = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(axis), P(axis)), out_specs=(P(), P(axis), P()))

    def step(state: TrainState, batch: Tree) -> tuple[TrainState, jax.Array]:
        updates, own, value = spread(state.params, state.clip, batch)
        return _advanced(state, updates, own, optimizer), value

    shardings = (TrainState(everywhere, split, everywhere), everywhere)
    return DataParallel(init, _checked(jax.jit(step, donate_argnums=0, out_shardings=shardings), mesh, axis))


def _sharding(mesh: Mesh, axis: str, spec: P) -> NamedSharding:
    if axis not in mesh.shape:
        raise ValueError(f"The mesh has no axis {axis!r}; its axes are {', '.join(map(repr, mesh.shape))}.")
    return NamedSharding(mesh, spec)


def _copied(tree: Tree, sharding: NamedSharding) -> Tree:
    """The arrays on the mesh, each in memory of its own: a step donates them, and some optimizers keep parameters."""
    return jax.tree.map(lambda x: jax.device_put(jnp.array(x, copy=True), sharding), tree)


def _stacked(tree: Tree, devices: int) -> Tree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (devices, *x.shape)), tree)


def _advanced(state: TrainState, updates: Tree, clipped: Any, optimizer: optax.GradientTransformation) -> TrainState:
    changes, moved = optimizer.update(updates, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, changes), clipped, moved)


def _checked(step: Callable, mesh: Mesh, axis: str) -> Callable:
    """``step`` with the batch split over the devices, after a look at its size."""
    split = _sharding(mesh, axis, P(axis))

    def placed(state: TrainState, batch: Tree) -> tuple[TrainState, jax.Array]:
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            if not jnp.ndim(leaf) or jnp.shape(leaf)[0] % mesh.shape[axis]:
                raise ValueError(
                    f"The batch's {jax.tree_util.keystr(path) or 'array'} has shape {jnp.shape(leaf)}; its first axis "
                    f"must be a multiple of the {mesh.shape[axis]} devices along {axis!r}."
                )
        return step(state, jax.device_put(batch, split))

    return placed
