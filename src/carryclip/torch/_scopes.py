"""What belongs to a whole scope: its sums, the verdict on it, and the metrics of a step."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from carryclip.algorithm import Feed, Rule, Sums, Verdict, decide
from carryclip.diagnosis import LAST_STEP, Diagnosis, last_step, of_scopes
from carryclip.torch._inplace import Slab
from carryclip.torch._jobs import Piece
from carryclip.torch._layout import Leaf
from carryclip.torch._namespace import host_xp, xp


class Part(NamedTuple):
    """Sums of a slab or a piece, which belong to one scope."""

    leaves: list[Leaf]
    gradients: list[Tensor]
    dtype: torch.dtype
    sums: Sums

    @classmethod
    def of_slab(cls, slab: Slab, sums: Sums) -> "Part":
        """The sums of a slab."""
        return cls(slab.leaves, slab.gradients, slab.dtype, sums)

    @classmethod
    def of_piece(cls, piece: Piece, sums: Sums) -> "Part":
        """The sums of a piece."""
        jobs = piece.jobs
        return cls([job.leaf for job in jobs], [job.gradient for job in jobs], jobs[0].dtype, sums)

    @property
    def rule(self) -> int:
        """Number of its rule."""
        return self.leaves[0].rule

    @property
    def scope(self) -> int:
        """Number of its scope under that rule."""
        return self.leaves[0].scope


class Totals(NamedTuple):
    """Sums per scope of one rule, and where each scope that takes part is among them."""

    sums: Sums
    place: dict[int, int]
    rounding: Any
    """How far, relative to its size, rounding to the narrowest gradient's type may move each scope's update; 0 if
    none."""


class Verdicts:
    """A rule's verdict, handed out scope by scope."""

    def __init__(self, verdict: Verdict, place: dict[int, int], *, plain: bool) -> None:
        self.verdict = verdict
        self.place = place
        self.plain = plain
        """True if nothing is carried."""
        self._scale = verdict.scale.unbind()
        self._keep = verdict.keep.unbind() if isinstance(verdict.keep, Tensor) else None
        self._clipped: list[bool] | None = None

    def clips(self, scope: int) -> bool:
        """Whether a scope is clipped; waits for the device."""
        if self._clipped is None:
            # A norm of NaN, under "propagate", is above nothing and yet leaves nothing as it was.
            self._clipped = [bool(scale != 1.0) for scale in self.verdict.scale.tolist()]
        return self._clipped[self.place[scope]]

    def of(self, scope: int, device: torch.device, dtype: torch.dtype) -> Verdict:
        """The scalars of one scope, where they are needed and in that precision."""
        k = self.place[scope]
        place = {"device": device, "dtype": dtype, "non_blocking": True}
        keep = self.verdict.keep if self._keep is None else self._keep[k].to(**place)
        return Verdict(scale=self._scale[k].to(**place), keep=keep)


def totals_of(parts: list[Part], device: torch.device) -> Totals:
    """Add up the sums of a ``Norm``'s arrays within each scope that takes part."""
    # In order, whatever order the parts come in: the gates' memory is in that order too.
    place = {scope: k for k, scope in enumerate(sorted({part.scope for part in parts}))}
    where = [place[part.scope] for part in parts]
    dtype = _widest(part.dtype for part in parts)

    def total(name: str) -> Tensor | None:
        column = [getattr(part.sums, name) for part in parts]
        return None if column[0] is None else _by_scope(column, where, len(place), device, dtype)

    rounding = [0.0] * len(place)
    for part, k in zip(parts, where, strict=True):
        kind = part.gradients[0].dtype
        if kind != part.dtype:
            rounding[k] = max(rounding[k], torch.finfo(kind).eps / 2)
    sums = Sums(None, total("total_sq"), total("carry_sq"), total("dot"))
    alike = len(set(rounding)) == 1  # nearly always, and then nothing has to reach the device
    return Totals(sums, place, rounding[0] if alike else torch.tensor(rounding, device=device, dtype=dtype))


def decided(
    rule: Rule, part: Totals, scopes: int, radius: Any, memory: Feed | None, skip: Tensor | None, *, host: bool
) -> Verdicts:
    """Scalars per scope, and the gate's memory moved on in place; ``scopes`` is how many the rule has in all."""
    feed, present = memory, None
    if memory is not None and len(part.place) < scopes:
        present = torch.tensor(list(part.place), device=memory.count.device)
        feed = Feed(memory.average[present], memory.count[present])
    if host:
        verdict, moved = _on_host(rule, part, radius, feed)
    else:
        verdict, moved = decide(xp, rule, part.sums, radius, feed, skip, part.rounding)
    if memory is not None and moved is not None:
        for stored, new in zip(memory, moved, strict=True):
            stored.copy_(new) if present is None else stored.index_copy_(0, present, new.to(stored.dtype))
    return Verdicts(verdict, part.place, plain=rule.carry is False)


def _on_host(rule: Rule, part: Totals, radius: Any, feed: Feed | None) -> tuple[Verdict, Feed | None]:
    """The same through NumPy, which takes a fraction of torch's time for a handful of numbers."""
    sums = Sums(*(None if x is None else x.numpy() for x in part.sums))
    known = None if feed is None else Feed(*(x.numpy() for x in feed))
    if not isinstance(radius, float):
        radius = np.asarray(float(radius))
    rounding = part.rounding if isinstance(part.rounding, float) else part.rounding.numpy()
    with np.errstate(all="ignore"):
        verdict, moved = decide(host_xp, rule, sums, radius, known, None, rounding)
    back = Verdict(*(torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in verdict))
    return back, None if moved is None else Feed(*(torch.as_tensor(x) for x in moved))


def metrics_of(
    rules: list[Rule],
    measured: list[Part],
    diagnoses: list[tuple[Leaf, Diagnosis]],
    verdicts: dict[int, Verdicts],
    sizes: list[tuple[Any, ...]],
    device: torch.device,
) -> Tensor:
    """The metrics of this step as one small vector; zeros if it was not taken."""
    dtype = _widest(part.dtype for part in measured)
    if not diagnoses:
        return torch.zeros(len(LAST_STEP), device=device, dtype=dtype)
    parts = []
    for number in range(len(rules)):
        members = [(leaf, d) for leaf, d in diagnoses if leaf.rule == number]
        if not members:
            continue
        joint = verdicts.get(number)
        where = [joint.place[leaf.scope] if joint else 0 for leaf, _ in members]
        width = len(joint.place) if joint else 1
        columns = [[d[k] for _, d in members] for k in range(len(Diagnosis._fields))]
        summed = [_by_scope(column, where, width, device, dtype) for column in columns[:-1]]
        worst = torch.stack([_scalar(r, device, dtype) for r in columns[-1]]).amax().reshape(1)
        part = Diagnosis._make([*summed, worst])
        if joint:
            part = of_scopes(xp, part, sizes[number][0], joint.verdict.clipped)
        parts.append(part)
    totals = [torch.cat([getattr(part, name) for part in parts]) for name in Diagnosis._fields]
    overall = Diagnosis._make([*(column.sum() for column in totals[:-1]), totals[-1].amax()])
    return torch.stack(last_step(xp, overall))


def _widest(types: Iterable[torch.dtype]) -> torch.dtype:
    return torch.float64 if torch.float64 in set(types) else torch.float32


def _scalar(value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number or a tensor of one element as a scalar on ``device``, without a copy from the host."""
    if isinstance(value, Tensor):
        return value.to(device, dtype, non_blocking=True)
    return torch.full((), _held(value, dtype), device=device, dtype=dtype)


def _held(value: float, dtype: torch.dtype) -> float:
    """A number too large for the type as infinity, which torch would refuse to make of it."""
    return value if value != value or abs(value) <= torch.finfo(dtype).max else math.copysign(math.inf, value)


def _by_scope(column: list[Any], where: list[int], width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Add up scalars that belong to the same scope, wherever they stand."""
    if all(isinstance(value, (int, float)) for value in column):
        sums = [0.0] * width
        for value, k in zip(column, where, strict=True):
            sums[k] += value
        return torch.tensor([_held(value, dtype) for value in sums], device=device, dtype=dtype)
    stacked = torch.stack([_scalar(value, device, dtype) for value in column])
    if width == 1:
        return stacked.sum().reshape(1)
    if where == list(range(width)):
        return stacked
    groups: list[list[Tensor]] = [[] for _ in range(width)]
    for value, k in zip(stacked.unbind(), where, strict=True):
        groups[k].append(value)
    return torch.stack([torch.stack(group).sum() for group in groups])
