"""One parameter at one step, whatever its gradient looks like, as plain real arrays."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from carryclip.algorithm import Buffers, Rule
from carryclip.torch._layout import Leaf, fitted, pick
from carryclip.torch._state import Entries, buffers_of, wide


class Job(NamedTuple):
    """A gradient and its buffers: all of a parameter, or the rows of a sparse gradient."""

    leaf: Leaf
    rule: Rule
    gradient: Tensor
    buffers: Buffers
    dtype: torch.dtype
    rows: tuple[Tensor, ...] | None
    stored: Buffers
    """The buffers of the whole parameter, into which new ones are written."""


def writable(param: Tensor) -> Tensor:
    """The parameter's dense gradient; an expanded one shares memory between its entries and is cloned first."""
    gradient = param.grad
    assert gradient is not None
    if any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)):
        gradient = param.grad = gradient.clone(memory_format=torch.contiguous_format)
    return gradient


def open_job(leaf: Leaf, rule: Rule, entries: Entries, *, write: bool, scale: Tensor | None) -> Job:
    """See a parameter's gradient as plain arrays. ``scale`` is a loss scale to divide out of what is only read."""
    gradient = leaf.param.grad
    assert gradient is not None
    dtype = wide(gradient.dtype)
    rows = None
    if gradient.is_sparse:
        _check_sparse(leaf, rule)
        gradient = gradient.coalesce()
        if write:
            leaf.param.grad = gradient
        rows, gradient = tuple(gradient.indices()), gradient.values()
    elif gradient.layout != torch.strided:
        raise TypeError(
            f"The gradient of {leaf.name} has layout {gradient.layout}; only dense and COO ones can be clipped."
        )
    elif write:
        gradient = writable(leaf.param)
    if scale is not None:
        gradient = gradient / scale
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    stored = buffers_of(entries, rule.buffers, leaf.param, dtype)
    present = stored if rows is None or stored.carry is None else stored._replace(carry=stored.carry[rows])
    return Job(leaf, rule, gradient, present, dtype, rows, stored)


def _check_sparse(leaf: Leaf, rule: Rule) -> None:
    """Rows that are absent must keep what they have, which averages counted per parameter cannot."""
    if rule.region.estimator is not None or rule.gates_coordinates:
        kind = "moments" if rule.region.estimator is not None else "a feed average per coordinate (Gated)"
        raise TypeError(
            f"The gradient of {leaf.name} is sparse, and {rule.region!r} keeps {kind}, which rows that come and go "
            "would spoil. Use Component, Norm or Sign (with a carry other than Gated), or sparse=False."
        )


def close_job(job: Job, update: Tensor, buffers: Buffers, *, write: bool) -> None:
    """Write the update, unless only observing, and the buffers back in place."""
    if write:
        job.gradient.copy_(update)
    for stored, new in zip(job.stored, buffers, strict=True):
        if new is not None and job.rows is None:
            stored.copy_(new)
        elif new is not None:
            stored.index_put_(job.rows, new)


def sizes_of(job: Job, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The region's numbers for one parameter, per-parameter ones picked and fitted to its shape."""
    return sizes if all(isinstance(size, float) for size in sizes) else tuple(_size_of(job, size) for size in sizes)


def _size_of(job: Job, size: Any) -> Any:
    owner, leaf = type(job.rule.region).__name__, job.leaf
    if job.rule.region.joint and getattr(size, "shape", ()) != ():
        raise ValueError(f"{owner}: the radius must be one number, got shape {tuple(size.shape)}.")
    size = fitted(owner, pick(size, leaf), leaf)
    if isinstance(size, (int, float)):
        return size
    if torch.promote_types(size.dtype, job.dtype) == job.dtype:
        size = size.to(job.dtype)
    if size.dim():
        size = size[job.rows] if job.rows is not None else size
        size = size.unsqueeze(-1) if leaf.param.is_complex() else size
    return size
