"""``Component`` and ``Norm`` written in place, on lists of tensors and without temporaries the size of the model.

The results are those of the pure functions, bit for bit where a coordinate is clipped by itself. On the CPU a slab is
as much as stays in the cache, and numbers may be looked at for nothing. Elsewhere a slab is a whole scope, every line
is one launch for many tensors, and a step that must not count is undone by arithmetic: its gradients become 0 and so
does the radius.
"""

import math
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as end_to_end

from carryclip.algorithm import Rule, Sums
from carryclip.diagnosis import Diagnosis
from carryclip.precision import truncate
from carryclip.regions import Component
from carryclip.torch._jobs import writable
from carryclip.torch._layout import Leaf
from carryclip.torch._namespace import squared_norm
from carryclip.torch._state import wide

SLAB = 1 << 20
"""Entries worked on at a time on the CPU."""
SMALL_MODEL = 1 << 20
"""Entries up to which a model's temporaries are not worth cutting it."""
LARGE = 1 << 12
"""Entries of a tensor, on average, from which fresh memory costs more than looking after the old."""
ORDINARY = {Tensor, torch.nn.Parameter}
Scratch = dict[tuple[torch.dtype, str], Tensor]
"""Memory that slabs and steps leave to the next ones: fresh memory costs more than what is written to it."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def suits(rule: Rule) -> bool:
    """Whether a rule's arithmetic can be done in place: a constant radius, and no second look at the coordinates."""
    return rule.region.joint or (type(rule.region) is Component and isinstance(rule.carry, bool))


class Slab(NamedTuple):
    """Gradients of one scope and type that are worked on together, and their carries if there are any."""

    rule: Rule
    leaves: list[Leaf]
    gradients: list[Tensor]
    carries: list[Tensor]
    dtype: torch.dtype
    """The carries' type, in which is computed."""
    radius: float


def gather(
    leaves: list[Leaf],
    own: list[Tensor | None],
    rule: Rule,
    radius: float,
    carry_of: Callable[[Leaf, torch.dtype], Tensor],
    *,
    host: bool,
    inspect: bool,
) -> tuple[list[Slab], list[Leaf]]:
    """Slabs of all the gradients that can be clipped in place, and the parameters whose gradients cannot.

    ``own`` are all gradients, by number of the parameter.
    Most often all gradients are of one kind, which is found out without looking at each by itself.
    """
    given = [(leaf, gradient) for leaf in leaves if (gradient := own[leaf.number]) is not None]
    gradients = [gradient for _, gradient in given]
    groups: dict[Any, list[tuple[Leaf, Tensor]]] = {}
    left: list[Leaf] = []
    if len({(g.dtype, g.layout, g.device) for g in gradients}) == 1 and {type(g) for g in gradients} <= ORDINARY:
        groups[()] = given
    else:
        for leaf, gradient in given:
            groups.setdefault((gradient.dtype, gradient.layout, gradient.device, type(gradient)), []).append(
                (leaf, gradient)
            )
    slabs: list[Slab] = []
    for members in groups.values():
        first = members[0][1]
        dtype = wide(first.dtype)
        fits = first.layout == torch.strided and not first.is_complex()
        # Away from the host a conversion would need a temporary, and zeroing bad entries another look at them.
        fits = fits and (host or (first.dtype == dtype and rule.nonfinite != "zero"))
        if not fits:
            left += [leaf for leaf, _ in members]
            continue
        carries = [carry_of(leaf, dtype) for leaf, _ in members] if rule.carry is not False else None
        if not all(g.numel() for _, g in members):  # nothing of it is here, yet it has a state, as on other ranks
            filled = [g.numel() > 0 for _, g in members]
            carries = None if carries is None else list(compress(carries, filled))
            members = list(compress(members, filled))
        members = [(leaf, g if g.is_contiguous() else writable(leaf.param, g)) for leaf, g in members]
        slabs += _slabs(members, carries, rule, dtype, radius, host=host, inspect=inspect)
    return slabs, left


def _slabs(
    members: list[tuple[Leaf, Tensor]],
    carries: list[Tensor] | None,
    rule: Rule,
    dtype: torch.dtype,
    radius: float,
    *,
    host: bool,
    inspect: bool,
) -> Iterator[Slab]:
    """Lists of as much as is worked on at a time; on the host large tensors are cut.

    Elsewhere a list is only cut where it has temporaries, which are then no larger than the largest tensor or a
    twentieth of the model. A norm has them always, so that measuring does not change how it is added up.
    """
    counts = [gradient.numel() for _, gradient in members]
    most = SLAB
    if not host:
        most = sum(counts)
        most = max(*counts, most // 20, SMALL_MODEL) if rule.region.joint or inspect else most
    if sum(counts) <= most and len({leaf.scope for leaf, _ in members}) == 1:  # many small tensors, most often
        leaves, gradients = [leaf for leaf, _ in members], [gradient for _, gradient in members]
        yield Slab(rule, leaves, gradients, carries or [], dtype, radius)
        return
    slab, room = None, 0
    for k, ((leaf, gradient), count) in enumerate(zip(members, counts, strict=True)):
        if count > most:
            yield from _stretches(leaf, gradient, [] if carries is None else [carries[k]], rule, dtype, radius)
            continue
        if slab is None or room < count or leaf.scope != slab.leaves[0].scope:
            if slab is not None:
                yield slab
            slab, room = Slab(rule, [], [], [], dtype, radius), most
        slab.leaves.append(leaf)
        slab.gradients.append(gradient)
        if carries is not None:
            slab.carries.append(carries[k])
        room -= count
    if slab is not None:
        yield slab


def _stretches(
    leaf: Leaf, gradient: Tensor, carries: list[Tensor], rule: Rule, dtype: torch.dtype, radius: float
) -> Iterator[Slab]:
    """A large tensor in stretches, if gradient and carry lie in memory alike; otherwise whole."""
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    rows = [x.permute(order) for x in (gradient, *carries)]
    if not all(x.is_contiguous() for x in rows):
        yield Slab(rule, [leaf], [gradient], carries, dtype, radius)
        return
    for parts in zip(*(x.view(-1).split(SLAB) for x in rows), strict=True):
        yield Slab(rule, [leaf], [parts[0]], list(parts[1:]), dtype, radius)


class UnsuitableError(Exception):
    """There are numbers among the gradients that only the pure functions get right; nothing has been written."""


def look(slab: Slab, scratch: Scratch) -> Sums:
    """Whether a slab on the host is finite: smallest and largest entry tell, and NaN is both."""
    gradients = slab.gradients
    low, high = torch.aminmax(_joined(gradients, scratch, "gradient"))
    low, high = low.item(), high.item()
    finite = math.isfinite(low) and math.isfinite(high)
    huge = finite and max(-low, high) > torch.finfo(slab.dtype).max ** 0.5 / 8
    if huge or (not finite and slab.rule.nonfinite == "zero"):
        raise UnsuitableError
    return Sums(bad=not finite)


def bad_flags(slab: Slab) -> Tensor:
    """Which of the gradients are not finite, for all at once."""
    return ~torch.isfinite(torch.stack(torch._foreach_norm(slab.gradients, float("inf"))))


def measure_norm(slab: Slab, scratch: Scratch, *, clear: bool) -> Sums:
    """The sums a ``Norm`` needs, as numbers; ``clear`` says that the carry is known to be 0 everywhere.

    ``scratch`` keeps the temporaries for the next slab.
    """
    carries = [] if clear else slab.carries
    gradient = _joined(slab.gradients, scratch, "gradient").to(slab.dtype)
    carry = _joined(carries, scratch, "carry") if carries else None
    total = gradient if carry is None else torch.add(gradient, carry, out=room(scratch, carry))
    total_sq = squared_norm(total).item()
    bad = not math.isfinite(total_sq)
    if bad and slab.rule.nonfinite == "zero":
        raise UnsuitableError
    if not slab.rule.gates_scopes:
        return Sums(bad, total_sq)
    if carry is None:
        return Sums(bad, total_sq, carry_sq=0.0, dot=0.0)
    # The sum has been measured, so that its memory may hold the product.
    dot = torch.mul(gradient, carry, out=room(scratch, carry)).sum().item()
    return Sums(bad, total_sq, carry_sq=squared_norm(carry).item(), dot=dot)


def room(scratch: Scratch, like: Tensor, use: str = "total", count: int | None = None) -> Tensor:
    """Memory for a vector like this one, or of another length; one piece for each use."""
    count = like.numel() if count is None else count
    kept = scratch.get((like.dtype, use))
    if kept is None or kept.numel() < count or kept.is_inference() != torch.is_inference_mode_enabled():
        kept = scratch[like.dtype, use] = torch.empty(count, dtype=like.dtype, device=like.device)
    return kept[:count]


def _joined(tensors: list[Tensor], scratch: Scratch, use: str) -> Tensor:
    """Tensors as one vector; where they are large, in memory that is there already."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    count = sum(tensor.numel() for tensor in tensors)
    if count < LARGE * len(tensors):
        return end_to_end(tensors)
    return torch.cat([tensor.reshape(-1) for tensor in tensors], out=room(scratch, tensors[0], use, count))


def measure_norms(slab: Slab) -> Sums:
    """The same away from the host: a launch per line, and one small vector per tensor."""
    gradients, carries = slab.gradients, slab.carries
    totals = torch._foreach_add(gradients, carries) if carries else gradients
    total_sq = _squares(totals)
    bad = ~torch.isfinite(total_sq)
    if not (slab.rule.gates_scopes and carries):
        return Sums(bad, total_sq.sum())
    del totals
    dot = end_to_end(torch._foreach_mul(gradients, carries)).sum()
    return Sums(bad, total_sq.sum(), carry_sq=_squares(carries).sum(), dot=dot)


def _squares(tensors: Any) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square()


def clip_components(
    slab: Slab, keep: Tensor | None, scratch: Scratch, *, tally: bool, inspect: bool
) -> tuple[Tensor | None, Diagnosis | None]:
    """Clip each coordinate; returns the square of what is lost if it is counted, and the sums behind the metrics.

    ``keep`` is 1, or 0 for a step that must not count; None where that is known not to be so.
    """
    narrow = slab.gradients[0].dtype
    radius = truncate(slab.radius, torch.finfo(narrow))
    # Under "propagate" an infinite number goes on as it is, unless a narrower type would make one of a finite number.
    open_ended = slab.rule.nonfinite == "propagate" and narrow == slab.dtype
    limit = radius if open_ended else min(radius, torch.finfo(narrow).max)
    gradients, carries = slab.gradients, slab.carries
    notes = _Notes(slab, radius, scratch) if inspect else None
    if keep is not None:
        _multiply_bits(gradients, keep)
    if not carries:
        lost = None
        if tally or notes:
            lost = _clip_and_count(gradients, limit, slab.dtype, notes)
        else:
            _clamp(gradients, limit)
        return lost, notes.diagnosis() if notes else None
    _add(carries, gradients)
    if keep is not None:
        _clamp(carries, torch.finfo(slab.dtype).max)  # two huge finite numbers may add up to inf
    if notes:
        notes.of_totals(carries)
    if len(gradients) > 1 and narrow == slab.dtype:
        torch._foreach_copy_(gradients, carries)
        _clamp(gradients, limit)
    else:
        for gradient, total in zip(gradients, carries, strict=True):
            if narrow == slab.dtype:
                torch.clamp(total, -limit, limit, out=gradient)
            else:
                gradient.copy_(total.clamp(-limit, limit))
    if keep is not None:
        torch._foreach_mul_(gradients, keep.to(narrow))
    _subtract(carries, gradients)
    return None, notes.diagnosis() if notes else None


class _Notes:
    """Sums behind the metrics, taken while a slab passes through the cache."""

    def __init__(self, slab: Slab, radius: float | None, scratch: Scratch) -> None:
        self.slab = slab
        self.radius = radius
        """None under a ``Norm``."""
        self.usable = radius is not None and 0.0 < radius < math.inf
        self.scratch = scratch
        gradient = self._vector(slab.gradients)
        self.grad_sq = self.total_sq = squared_norm(gradient)
        self.clipped: Any = 0.0
        self.fed: Any = 0.0
        self.weight: Any = 0.0
        if slab.carries:
            carry = self._vector(slab.carries)
            if radius is None:
                self.fed, self.weight = torch.dot(gradient, carry), squared_norm(carry)
                return
            self.weight = torch.abs(carry, out=room(scratch, carry)).sum()
            if self.usable:
                held = torch.clamp(gradient, -radius, radius, out=room(scratch, carry))
                self.fed = torch.dot(held, carry) / radius

    def _vector(self, tensors: list[Tensor]) -> Tensor:
        return (tensors[0].reshape(-1) if len(tensors) == 1 else end_to_end(tensors)).to(self.slab.dtype)

    def of_totals(self, totals: list[Tensor]) -> None:
        """G + carry is known."""
        total = self._vector(totals)
        self.total_sq = squared_norm(total)
        if self.radius is not None:
            inside = torch.clamp(total, -self.radius, self.radius, out=room(self.scratch, total))
            cut = torch.sign(torch.sub(total, inside, out=inside), out=inside)
            self.clipped = torch.dot(cut, cut)

    def diagnosis(self) -> Diagnosis:
        """Update and carry are written."""
        slab, radius = self.slab, self.radius
        update = self._vector(slab.gradients)
        size = float(update.numel())
        carry_sq: Any = 0.0
        worst: Any = 0.0
        if slab.carries:
            carry = self._vector(slab.carries)
            carry_sq = squared_norm(carry)
            if self.usable and radius is not None:
                low, high = torch.aminmax(carry)
                worst = torch.maximum(-low, high) / radius
        return Diagnosis(
            grad_sq=self.grad_sq,
            total_sq=self.total_sq,
            update_sq=squared_norm(update),
            carry_sq=carry_sq,
            radius_sq=0.0 if radius is None else radius * radius * size,
            clipped=self.clipped,
            size=size,
            fed=self.fed,
            weight=self.weight,
            ratio=worst,
        )


def _add(totals: list[Tensor], terms: list[Tensor]) -> None:
    torch._foreach_add_(totals, terms) if len(totals) > 1 else totals[0].add_(terms[0])


def _subtract(totals: list[Tensor], terms: list[Tensor]) -> None:
    torch._foreach_sub_(totals, terms) if len(totals) > 1 else totals[0].sub_(terms[0])


def _clamp(tensors: list[Tensor], limit: float) -> None:
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


def _clip_and_count(gradients: list[Tensor], limit: float, dtype: torch.dtype, notes: _Notes | None) -> Tensor:
    """Plain clipping that adds up the squares of what it cuts off."""
    lost = []
    if notes:
        notes.of_totals(gradients)
    for gradient in gradients:
        held = gradient.clamp(-limit, limit)
        rest = gradient.sub_(held) if gradient.dtype == dtype else gradient.to(dtype).sub_(held)
        bound = torch.finfo(dtype).max ** 0.5 / 4
        rest = rest.clamp_(-bound, bound).reshape(-1)
        lost.append(torch.dot(rest, rest))
        gradient.copy_(held)
    return torch.stack(lost).sum()


def clip_norm(slab: Slab, scale: Tensor, share: Any, keep: Tensor | None, *, inspect: bool) -> Diagnosis | None:
    """Scale a slab by its scope's verdict; ``share`` is the part of the rest that is carried (None: all)."""
    gradients, carries = slab.gradients, slab.carries
    notes = _Notes(slab, None, {}) if inspect else None
    if keep is not None:
        _multiply_bits(gradients, keep)
        scale = torch.where(keep > 0, scale, 0.0)
        share = share if share is None or isinstance(share, Tensor) else torch.full_like(keep, share)
        share = share if share is None else torch.where(keep > 0, share, 1.0)
    if carries:
        _add(carries, gradients)
        if notes:
            notes.of_totals(carries)
    if slab.dtype == gradients[0].dtype and (len(gradients) > 1 or not carries):
        if carries:
            torch._foreach_copy_(gradients, carries)
        torch._foreach_mul_(gradients, scale)
    else:
        for gradient, total in zip(gradients, carries or gradients, strict=True):
            _scale_into(gradient, total.to(slab.dtype), scale)
    if carries:
        _subtract(carries, gradients)
        if share is not None:
            torch._foreach_mul_(carries, share)
    return notes.diagnosis() if notes else None


def _scale_into(gradient: Tensor, total: Tensor, scale: Tensor) -> None:
    """scale·total into ``gradient``, held in the finite range of a narrower type."""
    if gradient.dtype == total.dtype:
        torch.mul(total, scale, out=gradient)
    else:
        largest = torch.finfo(gradient.dtype).max
        gradient.copy_((total * scale).clamp_(-largest, largest))


def _multiply_bits(tensors: list[Tensor], keep: Tensor) -> None:
    """Leave numbers as they are or make them 0, whatever they are: NaN·0 would be NaN, but bits know nothing of it."""
    kind = _BITS[tensors[0].element_size()]
    torch._foreach_mul_([tensor.view(kind) for tensor in tensors], keep.to(kind))
