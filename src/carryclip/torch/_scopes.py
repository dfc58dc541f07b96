"""What belongs to a whole scope: its sums, the verdict on it, and the metrics of a step."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from carryclip.algorithm import Feed, Rule, Sums, Verdict, decide
from carryclip.diagnosis import Diagnosis, last_step, of_scopes
from carryclip.regions import Norm
from carryclip.torch._inplace import Slab
from carryclip.torch._jobs import Piece
from carryclip.torch._layout import Leaf
from carryclip.torch._namespace import constant, host_xp, xp
from carryclip.torch._state import wide


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
    single: bool
    """Each scope is one tensor."""
    held: Tensor | None = None
    """How many gradients each scope has, where that decides whether its gate has seen a sample."""


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


def totals_of(
    rule: Rule,
    parts: list[Part],
    members: list[tuple[int, torch.dtype]],
    device: torch.device,
    scopes: Sequence[int] = (),
) -> Totals:
    """Add up the sums of a ``Norm``'s arrays within each scope that takes part.

    ``members`` are the scopes and the types of the gradients in them, of which this rank may have no part; ``scopes``
    are those that take part, if other ranks may have more members.
    """
    # In order, whatever order the parts come in: the gates' memory is in that order too.
    place = {scope: k for k, scope in enumerate(scopes or sorted({scope for scope, _ in members}))}
    where = [place[part.scope] for part in parts]
    dtype = widest(wide(kind) for _, kind in members)

    def total(name: str) -> Tensor:
        return _by_scope([getattr(part.sums, name) for part in parts], where, len(place), device, dtype)

    rounding = [0.0] * len(place)
    for scope, kind in members:
        if kind != wide(kind):
            rounding[place[scope]] = max(rounding[place[scope]], torch.finfo(kind).eps / 2)
    gates = rule.gates_scopes
    sums = Sums(None, total("total_sq"), total("carry_sq") if gates else None, total("dot") if gates else None)
    alike = len(set(rounding)) == 1  # nearly always, and then nothing has to reach the device
    spared = rounding[0] if alike else constant(rounding, device, dtype)
    held = None
    if scopes and gates:
        held = constant([sum(place[scope] == k for scope, _ in members) for k in range(len(place))], device, dtype)
    return Totals(sums, place, spared, single=by_tensor(rule), held=held)


def by_tensor(rule: Rule) -> bool:
    """Whether each tensor is a scope of its own."""
    return isinstance(rule.region, Norm) and rule.region.over == "tensor"


def decided(
    rule: Rule, part: Totals, scopes: int, radius: Any, memory: Feed | None, skip: Tensor | None, *, host: bool
) -> Verdicts:
    """Scalars per scope, and the gate's memory moved on in place; ``scopes`` is how many the rule has in all."""
    feed, present = memory, None
    if memory is not None and len(part.place) < scopes:
        present = constant(part.place, memory.count.device, torch.int64)
        feed = Feed(memory.average[present], memory.count[present])
    if host:
        verdict, moved = _on_host(rule, part, radius, feed)
    else:
        verdict, moved = decide(xp, rule, part.sums, radius, feed, skip, part.rounding)
    if memory is not None and moved is not None:
        for stored, new in zip(memory, moved, strict=True):
            if part.held is not None:
                new = torch.where(part.held > 0, new, stored)
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


class Findings(NamedTuple):
    """The sums behind the metrics of a step, by rule and scope, and what turns them into metrics."""

    sums: dict[int, Diagnosis]
    """``ratio`` is not among them."""
    worst: Tensor
    radii: dict[int, Any]
    clipped: dict[int, Tensor]
    """By rule that is a ``Norm``: its radius, and which scopes were clipped."""

    def columns(self) -> list[Tensor]:
        """All that adds up over ranks."""
        return [column for part in self.sums.values() for column in part[:-1]]

    def filled(self, columns: list[Tensor], worst: Tensor) -> "Findings":
        """The same with other numbers in place of ``columns()`` and the largest ratio."""
        left = iter(columns)
        sums = {
            number: Diagnosis._make([*(next(left) for _ in part[:-1]), part.ratio])
            for number, part in self.sums.items()
        }
        return self._replace(sums=sums, worst=worst)

    def closed(self, numbers: Iterable[int]) -> "Findings":
        """The same with these norms finished and all their scopes in one, so that ranks with other ones can add up."""
        sums, radii, clipped, ratios = dict(self.sums), dict(self.radii), dict(self.clipped), [self.worst.reshape(1)]
        for number in [number for number in numbers if number in radii]:
            part = of_scopes(xp, sums[number], radii.pop(number), clipped.pop(number))
            ratios.append(part.ratio.reshape(-1).to(self.worst.dtype))
            sums[number] = Diagnosis._make([*(column.sum().reshape(1) for column in part[:-1]), self.worst])
        return Findings(sums, torch.cat(ratios).amax(), radii, clipped)

    def metrics(self) -> Tensor:
        """The metrics as one small vector."""
        parts = self.closed(self.radii)
        totals = [
            torch.cat(columns).sum() for columns in zip(*(part[:-1] for part in parts.sums.values()), strict=True)
        ]
        overall = Diagnosis._make([*totals, parts.worst.to(totals[0].dtype)])
        return torch.stack(last_step(xp, overall))


def findings_of(
    rules: list[int],
    diagnoses: list[tuple[Leaf, Diagnosis]],
    verdicts: dict[int, Verdicts],
    sizes: list[tuple[Any, ...]],
    device: torch.device,
    dtype: torch.dtype,
) -> Findings:
    """Sum up what was seen while the step was done; ``rules`` are the numbers of those that took part."""
    sums: dict[int, Diagnosis] = {}
    ratios: list[Tensor] = [torch.zeros((), device=device, dtype=dtype)]
    for number in rules:
        members = [(leaf, d) for leaf, d in diagnoses if leaf.rule == number]
        joint = verdicts.get(number)
        where = [joint.place[leaf.scope] if joint else 0 for leaf, _ in members]
        width = len(joint.place) if joint else 1
        columns = [[d[k] for _, d in members] for k in range(len(Diagnosis._fields))]
        summed = [_by_scope(column, where, width, device, dtype) for column in columns[:-1]]
        sums[number] = Diagnosis._make([*summed, ratios[0]])
        ratios += [_scalar(ratio, device, dtype) for ratio in columns[-1]]
    return Findings(
        sums,
        torch.stack(ratios).amax(),
        {number: sizes[number][0] for number in sums if number in verdicts},
        {number: verdicts[number].verdict.clipped for number in sums if number in verdicts},
    )


def widest(types: Iterable[torch.dtype]) -> torch.dtype:
    return torch.float64 if torch.float64 in set(types) else torch.float32


def _scalar(value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number or a tensor of one element as a scalar on ``device``, without a copy from the host."""
    if isinstance(value, Tensor):
        return value.to(device, dtype, non_blocking=True)
    return torch.full((), _fitted(value, dtype), device=device, dtype=dtype)


def _fitted(value: float, dtype: torch.dtype) -> float:
    """A number too large for the type as infinity, which torch would refuse to make of it."""
    return value if value != value or abs(value) <= torch.finfo(dtype).max else math.copysign(math.inf, value)


def _by_scope(column: list[Any], where: list[int], width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Add up scalars that belong to the same scope, wherever they stand."""
    if all(isinstance(value, (int, float)) for value in column):
        sums = [0.0] * width
        for value, k in zip(column, where, strict=True):
            sums[k] += value
        return constant([_fitted(value, dtype) for value in sums], device, dtype)
    stacked = torch.stack([_scalar(value, device, dtype) for value in column])
    if width == 1:
        return stacked.sum().reshape(1)
    if where == list(range(width)):
        return stacked
    groups: list[list[Tensor]] = [[] for _ in range(width)]
    for value, k in zip(stacked.unbind(), where, strict=True):
        groups[k].append(value)
    none = torch.zeros((), device=device, dtype=dtype)
    return torch.stack([torch.stack(group).sum() if group else none for group in groups])
