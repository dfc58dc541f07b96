"""Buffers beside their gradients: small tensors in packs, and unusual gradients opened up.

The buffers of small tensors lie end to end in a *pack*, and ``optimizer.state[p]["uclip_..."]`` holds views of it, so
that nothing is copied but the gradients. Tried: ``torch.save`` stores the memory once, sharing survives ``torch.load``
and ``deepcopy``, and distributed checkpoints see plain entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors as in_shape

from carryclip.algorithm import Buffers, Rule
from carryclip.precision import wrapped_seed
from carryclip.torch._layout import Leaf, fitted, pick
from carryclip.torch._shards import laid_like, local, put_gradient
from carryclip.torch._state import KEYS, Entries, Storage, buffers_of, wide

Member = tuple[Leaf, Tensor]
"""A parameter and its gradient."""


class Piece(NamedTuple):
    """One array: a stretch of a tensor, a whole one, or several small ones end to end."""

    leaves: Sequence[Leaf]
    buffers: Buffers
    sizes: tuple[Any, ...] | None
    """The region's numbers for it, where they are not the same for all of its rule."""
    start: int
    """Where it begins in its tensor."""
    rows: "Opened | None" = None
    """What it was taken from, if that has rows that are absent here."""

    def seed(self, step: int) -> Any:
        """For rounding at random: by step, tensor and place in it, however the tensor is cut or packed."""
        if len(self.leaves) == 1:
            return wrapped_seed(step, self.leaves[0].number, self.start)
        seeds, lengths, start = [], [], 0
        for leaf in self.leaves:
            seeds.append(wrapped_seed(step, leaf.number, -start))  # places are counted from the beginning of the pack
            lengths.append(leaf.param.numel())
            start += lengths[-1]
        return torch.tensor(seeds, dtype=torch.int32).repeat_interleave(torch.tensor(lengths), output_size=start)


class Source(NamedTuple):
    """Where the pieces' gradients come from: one tensor, cut or not, or several small ones."""

    numbers: Sequence[int]
    order: Sequence[int] | None
    """How to permute the tensor's dimensions so that it lies in memory in one stretch; None if it does."""
    cut: int = 0
    """Entries of each piece; 0 if it is not cut."""
    pieces: int = 1
    packed: bool = False
    """Several, or one that lies oddly, are copied end to end."""
    flat: Tensor | None = None
    """Memory in which several lie end to end during a step; None if each step makes its own."""
    views: list[Tensor] | None = None
    """The same memory in the tensors' shapes."""
    whole: bool = False
    """The tensor is taken in its own shape."""
    rows: int = 0
    """The tensor is taken as so many rows, and ``cut`` counts these."""


class Opened(NamedTuple):
    """An unusual gradient and its buffers as plain real arrays: all of a parameter, or the rows of a sparse one."""

    leaf: Leaf
    gradient: Tensor
    stored: Buffers
    """The buffers of the whole parameter, into which new ones are written."""
    rows: tuple[Tensor, ...] | None


def open_up(
    leaf: Leaf, gradient: Tensor, rule: Rule, entries: Entries, storage: Storage, *, write: bool, scale: Tensor | None
) -> Opened:
    """See a parameter's gradient as plain arrays. ``scale`` is a loss scale to divide out of what is only read."""
    rows = None
    if write:
        gradient = writable(leaf.param, gradient)
    elif gradient.is_conj():
        gradient = gradient.resolve_conj()
    if gradient.is_sparse:
        _check_sparse(leaf, rule)
        gradient = gradient.coalesce()
        rows, gradient = tuple(gradient.indices()), gradient.values()
    elif gradient.layout != torch.strided:
        raise TypeError(
            f"The gradient of {leaf.name} has layout {gradient.layout}; only dense and COO ones can be clipped."
        )
    if scale is not None:
        gradient = gradient / scale
    stored = here(leaf, buffers_of(entries, rule.buffers, leaf.param, wide(gradient.dtype), storage))
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return Opened(leaf, gradient, stored, rows)


def writable(param: Tensor, gradient: Tensor) -> Tensor:
    """A gradient that can be written to; the parameter gets another one where its own cannot.

    An expanded one shares memory between its entries, an uncoalesced one has rows twice, and autograd may leave a
    conjugation, or a minus, to whoever reads it.
    """
    changed = gradient
    if gradient.is_sparse:
        changed = gradient if gradient.is_coalesced() else gradient.coalesce()
    elif gradient.is_conj() or gradient.is_neg():
        changed = gradient.resolve_conj().resolve_neg()
    elif gradient.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)
    ):
        changed = gradient.clone(memory_format=torch.contiguous_format)
    if changed is not gradient:
        put_gradient(param, changed)
    return changed


def here(leaf: Leaf, buffers: Buffers) -> Buffers:
    """The part of a parameter's buffers that is on this rank."""
    return Buffers(*(None if x is None else local(x) for x in buffers)) if leaf.sharded else buffers


def _check_sparse(leaf: Leaf, rule: Rule) -> None:
    """Rows that are absent must keep what they have, which averages counted per parameter cannot."""
    if rule.region.split:
        raise TypeError(
            f"The gradient of {leaf.name} is sparse, and {rule.region!r} keeps a norm for each of its rows. Use "
            'over="tensor", or sparse=False.'
        )
    if rule.region.estimator is not None or rule.gates_coordinates:
        kind = "moments" if rule.region.estimator is not None else "a feed average per coordinate (Gated)"
        raise TypeError(
            f"The gradient of {leaf.name} is sparse, and {rule.region!r} keeps {kind}, which rows that come and go "
            "would spoil. Use Component, Norm or Sign (with a carry other than Gated), or sparse=False."
        )


def sizes_of(leaf: Leaf, rule: Rule, sizes: tuple[Any, ...], opened: Opened | None = None) -> tuple[Any, ...]:
    """The region's numbers for one parameter, per-parameter ones picked and fitted to its shape."""
    return tuple(size if isinstance(size, float) else _size_of(leaf, rule, size, opened) for size in sizes)


def _size_of(leaf: Leaf, rule: Rule, size: Any, opened: Opened | None) -> Any:
    owner, dtype = type(rule.region).__name__, wide(leaf.param.dtype)
    if rule.region.joint and getattr(size, "shape", ()) != ():
        raise ValueError(f"{owner}: the radius must be one number, got shape {tuple(size.shape)}.")
    size = fitted(owner, pick(size, leaf), leaf)
    if isinstance(size, (int, float)):
        return float(size)
    if torch.promote_types(size.dtype, dtype) == dtype:
        size = size.to(dtype)
    if size.dim():
        size = laid_like(size, leaf.param) if leaf.sharded else size
        size = size[opened.rows] if opened is not None and opened.rows is not None else size
        size = size.unsqueeze(-1) if leaf.param.is_complex() else size
    return size


def piece_of(opened: Opened, sizes: tuple[Any, ...] | None) -> Piece:
    """An opened gradient as one piece."""
    if opened.rows is None:
        return Piece([opened.leaf], opened.stored, sizes, 0)
    carry = opened.stored.carry
    present = Buffers() if carry is None else Buffers(carry[opened.rows])
    return Piece([opened.leaf], present, sizes, 0, opened)


@dataclass(eq=False)
class Packer:
    """Puts ordinary gradients into the bundles of one plan."""

    entries: Callable[[Tensor], Entries]
    storage: Storage
    small: int
    """Tensors with fewer entries are packed."""
    memory: dict[torch.dtype, Tensor]
    """In which small gradients lie end to end during a step; plans share it, as one works at a time."""
    host: bool
    used: dict[torch.dtype, int] = field(default_factory=dict)
    """How many entries of it this plan has taken."""

    def fill(self, bundle: Any, members: list[Member], *, cut: int) -> list[Leaf]:
        """Add gradients, in stretches of ``cut`` entries (0: whole); returns the leaves of those that lie oddly."""
        if bundle.kernel.whole:
            for leaf, gradient in members:
                entries = self.entries(leaf.param)
                opened = open_up(leaf, gradient, bundle.rule, entries, self.storage, write=True, scale=None)
                bundle.sources.append(Source([leaf.number], None, whole=True))
                bundle.pieces.append(Piece([leaf], opened.stored, None, 0))
            return []
        add = self._add_rows if bundle.rule.region.split else self._add_flat
        return [leaf for leaf, _ in add(bundle, members, cut)]

    def _add_flat(self, bundle: Any, members: list[Member], cut: int) -> list[Member]:
        """Add gradients as vectors, small ones end to end; returns those that lie oddly."""
        small: list[Member] = []
        odd: list[Member] = []
        # Rounding at random goes by the place in a tensor, which for a pack is worked out on the host.
        packs = self.host or not bundle.rounds
        for leaf, gradient in members:
            if packs and gradient.numel() < self.small and not leaf.sharded:
                small.append((leaf, gradient))
            elif not self._alone(bundle, leaf, gradient, cut):
                odd.append((leaf, gradient))
        if len(small) == 1 and self._alone(bundle, *small[0], cut):
            small = []
        for some in self._loads(small, cut):
            self._packed(bundle, some)
        return odd

    def _add_rows(self, bundle: Any, members: list[Member], cut: int) -> list[Member]:
        """Add gradients as rows, those with rows of one length as one array; returns those not lying row by row."""
        odd: list[Member] = []
        by_width: dict[int, list[Member]] = {}
        for leaf, gradient in members:
            by_width.setdefault(gradient.numel() // _rows_of(leaf, gradient), []).append((leaf, gradient))
        for width, some in by_width.items():
            if len(some) > 1:
                for load in self._loads(some, cut):
                    self._packed(bundle, load, width)
                continue
            leaf, gradient = some[0]
            by_rows = leaf.axis in (None, 0) and gradient.is_contiguous()
            if not (by_rows and self._alone(bundle, leaf, gradient, cut, rows=_rows_of(leaf, gradient))):
                odd += some
        return odd

    def _alone(self, bundle: Any, leaf: Leaf, gradient: Tensor, cut: int, *, rows: int = 0) -> bool:
        """Add a tensor by itself, if gradient and buffers lie in memory alike: as a vector, or as so many rows."""
        stored = here(leaf, self._stored(bundle, leaf))
        order = None
        if not gradient.is_contiguous():
            order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
            if not gradient.permute(order).is_contiguous():
                return False
        columns = [x if x is None or order is None else x.permute(order) for x in stored[:-1]]
        if any(x is not None and not x.is_contiguous() for x in columns):
            return False
        flat = [None if x is None else x.view((rows, -1) if rows else -1) for x in columns]
        count, width = (rows, gradient.numel() // rows) if rows else (gradient.numel(), 1)
        many = max(cut // width, 1) if cut else count
        starts = range(0, count, many)
        source = Source([leaf.number], order, many if len(starts) > 1 else 0, len(starts), rows=rows)
        bundle.sources.append(source)
        for start in starts:
            part = [None if x is None else x[start : start + many] for x in flat]
            bundle.pieces.append(Piece([leaf], Buffers._make([*part, stored.count]), None, start * width))
        return True

    def _stored(self, bundle: Any, leaf: Leaf) -> Buffers:
        return buffers_of(self.entries(leaf.param), bundle.rule.buffers, leaf.param, bundle.dtype, self.storage)

    def _loads(self, leaves: list[Member], cut: int) -> list[list[Member]]:
        """Runs of parameters whose buffers lie end to end already, or do not lie in any pack, of about ``cut``."""
        runs: list[list[Member]] = []
        end, filled = None, 0
        for leaf, gradient in leaves:
            place = _pack_of(self.entries(leaf.param))
            starts, ends = (None, None) if place is None else (place, (place[0], place[1] + gradient.numel()))
            if not runs or starts != end or (cut and filled >= cut):
                runs.append([])
                filled = 0
            runs[-1].append((leaf, gradient))
            filled += gradient.numel()
            end = ends
        return runs

    def _packed(self, bundle: Any, leaves: list[Member], width: int | None = None) -> None:
        """Add small tensors end to end, or as rows of a length; their buffers become views of one pack."""
        entries = [self.entries(leaf.param) for leaf, _ in leaves]
        rows = [self._stored(bundle, leaf) for leaf, _ in leaves]
        given = list(zip(*rows, strict=True))
        columns: list[Any] = [None if column[0] is None else _end_to_end(column) for column in given]
        packed = all(flat is not None or column[0] is None for flat, column in zip(columns, given, strict=True))
        for k, (name, column) in enumerate(zip(Buffers._fields, given, strict=True)):
            if packed or column[0] is None:
                continue
            flat = torch.stack(column) if name == "count" else torch.cat([x.reshape(-1) for x in column])
            views = flat.unbind() if name == "count" else in_shape(flat, column)
            for own, view in zip(entries, views, strict=True):
                own[KEYS[name]] = view
            columns[k] = flat
        shapes = [gradient for _, gradient in leaves]
        source = Source([leaf.number for leaf, _ in leaves], None, packed=True)
        if self.host:
            flat = self._room(bundle.narrow, sum(gradient.numel() for gradient in shapes))
            views = list(in_shape(flat, shapes))
            source = source._replace(flat=flat if width is None else flat.view(-1, width), views=views)
        if width is not None:
            columns = [None if x is None else x.view(-1, width) for x in columns]
        bundle.sources.append(source)
        bundle.pieces.append(Piece([leaf for leaf, _ in leaves], Buffers(*columns), None, 0))

    def _room(self, dtype: torch.dtype, count: int) -> Tensor:
        """The next entries of the memory that is shared."""
        start = self.used.get(dtype, 0)
        self.used[dtype] = start + count
        memory = self.memory.get(dtype)
        if memory is None or memory.numel() < start + count:
            with torch.inference_mode(False):  # or it could not be written to outside of that
                memory = self.memory[dtype] = torch.empty(start + count, dtype=dtype)
        return memory[start : start + count]


def _rows_of(leaf: Leaf, gradient: Tensor) -> int:
    return 1 if leaf.axis is None else gradient.shape[0]


def _pack_of(entries: Entries) -> tuple[int, int] | None:
    """Which memory the buffers of a packed parameter lie in, and where; None if they have memory of their own."""
    found = next((entries[KEYS[name]] for name in ("carry", "mean") if KEYS[name] in entries), None)
    if found is None or found.untyped_storage().nbytes() == found.numel() * found.element_size():
        return None
    if not found.is_contiguous():
        return None
    return found.untyped_storage()._cdata, found.storage_offset()


def _end_to_end(views: Sequence[Tensor]) -> Tensor | None:
    """One vector over tensors that lie end to end in the same memory; None if they do not."""
    first = views[0]
    memory, place = first.untyped_storage()._cdata, first.storage_offset()
    for view in views:
        if not view.is_contiguous() or view.untyped_storage()._cdata != memory or view.storage_offset() != place:
            return None
        place += view.numel()
    return first.as_strided((place - first.storage_offset(),), (1,), first.storage_offset())
