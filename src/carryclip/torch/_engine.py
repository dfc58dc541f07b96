"""One step over all parameters: gradient -> measure -> decide -> apply -> update and state.

There are three ways through a step, with the same results: in place (constant regions), the pure functions on pieces
(everything), and the pure functions compiled (large tensors, on request). Away from the CPU nothing here reads a value
back, except under ``nonfinite="raise"``.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carryclip.algorithm import Age, Sums, age, apply, measure
from carryclip.diagnosis import LAST_STEP, Diagnosis
from carryclip.torch import _compiled, _inplace
from carryclip.torch._compiled import CompileMode, NotCompiledError
from carryclip.torch._exchange import News
from carryclip.torch._inplace import Slab, UnsuitableError
from carryclip.torch._jobs import Job, Piece
from carryclip.torch._judge import Judge
from carryclip.torch._layout import Gradients, Layout, Leaf
from carryclip.torch._namespace import xp
from carryclip.torch._scopes import Part, Verdicts, by_tensor, decided, findings_of, widest
from carryclip.torch._shards import local
from carryclip.torch._state import AS_COMPUTED, KEYS, Ledger, OptimizerHome, OwnHome, Storage
from carryclip.torch._work import Arranger, Work, kinds_of


class Measured(NamedTuple):
    """Metrics of a step as one small vector, whether it was skipped, and its number."""

    metrics: Tensor
    skip: Tensor | None
    step: int


class Report(NamedTuple):
    """What a step tells the outside.

    ``measured`` is of the step before where parameters are spread over ranks: only then have the ranks met.
    """

    skip: Tensor | None
    """Whether it was skipped; None: it cannot be."""
    measured: Measured | None


class Engine(Arranger):
    """Runs the algorithm over a layout, with buffers from a home and scalars from a ledger."""

    def __init__(
        self,
        home: OwnHome | OptimizerHome,
        ledger: Ledger,
        metrics_every: int,
        *,
        write: bool = True,
        compile: CompileMode = False,
        storage: Storage = AS_COMPUTED,
    ) -> None:
        super().__init__(home, ledger, storage, write=write, compile=compile)
        self.metrics_every = metrics_every
        self.judge = Judge(self._open)
        self._skipping = True
        """Whether the last step may have been skipped."""
        self._clear: dict[tuple[int, int], list[tuple[Leaf, Tensor, int]]] = {}
        """Scopes whose carry is 0 everywhere: their parameters, carries, and how often each was written."""

    @torch.no_grad()
    def run(
        self,
        layout: Layout,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        *,
        inspect: bool = False,
        gradients: Gradients | None = None,
    ) -> Report:
        """Clip the gradients of all parameters that have one.

        ``found_inf`` is a verdict from outside; ``grad_scale`` a loss scale still in them, when only observing;
        ``inspect`` asks for the metrics of this step; ``gradients``, by number of the parameter, are taken instead of
        those that the parameters have.
        """
        rules, step, device = layout.rules, self.ledger.steps, self.ledger.skipped.device
        # Everything that can fail for a reason of the user's comes before anything is written.
        sizes = [tuple(map(_simple, rule.region.sizes(step))) for rule in rules]
        gradients = layout.gradients() if gradients is None else gradients
        work = self._arrange(layout, gradients, sizes, grad_scale, in_place=self.write, inspect=inspect)
        spread = layout.spread
        awaited = spread is not None and (spread.whole or any(gradient is not None for gradient in gradients))
        if not (work.slabs or work.pieces or awaited):
            self.ledger.steps += 1
            return Report(None, None)
        try:
            parts = self._measure(work)
        except UnsuitableError:
            work = self._arrange(layout, gradients, sizes, grad_scale, in_place=False, inspect=inspect)
            parts = self._measure(work)
        host = work.host
        totals = self.judge.totals(layout, work, parts, device)
        talks = self.metrics_every > 0 or any(rule.can_reject or rule.region.joint for rule in rules)
        given = layout, work, parts, totals, found_inf, step, device
        skip, totals = self.judge.skip(*given, talks=talks)
        self.ledger.steps += 1
        stop = host and skip is not None and bool(skip)
        verdicts: dict[int, Verdicts] = {}
        dropped: list[Tensor] = []
        diagnoses: list[tuple[Leaf, Diagnosis]] = []
        if not stop:
            doubt, feeds = None if host else skip, self.ledger.feeds
            verdicts = {
                n: decided(rules[n], part, len(layout.scopes[n]), sizes[n][0], feeds.get(n), doubt, host=host)
                for n, part in totals.items()
            }
            for slab in work.slabs:
                told = self._apply_slab(slab, work, verdicts, doubt, inspect=inspect)
                _note(layout, slab.leaves[0], told, dropped, diagnoses)
            for piece in work.pieces:
                told = self._apply(piece, work, verdicts, doubt, step, inspect=inspect)
                _note(layout, piece.jobs[0].leaf, told, dropped, diagnoses)
            if host and verdicts:
                self._note_clear(layout, work, verdicts)
            _count_up(work.jobs, doubt)
        elif self.write:
            for slab in work.slabs:
                torch._foreach_zero_(slab.gradients)
            for job in work.jobs:
                job.gradient.zero_()
        findings = None
        if inspect and not stop:
            active = sorted({leaf.rule for leaf in layout.leaves if gradients[leaf.number] is not None})
            active = list(range(len(rules))) if spread is not None and spread.whole else active
            findings = findings_of(active, diagnoses, verdicts, sizes, device, widest(kinds_of(gradients)))
            if spread is not None and spread.whole:
                findings = findings.closed(n for n in active if by_tensor(rules[n]))
        self._count(skip, stop if host else None)
        lost = self._lost(layout, dropped, verdicts, None if host else skip)
        told = News(step, skip, *lost, inspect, findings)
        if spread is None:
            return Report(skip, self._heard(told, device))
        if talks:
            self.judge.exchange.news = told
        return Report(skip, self._heard(self.judge.exchange.heard(), device))

    def prepare(self, layout: Layout) -> None:
        """Make the buffers of all parameters that have a gradient."""
        gradients = layout.gradients()
        for leaf in layout.leaves:
            if gradients[leaf.number] is not None:
                self._open(layout, leaf, gradients, None)

    # ------------------------------------------------------------------ measuring

    def _measure(self, work: Work) -> list[Part]:
        """The sums of every slab and piece."""
        parts = [Part.of_slab(slab, self._measure_slab(slab, work)) for slab in work.slabs]
        return parts + [Part.of_piece(piece, self._measure_piece(piece, work)) for piece in work.pieces]

    def _measure_slab(self, slab: Slab, work: Work) -> Sums:
        rule = slab.rule
        if rule.region.joint:
            clear = work.host and self._is_clear(slab.leaves[0], work)
            return _inplace.measure_norm(slab, work.scratch, clear=clear) if work.host else _inplace.measure_norms(slab)
        if rule.nonfinite == "propagate":
            return Sums()
        return _inplace.look(slab, work.scratch) if work.host else Sums(bad=_inplace.bad_flags(slab))

    def _measure_piece(self, piece: Piece, work: Work) -> Sums:
        job, carry = piece.jobs[0], piece.buffers.carry
        if work.host and not job.rule.gates_scopes and job.rule.region.joint and self._is_clear(job.leaf, work):
            carry = None
        if work.compiled and piece.large and job.rule.region.joint:
            with contextlib.suppress(NotCompiledError):
                return _compiled.measured(job.rule, piece.gradient, carry, job.dtype)
        return measure(xp, job.rule, piece.gradient, carry, job.dtype)

    def _is_clear(self, member: Leaf, work: Work) -> bool:
        """Whether the carry of the parameter's scope is known to be 0, because the last step has left it so."""
        scope = member.rule, member.scope
        if scope not in work.clear:
            seen = self._clear.get(scope)
            work.clear[scope] = seen is not None and all(
                # Only look: asking for the carry would make one of another type where the model was converted.
                _here(leaf, self.home.peek(leaf.param).get(KEYS["carry"])) is carry and carry._version == version
                for leaf, carry, version in seen
            )
        return work.clear[scope]

    def forget(self) -> None:
        """Carries come from elsewhere from now on, and what was done last is of no interest any more."""
        self._clear.clear()
        self.judge.exchange.forget()

    def move(self, old: Layout, new: Layout) -> None:
        """Param groups were added."""
        self._clear.clear()
        self.judge.move(old, new)

    # ------------------------------------------------------------------ applying

    def _apply_slab(
        self, slab: Slab, work: Work, verdicts: dict[int, Verdicts], skip: Tensor | None, *, inspect: bool
    ) -> tuple[Any, Any]:
        """Write one slab; returns (square of what was dropped, diagnosis), each None if not asked for."""
        leaf, place = slab.leaves[0], slab.gradients[0].device
        keep = None if skip is None else (~skip).to(place, slab.dtype, non_blocking=True)
        own = verdicts.get(leaf.rule)
        if own is None:
            return _inplace.clip_components(slab, keep, work.scratch, tally=self.metrics_every > 0, inspect=inspect)
        if not inspect and self._is_inside(leaf, own, work):
            return None, None
        verdict = own.of(leaf.scope, place, slab.dtype)
        return None, _inplace.clip_norm(slab, verdict.scale, verdict.keep, keep, inspect=inspect)

    def _is_inside(self, leaf: Leaf, own: Verdicts, work: Work) -> bool:
        """Whether a norm leaves its scope as it is: the gradients are inside and nothing is carried."""
        if not work.host or own.clips(leaf.scope) or not (own.plain or self._is_clear(leaf, work)):
            return False
        work.untouched.add((leaf.rule, leaf.scope))
        return True

    def _note_clear(self, layout: Layout, work: Work, verdicts: dict[int, Verdicts]) -> None:
        """Remember the scopes whose sums were all inside, so that their carry is 0 now."""
        settled: dict[tuple[int, int], dict[int, tuple[Leaf, Tensor]]] = {}
        done = [(slab.leaves, slab.gradients[0], slab.dtype) for slab in work.slabs if slab.carries]
        done += [([j.leaf], j.gradient, j.dtype) for j in work.jobs if j.stored.carry is not None and j.plain]
        for leaves, gradient, dtype in done:
            scope = leaves[0].rule, leaves[0].scope
            own = verdicts.get(scope[0])
            if own is None or scope in work.untouched or layout.rules[scope[0]].nonfinite == "propagate":
                continue
            self._clear.pop(scope, None)
            if dtype == gradient.dtype and not own.clips(scope[1]):
                for leaf in leaves:
                    settled.setdefault(scope, {})[leaf.number] = leaf, self._carry(leaf, dtype)
        for scope, pairs in settled.items():
            if len(pairs) == layout.members(*scope) and not any(carry.is_inference() for _, carry in pairs.values()):
                self._clear[scope] = [(leaf, carry, carry._version) for leaf, carry in pairs.values()]

    def _apply(
        self,
        piece: Piece,
        work: Work,
        verdicts: dict[int, Verdicts],
        skip: Tensor | None,
        step: int,
        *,
        inspect: bool,
    ) -> tuple[Any, Any]:
        """Write one piece; returns (square of what was dropped, diagnosis), each None if not asked for."""
        job = piece.jobs[0]
        own = verdicts.get(job.leaf.rule)
        # Under "zero" there may be entries to remove in a piece that is inside.
        leave = own is not None and not inspect and job.rule.nonfinite != "zero"
        if leave and own is not None and self._is_inside(job.leaf, own, work):
            return None, None
        verdict = None if own is None else own.of(job.leaf.scope, job.gradient.device, job.dtype)
        skip = None if skip is None else skip.to(piece.gradient.device, non_blocking=True)
        count = piece.buffers.count
        clock = work.clocks.get(id(count)) if count is not None else Age()
        if clock is None:
            clock = work.clocks[id(count)] = age(xp, job.rule, count, job.dtype)
        narrow = any(x is not None and x.dtype != job.dtype for x in piece.buffers[:-1])
        how: dict[str, Any] = {
            "clock": clock,
            "seed": piece.seed(step) if narrow else None,
            "tally": self.metrics_every > 0,
            "inspect": inspect,
        }
        given = piece.gradient, piece.buffers, piece.sizes, verdict, skip, job.dtype
        if work.compiled and piece.large:
            with contextlib.suppress(NotCompiledError):
                return _compiled.applied(job.rule, *given, **how, write=self.write)
        outcome = apply(xp, job.rule, *given, **how)
        piece.commit(outcome.update, outcome.buffers, write=self.write)
        return outcome.dropped_sq, outcome.diagnosis

    def _count(self, skip: Tensor | None, stop: bool | None) -> None:
        """Count skipped steps; ``stop`` is the value of ``skip`` where it is known."""
        ledger = self.ledger
        if skip is None:
            return
        if stop is None:
            ledger.skipped += skip
            ledger.streak.copy_(torch.where(skip, ledger.streak + 1, 0))
        elif stop:
            ledger.skipped += 1
            ledger.streak += 1
        elif self._skipping:
            ledger.streak.zero_()
        self._skipping = stop is not False

    def _lost(
        self, layout: Layout, dropped: list[Tensor], verdicts: dict[int, Verdicts], doubt: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Squares of what this rank and what all ranks together have dropped in this step; None for nothing."""
        if self.metrics_every <= 0:
            return None, None
        kind, device = self.ledger.dropped.dtype, self.ledger.dropped.device
        own = [x.to(device, kind, non_blocking=True) for x in dropped]
        joint = []
        for number, each in verdicts.items():
            if each.verdict.dropped is not None:
                apart = layout.spread is not None and layout.spread.whole and by_tensor(layout.rules[number])
                (own if apart else joint).append(each.verdict.dropped.square().sum().to(kind))
        sums = [torch.stack(squares).sum() if squares else None for squares in (own, joint)]
        if doubt is not None:
            sums = [None if x is None else torch.where(doubt, 0.0, x) for x in sums]
        return sums[0], sums[1]

    def _heard(self, news: News | None, device: torch.device) -> Measured | None:
        """Take in what is known of a step only when it is done."""
        if news is None:
            return None
        squares = [x.to(self.ledger.dropped.dtype) for x in (news.dropped_sq, news.joint_sq) if x is not None]
        if squares:
            self.ledger.dropped += (squares[0] if len(squares) == 1 else torch.stack(squares).sum()).sqrt()
        if not news.inspected:
            return None
        if news.findings is None:
            nothing = torch.zeros(len(LAST_STEP), device=device, dtype=self.ledger.dropped.dtype)
            return Measured(nothing, news.skip, news.step)
        return Measured(news.findings.metrics(), news.skip, news.step)


def _here(leaf: Leaf, carry: Tensor | None) -> Tensor | None:
    return local(carry) if leaf.sharded and carry is not None else carry


def _note(
    layout: Layout,
    leaf: Leaf,
    told: tuple[Any, Any],
    dropped: list[Tensor],
    diagnoses: list[tuple[Leaf, Diagnosis]],
) -> None:
    """Keep what was found out about a slab or a piece, unless another rank tells it."""
    dropped_sq, diagnosis = told
    if layout.spread is None or leaf.counted:
        dropped += [] if dropped_sq is None else [dropped_sq]
        diagnoses += [] if diagnosis is None else [(leaf, diagnosis)]


def _simple(size: Any) -> Any:
    """A size without shape that is no tensor, such as NumPy's, as a plain number."""
    return size if isinstance(size, (float, Tensor)) or getattr(size, "shape", None) != () else float(size)


def _count_up(jobs: list[Job], skip: Tensor | None) -> None:
    """Count the sample, unless the step does not count."""
    counts: dict[torch.device, list[Tensor]] = {}
    for job in jobs:
        if job.stored.count is not None:
            counts.setdefault(job.stored.count.device, []).append(job.stored.count)
    for device, column in counts.items():
        if skip is None:
            torch._foreach_add_(column, 1)
        else:
            torch._foreach_add_(column, [(~skip).to(device, torch.int64, non_blocking=True)] * len(column))
