"""Whether a step counts, agreed by all ranks, and what they tell each other: one small vector per step.

The vector is summed over the ranks before anything is written. It says whether a gradient is bad, and holds the sums of
every norm that spans ranks. What is known only when a step is done (what was dropped, the sums behind the metrics)
travels with the vector of the next step: no step has a second collective, and reading metrics never waits for a rank.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from carryclip.algorithm import measure
from carryclip.diagnosis import Diagnosis
from carryclip.policy import Sums
from carryclip.scopes import Figures, Totals
from carryclip.torch._bundles import Bundle, Turn
from carryclip.torch._layout import Layout
from carryclip.torch._namespace import constant, xp
from carryclip.torch._pack import open_up, piece_of
from carryclip.torch._shards import Spread, local
from carryclip.torch._state import Home, Storage, wide, widest

Seen = list[tuple[Bundle, Sums]]
"""The bundles of a step and what was measured of each."""


class NonFiniteGradientError(FloatingPointError):
    """A gradient was not finite under ``nonfinite="raise"``; nothing has been changed."""


class Aftermath(NamedTuple):
    """What is known of a step when it is done."""

    step: int
    skip: Tensor | None
    dropped_sq: Any = None
    """Square of what this rank has dropped; None for nothing."""
    joint_sq: Any = None
    """The same of norms that span ranks, which every rank knows."""
    inspected: bool = False
    figures: Figures | None = None
    """The sums behind the metrics, if they were asked for; None if the step is known to have been skipped."""


_ANSWERS = (torch.tensor(False, device="cpu"), torch.tensor(True, device="cpu"))


class Agreement:
    """Decides whether steps count, and remembers which parameters were not finite."""

    def __init__(self, home: Home, storage: Storage) -> None:
        self.home = home
        self.storage = storage
        self.bad_steps: Tensor | None = None
        """How often each clipped parameter was not finite."""
        self.pending: Aftermath | None = None
        """Of this rank's last step, to travel with the next vector."""
        self._summed: Aftermath | None = None

    def summed(self) -> Aftermath | None:
        """The aftermath of an earlier step, summed over the ranks, if there is one that was not taken yet."""
        found, self._summed = self._summed, None
        return found

    def forget(self) -> None:
        """What was done last is of no interest any more."""
        self.pending = self._summed = None

    def culprits(self, layout: Layout) -> dict[str, int]:
        """Names of the parameters that were not finite, and in how many steps; waits for the device."""
        counts = [] if self.bad_steps is None else self.bad_steps.tolist()
        return {leaf.name: count for leaf, count in zip(layout.leaves, counts, strict=False) if count}

    # ------------------------------------------------------------------ deciding

    def skip(
        self, turn: Turn, seen: Seen, totals: Totals | None, found_inf: Tensor | None, *, talks: bool
    ) -> tuple[Tensor | None, Totals | None]:
        """Whether this step must not count, as a boolean on the device (None if nothing can stop it); and the totals.

        Where parameters are spread over ranks and ``talks``, these meet here: they decide alike, and learn each other's
        sums.
        """
        layout, spread, device = turn.layout, turn.layout.spread, turn.device
        outside = None if found_inf is None else (local(found_inf).to(device, non_blocking=True) > 0).reshape(())
        judged = [(bundle, sums) for bundle, sums in seen if sums.bad is not None and bundle.rule.can_reject]
        bad = self._bad(turn, judged) if judged else None
        if spread is not None and talks:
            if bad is None and layout.rejects:
                bad = False if turn.host else torch.zeros((), dtype=torch.bool, device=device)
            if spread.whole and bad is not None:  # norms that only this rank knows
                bad = _overflows(turn, totals, bad, only_own=True)
            bad, outside, totals = self._meet(turn, spread, bad, outside, totals)
        if bad is None:
            return outside, totals
        bad = _overflows(turn, totals, bad)
        if layout.rules[0].nonfinite == "raise":
            guilty = bad if outside is None else bad & ~outside
            if bool(guilty):
                raise self._complaint(turn, judged)
        bad = _ANSWERS[bad] if turn.host else bad
        return (bad if outside is None else bad | outside), totals

    def _bad(self, turn: Turn, judged: Seen) -> Any:
        """Whether a gradient here is bad, and a note of which."""
        if turn.host:
            bad = any([bool(sums.bad) for _, sums in judged])
            if bad:
                self._remember(turn.layout, *self._bad_leaves(turn, judged))
            return bad
        self._remember(turn.layout, *_flags(turn, judged))
        return torch.stack([sums.bad.any().to(turn.device, non_blocking=True) for _, sums in judged]).any()

    def _bad_leaves(self, turn: Turn, judged: Seen) -> tuple[list[int], Tensor]:
        """Numbers of the parameters, and whether each is bad, by a second look at each; nothing is made or written."""
        leaves = {leaf.number: leaf for bundle, _ in judged for leaf in bundle.leaves}
        flags = [torch.zeros((0,), dtype=torch.bool, device=turn.device)]
        for leaf in leaves.values():
            gradient, rule = turn.gradients[leaf.number], turn.layout.rules[leaf.rule]
            assert gradient is not None
            entries = dict(self.home.peek(leaf.param))
            opened = open_up(leaf, gradient, rule, entries, self.storage, write=False, scale=None)
            gradient, buffers = opened.gradient, piece_of(opened, None).buffers
            if rule.region.joint:
                bad = measure(xp, rule, gradient, buffers, wide(gradient.dtype)).bad
            else:
                bad = ~xp.allfinite(gradient)
            flags.append(bad.to(turn.device).reshape(1))
        return list(leaves), torch.cat(flags)

    def _complaint(self, turn: Turn, judged: Seen) -> Exception:
        numbers, flags = self._bad_leaves(turn, judged)
        names = [turn.layout.leaves[n].name for n, flag in zip(numbers, flags.tolist(), strict=True) if flag]
        culprit = "; ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        unknown = "the whole vector (its norm overflows)"
        if turn.layout.spread is not None:
            unknown = "a parameter on another rank, or the whole vector (its norm overflows)"
        return NonFiniteGradientError(
            f"Step {turn.step}: the gradient of {culprit or unknown} is not finite. "
            "Carry, moments and parameters are unchanged. Skip the batch (optimizer.zero_grad()), or attach "
            'U-Clip with nonfinite="skip".'
        )

    def _remember(self, layout: Layout, numbers: list[int], flags: Tensor) -> None:
        """Count, per parameter, the steps in which it was not finite."""
        if self.bad_steps is None:
            self.bad_steps = torch.zeros(len(layout.leaves), dtype=torch.int64, device=flags.device)
        if numbers == list(range(len(layout.leaves))):
            self.bad_steps += flags
        else:
            self.bad_steps.index_add_(0, constant(numbers, flags.device, torch.int64), flags.long())

    def move(self, old: Layout, new: Layout) -> None:
        """Param groups were added: keep the counts with their parameters."""
        if self.bad_steps is not None:
            counts = self.bad_steps
            self.bad_steps = torch.zeros(len(new.leaves), dtype=torch.int64, device=counts.device)
            places = {leaf.param: leaf.number for leaf in old.leaves}
            for leaf in new.leaves:
                if leaf.param in places:
                    self.bad_steps[leaf.number] = counts[places[leaf.param]]

    # ------------------------------------------------------------------ meeting the other ranks

    def _meet(
        self, turn: Turn, spread: Spread, bad: Any, outside: Any, totals: Totals | None
    ) -> tuple[Any, Any, Totals | None]:
        """Add up over the ranks; everything stays on the device."""
        after, self.pending = self.pending, None
        if spread.size == 1:
            self._summed = after or self._summed
            return bad, outside, totals
        # A norm of one whole tensor is the affair of the rank that has it.
        shared = turn.layout.shared
        columns = _columns(totals, shared) if totals is not None else []
        parts = [0.0 if bad is None else bad, 0.0 if outside is None else outside, *columns]
        if after is not None:
            parts.append(0.0 if after.dropped_sq is None else after.dropped_sq)
            if after.figures is not None:
                *sums, ratio = after.figures.sums
                worst = torch.zeros(spread.size, dtype=widest(turn.device), device=turn.device)
                worst[spread.rank] = ratio[0]  # a place for each rank: the largest of them cannot be had by adding
                parts += [*(column[[*shared, -1]] for column in sums), worst]
        read = _added_up(parts, turn.device, spread.group)
        any_bad, any_outside = read(1).reshape(()) > 0, read(1).reshape(()) > 0
        if totals is not None:
            totals = _filled(totals, shared, [read(len(shared)) for _ in columns])
        if after is not None:
            self._summed = self._after(after, shared, read, spread)
        known: Any = None
        if bad is not None:
            known = bool(any_bad) if turn.host else any_bad
        return known, None if outside is None else any_outside, totals

    @staticmethod
    def _after(after: Aftermath, shared: list[int], read: Callable[[int], Tensor], spread: Spread) -> Aftermath:
        """The aftermath with what the ranks have summed."""
        dropped_sq = read(1).reshape(())
        figures = after.figures
        if figures is not None:
            *columns, ratio = figures.sums
            summed = [_with(column, [*shared, -1], read(len(shared) + 1)) for column in columns]
            worst = _with(ratio, [0], read(spread.size).amax())
            figures = figures._replace(sums=Diagnosis._make([*summed, worst]))
        return after._replace(dropped_sq=dropped_sq, figures=figures)


def _flags(turn: Turn, judged: Seen) -> tuple[list[int], Tensor]:
    """Numbers of the parameters, and whether each is bad, without waiting for the device."""
    numbers, columns = [], []
    for bundle, sums in judged:
        leaves = [leaf for piece in bundle.pieces for leaf in piece.leaves]
        flags = sums.bad.reshape(-1)
        if flags.numel() < len(leaves):  # several tensors have one flag together; the norms tell which it is
            own: list[Any] = [turn.gradients[leaf.number] for leaf in leaves]
            flags = flags.any() & ~torch.isfinite(torch.stack(torch._foreach_norm(own, math.inf)))
        numbers += [leaf.number for leaf in leaves]
        columns.append(flags.to(turn.device, non_blocking=True))
    return numbers, torch.cat(columns)


def _overflows(turn: Turn, totals: Totals | None, bad: Any, *, only_own: bool = False) -> Any:
    """``bad``, or whether a norm is not finite."""
    layout = turn.layout
    if totals is None or layout.joint is None or not layout.joint.can_reject:
        return bad
    squares = totals.sums.total_sq
    if only_own:
        squares = squares[layout.own]
    elif len(layout.norms) < layout.table.width:
        squares = squares[layout.norms]
    if turn.host:
        return bad or not bool(np.isfinite(squares).all())
    return bad | ~torch.all(torch.isfinite(squares))


_SUMMED = Sums._fields[1:]


def _columns(totals: Totals, shared: list[int]) -> list[Any]:
    """What of the totals adds up over ranks: the sums of the scopes that span them, and who has a gradient."""
    columns = [getattr(totals.sums, name)[shared] for name in _SUMMED if getattr(totals.sums, name) is not None]
    return columns if totals.present is None else [*columns, totals.present[shared]]


def _filled(totals: Totals, shared: list[int], columns: Sequence[Tensor]) -> Totals:
    """The totals with other numbers in place of ``_columns``."""
    left = iter(columns)
    own = totals.sums._asdict() | {"bad": None}
    sums = Sums(**{name: None if old is None else _with(old, shared, next(left)) for name, old in own.items()})
    return totals._replace(
        sums=sums, present=None if totals.present is None else _with(totals.present, shared, next(left))
    )


def _with(column: Any, places: list[int], values: Tensor) -> Any:
    """A column of the table with other numbers in some places."""
    if isinstance(column, np.ndarray):
        found = column.copy()
        found[places] = values.numpy()
    else:
        found = column.clone()
        found[places] = values.to(column.dtype)
    return found


def _added_up(parts: list[Any], device: torch.device, group: Any) -> Callable[[int], Tensor]:
    """Numbers and small arrays end to end, summed over the ranks; returns a function that reads the next entries."""
    kind, rows = widest(device), []
    for part in parts:
        arrays = isinstance(part, (Tensor, np.ndarray))
        row = torch.as_tensor(part) if arrays else torch.tensor(part, dtype=kind, device=device)
        rows.append(row.to(device, kind, non_blocking=True).reshape(-1))
    vector = torch.cat(rows)
    dist.all_reduce(vector, group=group)
    at = 0

    def read(count: int) -> Tensor:
        nonlocal at
        at += count
        return vector[at - count : at]

    return read
