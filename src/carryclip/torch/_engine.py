"""One step over all parameters: gradient -> measure -> decide -> apply -> update and state.

There are three ways through a step, with the same results: in place (constant regions), the pure functions on pieces
(everything), and the pure functions compiled (large tensors, on request). Away from the CPU nothing here reads a value
back, except under ``nonfinite="raise"``.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carryclip.algorithm import Age, Rule, Sums, age, apply, measure
from carryclip.diagnosis import LAST_STEP, Diagnosis
from carryclip.torch import _compiled, _inplace
from carryclip.torch._compiled import CompileMode, NotCompiledError
from carryclip.torch._exchange import Exchange, News
from carryclip.torch._inplace import ORDINARY, Scratch, Slab, UnsuitableError
from carryclip.torch._jobs import (
    CHUNK,
    COMPILED_CHUNK,
    SMALL,
    WORTH,
    Job,
    Piece,
    open_job,
    pieces_of,
    present,
    sizes_of,
)
from carryclip.torch._layout import Gradients, Layout, Leaf
from carryclip.torch._namespace import xp
from carryclip.torch._scopes import Part, Totals, Verdicts, by_tensor, decided, findings_of, totals_of, widest
from carryclip.torch._shards import local
from carryclip.torch._state import AS_COMPUTED, KEYS, Ledger, OptimizerHome, OwnHome, Storage, buffers_of, wide


class NonFiniteGradientError(FloatingPointError):
    """A gradient was not finite under ``nonfinite="raise"``; nothing has been changed."""


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


_ANSWERS = (torch.tensor(False, device="cpu"), torch.tensor(True, device="cpu"))


class Engine:
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
        self.home = home
        self.ledger = ledger
        self.metrics_every = metrics_every
        self.write = write
        self.compile: CompileMode = compile
        self.storage = storage
        self.small = SMALL
        self.worth = WORTH
        self.bad_steps: Tensor | None = None
        """How often each clipped parameter was not finite."""
        self._scratch: Scratch = {}
        self._skipping = True
        """Whether the last step may have been skipped."""
        self._clear: dict[tuple[int, int], list[tuple[Leaf, Tensor, int]]] = {}
        """Scopes whose carry is 0 everywhere: their parameters, carries, and how often each was written."""
        self._exchange = Exchange()

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
        talks = spread is not None and (spread.whole or any(gradient is not None for gradient in gradients))
        if not (work.slabs or work.pieces or talks):
            self.ledger.steps += 1
            return Report(None, None)
        try:
            parts = self._measure(work)
        except UnsuitableError:
            work = self._arrange(layout, gradients, sizes, grad_scale, in_place=False, inspect=inspect)
            parts = self._measure(work)
        host = work.host
        totals = self._totals(layout, work, parts, device)
        skip, totals, news = self._skip(layout, work, parts, totals, found_inf, step, device)
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
            if layout.spread is not None and layout.spread.whole:
                active = list(range(len(rules)))
            findings = findings_of(active, diagnoses, verdicts, sizes, device, widest(kinds_of(gradients)))
            if layout.spread is not None and layout.spread.whole:
                findings = findings.closed(n for n in active if by_tensor(rules[n]))
        self._count(skip, stop if host else None)
        lost = self._lost(layout, dropped, verdicts, None if host else skip)
        told = News(step, skip, *lost, inspect, findings)
        if layout.spread is None:
            news = told
        elif self._talks(layout):
            self._exchange.news = told
        return Report(skip, self._heard(news, device))

    def _talks(self, layout: Layout) -> bool:
        """Whether the ranks have anything to tell each other."""
        return self.metrics_every > 0 or any(rule.can_reject or rule.region.joint for rule in layout.rules)

    # ------------------------------------------------------------------ arranging

    def _arrange(
        self,
        layout: Layout,
        gradients: Gradients,
        sizes: list[tuple[Any, ...]],
        scale: Tensor | None,
        *,
        in_place: bool,
        inspect: bool,
    ) -> "_Work":
        """Which way each gradient takes."""
        host = self._on_host(gradients)
        large = self._large(layout, gradients, sizes) if self.compile else {}
        compiled = _compiled.wanted(self.compile, sum(large.values()))
        slabs: list[Slab] = []
        leaves: list[Leaf] = []
        for number, rule in enumerate(layout.rules):
            members = layout.of_rule(number)
            if in_place and self._suits(rule, sizes[number]):
                big = [leaf for leaf in members if leaf.number in large] if compiled else []
                small = [leaf for leaf in members if leaf.number not in large] if compiled else members
                for some in (small,) if layout.spread is None else _split(small):
                    given = some, gradients, rule, sizes[number][0], self._carry
                    found, left = _inplace.gather(*given, host=host, inspect=inspect)
                    slabs += found
                    big = big + left
                members = big
            leaves += [leaf for leaf in members if gradients[leaf.number] is not None]
        jobs = [self._open(layout, leaf, gradients, scale) for leaf in leaves]
        # Those of which nothing is here are not worked on, but their samples are counted, as on other ranks.
        fitted = [(job, sizes_of(job, sizes[job.leaf.rule])) for job in jobs if job.gradient.numel()]
        # Metrics must not change how a norm is added up, or a run that measures would differ in the last bits. So only
        # a compiled function for coordinates, which needs arrays in between to measure, is cut for that.
        longest = None if compiled or not host else CHUNK
        joint = [pair for pair in fitted if pair[0].rule.region.joint]
        alone = [pair for pair in fitted if not pair[0].rule.region.joint]
        pieces = list(pieces_of(joint, longest, self.small))
        longest = COMPILED_CHUNK if compiled and host and inspect else longest
        pieces += pieces_of(alone, longest, self.small)
        return _Work(gradients, slabs, jobs, pieces, self._scratch, host=host, compiled=compiled)

    def _open(self, layout: Layout, leaf: Leaf, gradients: Gradients, scale: Tensor | None) -> Job:
        entries = self.home.entries(leaf.param)
        gradient = gradients[leaf.number]
        assert gradient is not None
        return open_job(leaf, gradient, layout.rules[leaf.rule], entries, self.storage, write=self.write, scale=scale)

    def _large(self, layout: Layout, gradients: Gradients, sizes: list[tuple[Any, ...]]) -> dict[int, int]:
        """Numbers of the parameters that are worth a compiled function, and how many entries their gradients have."""
        suited = [self.write and self._suits(*pair) for pair in zip(layout.rules, sizes, strict=True)]
        least = [max(self.small, self.worth) if suits else self.small for suits in suited]
        pairs = zip(layout.leaves, gradients, strict=True)
        counts = {leaf: gradient.numel() for leaf, gradient in pairs if gradient is not None}
        return {leaf.number: count for leaf, count in counts.items() if count >= least[leaf.rule]}

    def _suits(self, rule: Rule, sizes: tuple[Any, ...]) -> bool:
        return _inplace.suits(rule) and self.storage.carry is None and isinstance(sizes[0], float)

    def _carry(self, leaf: Leaf, dtype: torch.dtype) -> Tensor:
        """The carry of a real parameter, as far as it is here."""
        entries = self.home.entries(leaf.param)
        carry = entries.get(KEYS["carry"])
        if carry is None or carry.dtype != dtype:
            carry = buffers_of(entries, ("carry",), leaf.param, dtype, self.storage).carry
        return local(carry) if leaf.sharded else carry

    def _on_host(self, gradients: Gradients) -> bool:
        """Whether values can be read without waiting: ordinary tensors in the host's memory, and no tracing."""
        tensors = [gradient for gradient in gradients if gradient is not None]
        tensors.append(self.ledger.skipped)
        ordinary = {type(tensor) for tensor in tensors} <= ORDINARY
        return ordinary and all(tensor.is_cpu for tensor in tensors) and not torch.compiler.is_compiling()

    # ------------------------------------------------------------------ measuring

    def _measure(self, work: "_Work") -> "list[Part]":
        """The sums of every slab and piece."""
        parts = [Part.of_slab(slab, self._measure_slab(slab, work)) for slab in work.slabs]
        return parts + [Part.of_piece(piece, self._measure_piece(piece, work)) for piece in work.pieces]

    def _measure_slab(self, slab: Slab, work: "_Work") -> Sums:
        rule = slab.rule
        if rule.region.joint:
            clear = work.host and self._is_clear(slab.leaves[0], work)
            return _inplace.measure_norm(slab, work.scratch, clear=clear) if work.host else _inplace.measure_norms(slab)
        if rule.nonfinite == "propagate":
            return Sums()
        return _inplace.look(slab, work.scratch) if work.host else Sums(bad=_inplace.bad_flags(slab))

    def _measure_piece(self, piece: Piece, work: "_Work") -> Sums:
        job, carry = piece.jobs[0], piece.buffers.carry
        if work.host and not job.rule.gates_scopes and job.rule.region.joint and self._is_clear(job.leaf, work):
            carry = None
        if work.compiled and piece.large and job.rule.region.joint:
            with contextlib.suppress(NotCompiledError):
                return _compiled.measured(job.rule, piece.gradient, carry, job.dtype)
        return measure(xp, job.rule, piece.gradient, carry, job.dtype)

    def _is_clear(self, member: Leaf, work: "_Work") -> bool:
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

    # ------------------------------------------------------------------ deciding

    def _totals(self, layout: Layout, work: "_Work", parts: "list[Part]", device: torch.device) -> "dict[int, Totals]":
        """The sums of every norm that takes part, as far as this rank counts them."""
        found = {}
        for number, rule in enumerate(layout.rules):
            if not rule.region.joint:
                continue
            own = [part for part in parts if part.rule == number]
            members = [(part.scope, part.gradients[0].dtype) for part in own]
            scopes: Sequence[int] = ()
            if layout.spread is not None and layout.spread.whole and not by_tensor(rule):
                scopes = range(len(layout.scopes[number]))  # also those of which only other ranks have gradients
            elif layout.spread is not None:
                pairs = [(leaf, work.gradients[leaf.number]) for leaf in layout.of_rule(number)]
                members = [(leaf.scope, gradient.dtype.to_real()) for leaf, gradient in pairs if gradient is not None]
                own = [part for part in own if part.leaves[0].counted]
            if members or scopes:
                found[number] = totals_of(rule, own, members, device, scopes)
        return found

    def _skip(
        self,
        layout: Layout,
        work: "_Work",
        parts: "list[Part]",
        totals: "dict[int, Totals]",
        found_inf: Tensor | None,
        step: int,
        device: torch.device,
    ) -> "tuple[Tensor | None, dict[int, Totals], News | None]":
        """Whether this step must not count, as a boolean on the device; None if nothing can stop it.

        Where parameters are spread over ranks, these meet here: they decide alike, and learn each other's sums.
        """
        outside = None if found_inf is None else (local(found_inf).to(device, non_blocking=True) > 0).reshape(())
        judged = [part for part in parts if part.sums.bad is not None and layout.rules[part.rule].can_reject]
        bad: Any = None
        if judged and work.host:
            bad = any(bool(part.sums.bad) for part in judged)
            if bad:
                self._remember(layout, *self._culprits(layout, work, judged, device))
        elif judged:
            numbers, flags = _flags(judged, device)
            bad = torch.stack([part.sums.bad.any().to(device, non_blocking=True) for part in judged]).any()
            self._remember(layout, numbers, flags)
        news = None
        if layout.spread is not None and self._talks(layout):
            if bad is None and any(rule.can_reject for rule in layout.rules):
                bad = False if work.host else torch.zeros((), dtype=torch.bool, device=device)
            bad, outside, totals, news = self._exchange.meet(
                layout.spread, bad, outside, totals, device, host=work.host
            )
        if bad is None:
            return outside, totals, news
        for number, part in totals.items():
            if layout.rules[number].can_reject:
                if work.host:
                    bad = bad or not all(map(math.isfinite, part.sums.total_sq.tolist()))
                else:
                    bad = bad | ~torch.all(torch.isfinite(part.sums.total_sq))
        if layout.rules[0].nonfinite == "raise":
            guilty = bad if outside is None else bad & ~outside
            if bool(guilty):
                raise self._complaint(layout, work, judged, step, device)
        bad = _ANSWERS[bad] if work.host else bad
        return (bad if outside is None else bad | outside), totals, news

    def _complaint(
        self, layout: Layout, work: "_Work", judged: "list[Part]", step: int, device: torch.device
    ) -> Exception:
        numbers, flags = self._culprits(layout, work, judged, device)
        names = [layout.leaves[n].name for n, flag in zip(numbers, flags.tolist(), strict=True) if flag]
        culprit = "; ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        unknown = "the whole vector (its norm overflows)"
        if layout.spread is not None:
            unknown = "a parameter on another rank, or the whole vector (its norm overflows)"
        return NonFiniteGradientError(
            f"Step {step}: the gradient of {culprit or unknown} is not finite. "
            "Carry, moments and parameters are unchanged. Skip the batch (optimizer.zero_grad()), or attach "
            'U-Clip with nonfinite="skip".'
        )

    def _culprits(
        self, layout: Layout, work: "_Work", judged: "list[Part]", device: torch.device
    ) -> tuple[list[int], Tensor]:
        """Numbers of the parameters, and whether each is bad, by a second look at each."""
        leaves = {leaf.number: leaf for part in judged for leaf in part.leaves}
        flags = [torch.zeros((0,), dtype=torch.bool, device=device)]
        for leaf in leaves.values():
            job = self._open(layout, leaf, work.gradients, None)
            bad = measure(xp, job.rule, job.gradient, present(job).carry, job.dtype).bad
            flags.append(bad.to(device).reshape(1))
        return list(leaves), torch.cat(flags)

    def move(self, old: Layout, new: Layout) -> None:
        """Param groups were added: keep the counts with their parameters."""
        self.forget_clear()
        if self.bad_steps is not None:
            counts = self.bad_steps
            self.bad_steps = torch.zeros(len(new.leaves), dtype=torch.int64, device=counts.device)
            places = {leaf.param: leaf.number for leaf in old.leaves}
            for leaf in new.leaves:
                if leaf.param in places:
                    self.bad_steps[leaf.number] = counts[places[leaf.param]]

    def forget_clear(self) -> None:
        """Carries may have come from elsewhere."""
        self._clear.clear()

    def forget_news(self) -> None:
        """What was done last is of no interest any more."""
        self._exchange.news = None

    def _remember(self, layout: Layout, numbers: list[int], flags: Tensor) -> None:
        """Count, per parameter, the steps in which it was not finite."""
        if self.bad_steps is None:
            self.bad_steps = torch.zeros(len(layout.leaves), dtype=torch.int64, device=flags.device)
        if numbers == list(range(len(layout.leaves))):
            self.bad_steps += flags
        else:
            self.bad_steps.index_add_(0, torch.tensor(numbers, device=flags.device), flags.long())

    # ------------------------------------------------------------------ applying

    def _apply_slab(
        self, slab: Slab, work: "_Work", verdicts: "dict[int, Verdicts]", skip: Tensor | None, *, inspect: bool
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

    def _is_inside(self, leaf: Leaf, own: Verdicts, work: "_Work") -> bool:
        """Whether a norm leaves its scope as it is: the gradients are inside and nothing is carried."""
        if not work.host or own.clips(leaf.scope) or not (own.plain or self._is_clear(leaf, work)):
            return False
        work.untouched.add((leaf.rule, leaf.scope))
        return True

    def _note_clear(self, layout: Layout, work: "_Work", verdicts: "dict[int, Verdicts]") -> None:
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
        work: "_Work",
        verdicts: "dict[int, Verdicts]",
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
        self, layout: Layout, dropped: list[Tensor], verdicts: "dict[int, Verdicts]", doubt: Tensor | None
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


class _Work:
    """The gradients of one step, arranged."""

    def __init__(
        self,
        gradients: Gradients,
        slabs: list[Slab],
        jobs: list[Job],
        pieces: list[Piece],
        scratch: Scratch,
        *,
        host: bool,
        compiled: bool,
    ) -> None:
        self.gradients = gradients
        self.slabs = slabs
        self.jobs = jobs
        """What the pieces are cut from."""
        self.pieces = pieces
        self.host = host
        """All values can be read for nothing."""
        self.compiled = compiled
        self.clear: dict[tuple[int, int], bool] = {}
        self.untouched: set[tuple[int, int]] = set()
        """Scopes whose carry is 0 and whose gradients are inside, so that nothing is written."""
        self.scratch = scratch
        self.clocks: dict[int, Age] = {}


def kinds_of(gradients: Gradients) -> set[torch.dtype]:
    """The types in which steps compute."""
    return {wide(kind) for kind in {gradient.dtype for gradient in gradients if gradient is not None}}


def _split(leaves: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
    """Those that this rank counts, and those that another one does."""
    return [leaf for leaf in leaves if leaf.counted], [leaf for leaf in leaves if not leaf.counted]


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


def _flags(judged: list[Part], device: torch.device) -> tuple[list[int], Tensor]:
    """Numbers of the parameters, and whether each is bad, without waiting for the device."""
    numbers, columns = [], []
    for part in judged:
        flags = part.sums.bad.reshape(-1)
        if flags.numel() < len(part.leaves):  # packed ones have one flag together; the norms tell which it is
            norms = torch._foreach_norm(part.gradients, math.inf)
            flags = flags & ~torch.isfinite(torch.stack(norms))
        numbers += [leaf.number for leaf in part.leaves]
        columns.append(flags.to(device, non_blocking=True))
    return numbers, torch.cat(columns)
