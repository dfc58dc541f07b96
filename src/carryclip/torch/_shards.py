"""Parameters that are spread over ranks: the part that is here, and who counts it in sums over all of them.

A ``DTensor`` (FSDP2, tensor parallel) says by its mesh and placements which entries a rank holds. ZeRO gives whole
tensors to different ranks, which only its process group shows.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """How the parameters of a layout lie on the ranks of a process group."""

    group: Any
    rank: int
    """Of this process, in the group."""
    size: int
    counted: tuple[bool, ...]
    """By number of the parameter: whether this rank counts its entries, or another one that has the same does."""
    whole: bool
    """Tensors are not cut: each is on one rank, and a norm of a single tensor needs no other."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a ``DTensor``."""
    return hasattr(tensor, "placements")


def local(tensor: Any) -> Tensor:
    """This rank's part of a ``DTensor``, in the same memory; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    part = tensor.to_local()
    return part.wait() if hasattr(part, "trigger_wait") else part


def local_gradient(param: Any, name: str) -> Tensor | None:
    """This rank's part of a parameter's gradient, which must lie as the parameter does."""
    gradient = param.grad
    if gradient is None or not is_sharded(gradient):
        return gradient
    placed = tuple(gradient.placements)
    if any(placement.is_partial() for placement in placed):
        problem = "is a sum over ranks that has not been taken yet: clipped parts do not add up to a clipped sum"
    elif is_sharded(param) and placed != tuple(param.placements):
        problem = f"is not placed as the parameter, which has {tuple(param.placements)}"
    else:
        return local(gradient)
    raise TypeError(
        f"The gradient of {name}, with placements {placed}, {problem}. Before the step call "
        "param.grad = param.grad.redistribute(placements=param.placements)."
    )


def put_gradient(param: Tensor, gradient: Tensor) -> None:
    """Give a parameter this (part of a) gradient."""
    whole: Any = param.grad
    if is_sharded(whole):
        from torch.distributed.tensor import DTensor

        gradient = DTensor.from_local(
            gradient, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    param.grad = gradient


def local_range(param: Any, axis: int) -> slice:
    """Which entries along an axis of a ``DTensor`` are here."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    # FSDP2 over tensor parallelism deals the entries out in strides: https://github.com/pytorch/pytorch/pull/126697
    if any(type(placement).__name__ == "_StridedShard" and placement.dim == axis for placement in param.placements):
        raise TypeError(
            'Norm(over="row") cannot tell which rows are here where FSDP2 and tensor parallelism both cut them: use '
            'over="tensor".'
        )
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return slice(offset[axis], offset[axis] + shape[axis])


def laid_like(values: Tensor, param: Any) -> Tensor:
    """This rank's part of an array of a parameter's whole shape."""
    if not is_sharded(param):
        return values
    if is_sharded(values):
        return local(values)
    from torch.distributed.tensor import distribute_tensor

    return local(distribute_tensor(values, param.device_mesh, param.placements, src_data_rank=None))


def spread_of(params: list[Any], names: list[str], process_group: Any) -> Spread | None:
    """How parameters lie on ranks; None if every rank has all of them."""
    meshes: list[Any] = []
    for param, name in zip(params, names, strict=True):
        if getattr(param, "_fsdp_flattened", False):
            raise TypeError(f"{name} is hidden in FullyShardedDataParallel: use FSDP2, that is fully_shard(model).")
        if not is_sharded(param):
            continue
        if any(placement.is_partial() for placement in param.placements):
            raise TypeError(f"{name} has a Partial placement: parameters must be sharded or replicated.")
        if param.device_mesh not in meshes:
            meshes.append(param.device_mesh)
    if process_group is not None:
        if meshes:
            raise ValueError("Leave process_group out: these parameters are DTensors, which know their ranks.")
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        return Spread(process_group, rank, size, counted=(True,) * len(params), whole=True)
    if not meshes:
        return None
    mesh = _spanning(meshes)
    group, ranks = _group_of(mesh), _ranks(mesh)
    counted = tuple(_counts(param, ranks[0]) for param in params)
    return Spread(group, dist.get_rank(group), len(ranks), counted, whole=False)


def _ranks(mesh: Any) -> list[int]:
    return sorted(mesh.mesh.flatten().tolist())


def _spanning(meshes: list[Any]) -> Any:
    """The mesh that has all ranks of the others: one of them, or the one they were cut from."""
    wanted = {rank for mesh in meshes for rank in _ranks(mesh)}
    for mesh in meshes:
        if wanted <= set(_ranks(mesh)):
            return mesh
    # Not simply all ranks: along a dimension that none has, such as the stages of a pipeline, are other parameters.
    root = meshes[0]._get_root_mesh() if hasattr(meshes[0], "_get_root_mesh") else None
    used = {name for mesh in meshes for name in mesh.mesh_dim_names or ()}
    if root is not None and used and used <= set(root.mesh_dim_names or ()):
        mesh = root[tuple(name for name in root.mesh_dim_names if name in used)]
        if wanted <= set(_ranks(mesh)):
            return mesh
    raise ValueError(
        "The parameters are on device meshes that have nothing in common. Cut them from one mesh: "
        'init_device_mesh(..., mesh_dim_names=("dp", "tp")), then mesh["dp"] and mesh["tp"].'
    )


def _group_of(mesh: Any) -> Any:
    """The process group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(_ranks(mesh))
    if ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    return _new_group(ranks)


@cache
def _new_group(ranks: tuple[int, ...]) -> Any:
    """Made once, by all of these ranks at the same time."""
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _counts(param: Any, first: int) -> bool:
    """Whether this rank is the one of those with the same entries that counts them.

    Of several meshes with copies of a parameter it is the one with the lowest rank of all; within a mesh the first
    along each dimension that replicates.
    """
    if not is_sharded(param):
        return dist.get_rank() == first
    mesh = param.device_mesh
    where = mesh.get_coordinate()
    copies = [k for placement, k in zip(param.placements, where, strict=True) if placement.is_replicate()]
    return first in _ranks(mesh) and not any(copies)
