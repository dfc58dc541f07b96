"""One step over all parameters: gradient -> measure -> decide -> apply -> update and state.

Nothing here reads a value back from the device, except under ``nonfinite="raise"``.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carryclip.algorithm import Sums, Verdict, apply, decide, measure
from carryclip.diagnosis import Diagnosis, last_step, of_scopes
from carryclip.torch._jobs import Job, close_job, open_job, sizes_of
from carryclip.torch._layout import Layout
from carryclip.torch._namespace import xp
from carryclip.torch._state import Ledger, OptimizerHome, OwnHome


class NonFiniteGradientError(FloatingPointError):
    """A gradient was not finite under ``nonfinite="raise"``; nothing has been changed."""


class Report(NamedTuple):
    """What a step tells the outside: whether it was skipped (None: it cannot be) and the metrics if measured."""

    skip: Tensor | None
    metrics: Tensor | None


class Engine:
    """Runs the algorithm over a layout, with buffers from a home and scalars from a ledger."""

    def __init__(
        self, home: OwnHome | OptimizerHome, ledger: Ledger, metrics_every: int, *, write: bool = True
    ) -> None:
        self.home = home
        self.ledger = ledger
        self.metrics_every = metrics_every
        self.write = write
        self.bad_steps: Tensor | None = None
        """How often each clipped parameter was not finite."""

    @torch.no_grad()
    def run(
        self, layout: Layout, found_inf: Tensor | None, grad_scale: Tensor | None, *, inspect: bool = False
    ) -> Report:
        """Clip the gradients of all parameters that have one.

        ``found_inf`` is a verdict from outside; ``grad_scale`` a loss scale still in them, when only observing;
        ``inspect`` asks for the metrics of this step.
        """
        jobs = [
            open_job(leaf, layout.rules[leaf.rule], self.home.entries(leaf.param), write=self.write, scale=grad_scale)
            for leaf in layout.leaves
            if leaf.param.grad is not None
        ]
        jobs = [job for job in jobs if job.gradient.numel()]
        step = self.ledger.steps
        if not jobs:
            self.ledger.steps += 1
            return Report(None, None)
        # Everything that can fail for a reason of the user's comes before anything is written.
        sizes = [rule.region.sizes(step) for rule in layout.rules]
        fitted = [sizes_of(job, sizes[job.leaf.rule]) for job in jobs]
        device = self.ledger.skipped.device
        sums = [measure(xp, job.rule, job.gradient, job.buffers.carry, job.dtype) for job in jobs]
        totals = {
            number: self._totals([(j, s) for j, s in zip(jobs, sums, strict=True) if j.leaf.rule == number], device)
            for number, rule in enumerate(layout.rules)
            if rule.region.joint and any(job.leaf.rule == number for job in jobs)
        }
        skip = self._skip(layout, jobs, sums, totals, found_inf, step, device)
        self.ledger.steps += 1
        verdicts = {
            number: self._decide(layout, number, part, sizes[number][0], skip) for number, part in totals.items()
        }
        dropped, diagnoses = [], []
        for job, own_sizes in zip(jobs, fitted, strict=True):
            own = job.leaf.rule
            outcome = apply(
                xp,
                job.rule,
                job.gradient,
                job.buffers,
                own_sizes,
                verdicts[own].of(job) if own in verdicts else None,
                None if skip is None else skip.to(job.gradient.device, non_blocking=True),
                job.dtype,
                tally=self.metrics_every > 0,
                inspect=inspect,
            )
            close_job(job, outcome.update, outcome.buffers, write=self.write)
            if outcome.dropped_sq is not None:
                dropped.append(outcome.dropped_sq.to(device, self.ledger.dropped.dtype, non_blocking=True))
            diagnoses.append(outcome.diagnosis)
        self._account(skip, dropped, verdicts)
        metrics = self._metrics(layout, jobs, diagnoses, verdicts, sizes, device) if inspect else None
        return Report(skip, metrics)

    def _totals(self, members: list[tuple[Job, Sums]], device: torch.device) -> "_Totals":
        """Add up the sums of a ``Norm``'s arrays within each scope that takes part."""
        present = list(dict.fromkeys(job.leaf.scope for job, _ in members))
        place = {scope: k for k, scope in enumerate(present)}
        where = [place[job.leaf.scope] for job, _ in members]
        dtype = torch.float64 if any(job.dtype == torch.float64 for job, _ in members) else torch.float32

        def total(name: str) -> Tensor | None:
            column = [getattr(sums, name) for _, sums in members]
            return None if column[0] is None else _by_scope(column, where, len(present), device, dtype)

        narrow = [torch.finfo(job.gradient.dtype).eps / 2 for job, _ in members if job.gradient.dtype != job.dtype]
        sums = Sums(None, total("total_sq"), total("carry_sq"), total("dot"))
        return _Totals(sums, present, place, max(narrow, default=0.0))

    def _skip(
        self,
        layout: Layout,
        jobs: list[Job],
        sums: list[Sums],
        totals: dict[int, "_Totals"],
        found_inf: Tensor | None,
        step: int,
        device: torch.device,
    ) -> Tensor | None:
        """Whether this step must not count, as a boolean on the device; None if nothing can stop it."""
        outside = None if found_inf is None else (found_inf.to(device, non_blocking=True) > 0).reshape(())
        judged = [(job, s.bad) for job, s in zip(jobs, sums, strict=True) if s.bad is not None and job.rule.can_reject]
        if not judged:
            return outside
        flags = torch.stack([bad.to(device, non_blocking=True) for _, bad in judged])
        self._remember_bad(layout, [job.leaf.number for job, _ in judged], flags)
        bad = torch.any(flags)
        for number, part in totals.items():
            if layout.rules[number].can_reject:
                bad = bad | ~torch.all(torch.isfinite(part.sums.total_sq))
        if layout.rules[0].nonfinite == "raise":
            guilty = bad if outside is None else bad & ~outside
            if bool(guilty):
                names = [job.leaf.name for (job, _), flag in zip(judged, flags.tolist(), strict=True) if flag]
                culprit = "; ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                raise NonFiniteGradientError(
                    f"Step {step}: the gradient of {culprit or 'the whole vector (its norm overflows)'} is not finite. "
                    "Carry, moments and parameters are unchanged. Skip the batch (optimizer.zero_grad()), or attach "
                    'U-Clip with nonfinite="skip".'
                )
        return bad if outside is None else bad | outside

    def move(self, old: Layout, new: Layout) -> None:
        """Param groups were added: keep the counts with their parameters."""
        if self.bad_steps is not None:
            counts = self.bad_steps
            self.bad_steps = torch.zeros(len(new.leaves), dtype=torch.int64, device=counts.device)
            places = {leaf.param: leaf.number for leaf in old.leaves}
            for leaf in new.leaves:
                if leaf.param in places:
                    self.bad_steps[leaf.number] = counts[places[leaf.param]]

    def _remember_bad(self, layout: Layout, numbers: list[int], flags: Tensor) -> None:
        """Count, per parameter, the steps in which it was not finite."""
        if self.bad_steps is None:
            self.bad_steps = torch.zeros(len(layout.leaves), dtype=torch.int64, device=flags.device)
        if len(numbers) == len(layout.leaves):
            self.bad_steps += flags
        else:
            self.bad_steps.index_add_(0, torch.tensor(numbers, device=flags.device), flags.long())

    def _decide(self, layout: Layout, number: int, part: "_Totals", radius: Any, skip: Tensor | None) -> "_Verdicts":
        """Scalars per scope, and the gate's memory moved on in place."""
        rule = layout.rules[number]
        feed = memory = present = None
        if rule.gates_scopes:
            memory = feed = self.ledger.feeds[number]
            if len(part.present) < len(layout.scopes[number]):
                present = torch.tensor(part.present, device=memory.count.device)
                feed = type(memory)(memory.average[present], memory.count[present])
        verdict, moved = decide(xp, rule, part.sums, radius, feed, skip, part.rounding)
        if memory is not None and moved is not None:
            for stored, new in zip(memory, moved, strict=True):
                stored.copy_(new) if present is None else stored.index_copy_(0, present, new.to(stored.dtype))
        return _Verdicts(verdict, part)

    def _account(self, skip: Tensor | None, dropped: list[Tensor], verdicts: dict[int, "_Verdicts"]) -> None:
        """Move the running totals on."""
        ledger = self.ledger
        if skip is not None:
            ledger.skipped += skip
            ledger.streak.copy_(torch.where(skip, ledger.streak + 1, 0))
        squares = dropped + [
            v.verdict.dropped.square().sum().to(ledger.dropped.dtype)
            for v in verdicts.values()
            if v.verdict.dropped is not None
        ]
        if squares and self.metrics_every > 0:
            amount = torch.stack(squares).sum().sqrt()
            ledger.dropped += amount if skip is None else torch.where(skip, 0.0, amount)

    def _metrics(
        self,
        layout: Layout,
        jobs: list[Job],
        diagnoses: list[Any],
        verdicts: dict[int, "_Verdicts"],
        sizes: list[tuple[Any, ...]],
        device: torch.device,
    ) -> Tensor:
        """The metrics of this step as one small vector."""
        dtype = torch.float64 if any(job.dtype == torch.float64 for job in jobs) else torch.float32
        parts = []
        for number in range(len(layout.rules)):
            members = [(job, d) for job, d in zip(jobs, diagnoses, strict=True) if job.leaf.rule == number]
            if not members:
                continue
            joint = verdicts.get(number)
            where = [joint.part.place[job.leaf.scope] if joint else 0 for job, _ in members]
            width = len(joint.part.present) if joint else 1
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


class _Totals(NamedTuple):
    """Sums per scope of one rule, and which scopes they are."""

    sums: Sums
    present: list[int]
    place: dict[int, int]
    rounding: float
    """How far, relative to its size, rounding to the narrowest gradient's type may move an update."""


class _Verdicts:
    """A rule's verdict, handed out scope by scope."""

    def __init__(self, verdict: Verdict, part: _Totals) -> None:
        self.verdict = verdict
        self.part = part
        self._scale = verdict.scale.unbind()
        self._keep = verdict.keep.unbind() if isinstance(verdict.keep, Tensor) else None

    def of(self, job: Job) -> Verdict:
        """The scalars for one parameter, on its device and in its precision."""
        k = self.part.place[job.leaf.scope]
        place = {"device": job.gradient.device, "dtype": job.dtype, "non_blocking": True}
        keep = self.verdict.keep if self._keep is None else self._keep[k].to(**place)
        return Verdict(scale=self._scale[k].to(**place), keep=keep)


def _scalar(value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number or a tensor of one element as a scalar on ``device``, without a copy from the host."""
    if isinstance(value, Tensor):
        return value.to(device, dtype, non_blocking=True)
    value = value if abs(value) <= torch.finfo(dtype).max else math.inf
    return torch.full((), value, device=device, dtype=dtype)


def _by_scope(column: list[Any], where: list[int], width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Add up scalars that belong to the same scope; those of one scope stand together."""
    stacked = torch.stack([_scalar(value, device, dtype) for value in column])
    if width == 1:
        return stacked.sum().reshape(1)
    if width == len(column):
        return stacked
    return torch.stack([part.sum() for part in stacked.split([where.count(k) for k in range(width)])])
