"""What the ranks of a spread model tell each other: one small vector per step, before anything is written.

It says whether the step must not count, and holds the sums of every norm. What is only known when a step is done (what
was dropped, and the sums behind the metrics) travels with the vector of the next step: no step has a second
collective, and reading metrics never waits for another rank.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from carryclip.algorithm import Sums
from carryclip.torch._scopes import Findings, Totals
from carryclip.torch._shards import Spread

_SUMMED = ("total_sq", "carry_sq", "dot")


class News(NamedTuple):
    """What one rank has to tell of a step that is done."""

    step: int
    skip: Tensor | None
    dropped_sq: Any
    """Square of what it has dropped; None for nothing."""
    joint_sq: Any
    """The same of norms that span ranks, which every rank knows."""
    inspected: bool
    """Whether the metrics were asked for."""
    findings: Findings | None
    """The sums behind them, unless the step is known to have been skipped."""


class Answer(NamedTuple):
    """What all ranks know after they have met."""

    bad: Any
    outside: Any
    totals: dict[int, Totals]


class Exchange:
    """One rank's side of it."""

    def __init__(self) -> None:
        self.news: News | None = None
        """Of this rank, to be told when they meet."""
        self._heard: News | None = None

    def heard(self) -> News | None:
        """News of an earlier step, summed over the ranks, if there are any that were not taken yet."""
        heard, self._heard = self._heard, None
        return heard

    def forget(self) -> None:
        """What was done last is of no interest any more."""
        self.news = self._heard = None

    def meet(
        self, spread: Spread, bad: Any, outside: Any, totals: dict[int, Totals], device: torch.device, *, host: bool
    ) -> Answer:
        """Add up over the ranks; everything stays on the device."""
        news, self.news = self.news, None
        if spread.size == 1:
            self._heard = news or self._heard
            return Answer(bad, outside, totals)
        kind = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        letter = _Letter(kind, device)
        letter.put(0.0 if bad is None else bad)
        letter.put(0.0 if outside is None else outside)
        # A norm of one whole tensor is the affair of the rank that has it.
        shared = {n: each for n, each in totals.items() if not (spread.whole and each.single)}
        for each in shared.values():
            for name in _SUMMED:
                if (column := getattr(each.sums, name)) is not None:
                    letter.put(column)
            if each.held is not None:
                letter.put(each.held)
        if news is not None:
            letter.put(0.0 if news.dropped_sq is None else news.dropped_sq)
            if news.findings is not None:
                for column in news.findings.columns():
                    letter.put(column)
                worst = torch.zeros(spread.size, dtype=kind, device=device)
                worst[spread.rank] = news.findings.worst
                letter.put(worst)
        vector = letter.sealed()
        dist.all_reduce(vector, group=spread.group)
        read = _Reader(vector)
        any_bad, any_outside = read.take(1).reshape(()) > 0, read.take(1).reshape(()) > 0
        summed = dict(totals)
        for n, each in shared.items():
            found = {name: read.like(column) for name in _SUMMED if (column := getattr(each.sums, name)) is not None}
            held = None if each.held is None else read.like(each.held)
            summed[n] = each._replace(sums=Sums(None, **found), held=held)
        if news is not None:
            dropped_sq = read.take(1).reshape(())
            findings = news.findings
            if findings is not None:
                columns = [read.like(column) for column in findings.columns()]
                findings = findings.filled(columns, read.take(spread.size).amax())
            self._heard = news._replace(dropped_sq=dropped_sq, findings=findings)
        return Answer(
            None if bad is None else bool(any_bad) if host else any_bad,
            None if outside is None else any_outside,
            summed,
        )


class _Letter:
    """Numbers and small tensors laid end to end."""

    def __init__(self, kind: torch.dtype, device: torch.device) -> None:
        self._kind = kind
        self._device = device
        self._parts: list[Tensor] = []

    def put(self, value: Any) -> None:
        """Add a number or a tensor."""
        if not isinstance(value, Tensor):
            value = torch.full((1,), float(value), dtype=self._kind, device=self._device)
        self._parts.append(value.to(self._device, self._kind, non_blocking=True).reshape(-1))

    def sealed(self) -> Tensor:
        """All of it."""
        return torch.cat(self._parts)


class _Reader:
    """The same, read in the same order."""

    def __init__(self, vector: Tensor) -> None:
        self._vector = vector
        self._at = 0

    def take(self, count: int) -> Tensor:
        """The next numbers."""
        self._at += count
        return self._vector[self._at - count : self._at]

    def like(self, column: Tensor) -> Tensor:
        """As many as this tensor has, in its shape and type."""
        return self.take(column.numel()).reshape(column.shape).to(column.dtype)
