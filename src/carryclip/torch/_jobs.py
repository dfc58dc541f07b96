"""One parameter at one step, whatever its gradient looks like, as plain real arrays; and those cut or packed to size.

The pure functions see pieces: a whole tensor, a stretch of a large one that stays in the processor's cache, or many
small tensors laid end to end.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as end_to_end
from torch._utils import _unflatten_dense_tensors as back_in_shape

from carryclip.algorithm import Buffers, Rule
from carryclip.precision import seed_of
from carryclip.torch._layout import Leaf, fitted, pick
from carryclip.torch._shards import laid_like, local, put_gradient
from carryclip.torch._state import Entries, Storage, buffers_of, wide

CHUNK = 1 << 17
"""Entries of a piece on the CPU: a few arrays of this size stay in its cache."""
COMPILED_CHUNK = 1 << 19
"""The same for a compiled function that also measures: it has fewer arrays, and each call costs more."""
SMALL = 1 << 15
"""Tensors with fewer entries are packed, because each operation on them costs more than their entries."""
WORTH = 1 << 18
"""Tensors that can be clipped in place are compiled only from this size on: a compiled call costs more to begin."""


class Job(NamedTuple):
    """A gradient and its buffers: all of a parameter, or the rows of a sparse gradient."""

    leaf: Leaf
    rule: Rule
    gradient: Tensor
    stored: Buffers
    """The buffers of the whole parameter, into which new ones are written."""
    dtype: torch.dtype
    rows: tuple[Tensor, ...] | None
    plain: bool
    """True if gradient and buffers are ordinary arrays of the parameter's shape, which may be written in place."""


def writable(param: Tensor, gradient: Tensor) -> Tensor:
    """The parameter's dense gradient; an expanded one shares memory between its entries and is cloned first."""
    if not gradient.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)
    ):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        put_gradient(param, gradient)
    return gradient


def open_job(
    leaf: Leaf,
    gradient: Tensor,
    rule: Rule,
    entries: Entries,
    storage: Storage,
    *,
    write: bool,
    scale: Tensor | None,
) -> Job:
    """See a parameter's gradient as plain arrays. ``scale`` is a loss scale to divide out of what is only read."""
    param = leaf.param
    dtype = wide(gradient.dtype)
    rows = None
    if gradient.is_conj():  # autograd may leave the conjugation to whoever reads it
        gradient = gradient.resolve_conj()
        if write:
            put_gradient(param, gradient)
    if gradient.layout == torch.strided:
        gradient = writable(param, gradient) if write and not gradient.is_contiguous() else gradient
    elif gradient.is_sparse:
        _check_sparse(leaf, rule)
        gradient = gradient.coalesce()
        if write:
            param.grad = gradient
        rows, gradient = tuple(gradient.indices()), gradient.values()
    else:
        raise TypeError(
            f"The gradient of {leaf.name} has layout {gradient.layout}; only dense and COO ones can be clipped."
        )
    if scale is not None:
        gradient = gradient / scale
    stored = buffers_of(entries, rule.buffers, param, dtype, storage)
    if leaf.sharded:
        stored = Buffers(*(None if x is None else local(x) for x in stored))
    if gradient.is_complex():
        return Job(leaf, rule, torch.view_as_real(gradient), stored, dtype, rows, False)
    plain = rows is None and scale is None
    return Job(leaf, rule, gradient, stored, dtype, rows, plain)


def present(job: Job) -> Buffers:
    """The buffers of the entries that have a gradient."""
    carry = job.stored.carry
    return job.stored if job.rows is None or carry is None else Buffers(carry[job.rows])


def _check_sparse(leaf: Leaf, rule: Rule) -> None:
    """Rows that are absent must keep what they have, which averages counted per parameter cannot."""
    if rule.region.estimator is not None or rule.gates_coordinates:
        kind = "moments" if rule.region.estimator is not None else "a feed average per coordinate (Gated)"
        raise TypeError(
            f"The gradient of {leaf.name} is sparse, and {rule.region!r} keeps {kind}, which rows that come and go "
            "would spoil. Use Component, Norm or Sign (with a carry other than Gated), or sparse=False."
        )


def sizes_of(job: Job, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The region's numbers for one parameter, per-parameter ones picked and fitted to its shape."""
    return sizes if all(isinstance(size, float) for size in sizes) else tuple(_size_of(job, size) for size in sizes)


def _size_of(job: Job, size: Any) -> Any:
    owner, leaf = type(job.rule.region).__name__, job.leaf
    if job.rule.region.joint and getattr(size, "shape", ()) != ():
        raise ValueError(f"{owner}: the radius must be one number, got shape {tuple(size.shape)}.")
    size = fitted(owner, pick(size, leaf), leaf)
    if isinstance(size, (int, float)):
        return float(size)
    if torch.promote_types(size.dtype, job.dtype) == job.dtype:
        size = size.to(job.dtype)
    if size.dim():
        size = laid_like(size, leaf.param) if leaf.sharded else size
        size = size[job.rows] if job.rows is not None else size
        size = size.unsqueeze(-1) if leaf.param.is_complex() else size
    return size


class Piece(NamedTuple):
    """One array for the pure functions: (part of) a job, or several jobs of one scope end to end."""

    jobs: list[Job]
    gradient: Tensor
    buffers: Buffers
    sizes: tuple[Any, ...]
    large: bool
    """Worth a compiled function."""
    start: int = 0
    """Where it begins in its tensor."""

    def seed(self, step: int) -> int:
        """For rounding at random: another number at every step for every piece."""
        return seed_of(step, self.jobs[0].leaf.number, self.start)

    def commit(self, update: Tensor, buffers: Buffers, *, write: bool) -> None:
        """Write the update, unless only observing, and the buffers back in place; the count is not ours to move."""
        if len(self.jobs) > 1:
            if write:
                _lay_out(update, [job.gradient for job in self.jobs])
            for k, new in enumerate(buffers[:-1]):
                if new is not None:
                    _lay_out(new, [job.stored[k] for job in self.jobs])
            return
        if write:
            self.gradient.copy_(update)
        rows = self.jobs[0].rows
        for old, stored, new in zip(self.buffers[:-1], self.jobs[0].stored, buffers, strict=False):
            if new is not None and rows is None:
                old.copy_(new)
            elif new is not None:
                stored.index_put_(rows, new)


def _lay_out(values: Tensor, targets: list[Tensor]) -> None:
    """Undo ``end_to_end``, into existing tensors."""
    torch._foreach_copy_(targets, list(back_in_shape(values, targets)))


def pieces_of(jobs: list[tuple[Job, tuple[Any, ...]]], longest: int | None, small: int) -> Iterator[Piece]:
    """Pieces of at most ``longest`` entries (None: any); tensors of fewer than ``small`` are packed."""
    packs: dict[Any, tuple[list[Job], tuple[Any, ...]]] = {}
    for job, sizes in jobs:
        count = job.gradient.numel()
        single = all(isinstance(size, float) or size.dim() == 0 for size in sizes)
        if job.plain and count < small and single:
            known = tuple(size if isinstance(size, float) else id(size) for size in sizes)
            where = job.leaf.rule, job.leaf.scope, job.leaf.counted, job.gradient.dtype, job.gradient.device, known
            packs.setdefault(where, ([], sizes))[0].append(job)
            continue
        flat = _flat(job, sizes) if job.plain else None
        if flat is None:
            yield Piece([job], job.gradient, present(job), sizes, large=False)
        elif longest is None or count <= longest:
            yield Piece([job], *flat, large=count >= small)
        else:
            yield from _cut(job, *flat, longest)
    for members, sizes in packs.values():
        for pack in _loads(members, longest):
            yield _packed(pack, sizes)


def _loads(jobs: list[Job], longest: int | None) -> Iterator[list[Job]]:
    """The jobs in lists of about ``longest`` entries together."""
    load: list[Job] = []
    room = longest
    for job in jobs:
        load.append(job)
        if room is not None and longest is not None:
            room -= job.gradient.numel()
            if room <= 0:
                yield load
                load, room = [], longest
    if load:
        yield load


def _packed(jobs: list[Job], sizes: tuple[Any, ...]) -> Piece:
    if len(jobs) == 1:
        return Piece(jobs, jobs[0].gradient, jobs[0].stored, sizes, large=False)
    columns = []
    for name in Buffers._fields:
        column = [getattr(job.stored, name) for job in jobs]
        if name == "count" and column[0] is not None:
            column = [count.expand(job.gradient.numel()) for count, job in zip(column, jobs, strict=True)]
        columns.append(None if column[0] is None else end_to_end(column))
    return Piece(jobs, end_to_end([job.gradient for job in jobs]), Buffers(*columns), sizes, large=False)


def _cut(job: Job, gradient: Tensor, buffers: Buffers, sizes: tuple[Any, ...], longest: int) -> Iterator[Piece]:
    for start in range(0, gradient.numel(), longest):
        stretch = slice(start, start + longest)
        part = Buffers(*(None if x is None else x[stretch] if x.dim() else x for x in buffers))
        own = tuple(size[stretch] if isinstance(size, Tensor) and size.dim() else size for size in sizes)
        yield Piece([job], gradient[stretch], part, own, large=True, start=start)


def _flat(job: Job, sizes: tuple[Any, ...]) -> tuple[Tensor, Buffers, tuple[Any, ...]] | None:
    """Gradient, buffers and sizes as vectors that share their memory; None if they are laid out differently."""
    gradient = job.gradient
    if gradient.dim() == 1 and gradient.is_contiguous():
        order = None
    else:
        order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
        if not gradient.permute(order).is_contiguous():
            return None

    def flatten(x: Any, *, copy: bool = False) -> Any:
        if not isinstance(x, Tensor) or (x.dim() == 0 and gradient.dim() > 0):
            return x
        x = x if order is None else x.permute(order)
        return x.reshape(-1) if copy or x.is_contiguous() else None

    columns = [flatten(x) for x in job.stored[:-1]]
    if any(new is None and old is not None for new, old in zip(columns, job.stored, strict=False)):
        return None
    whole = tuple(size if isinstance(size, float) or size.dim() == 0 else flatten(size, copy=True) for size in sizes)
    return flatten(gradient), Buffers._make([*columns, job.stored.count]), whole
