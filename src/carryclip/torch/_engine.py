"""One step over all parameters: gradient -> measure -> decide -> apply -> update and state.

There are three ways through a step, with the same results: in place (constant regions), the pure functions on pieces
(everything), and the pure functions compiled (large tensors, on request). Away from the CPU nothing here reads a value
back, except under ``nonfinite="raise"``.
"""

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carryclip.algorithm import Age, Rule, Sums, age, apply, measure
from carryclip.diagnosis import Diagnosis
from carryclip.torch import _compiled, _inplace
from carryclip.torch._compiled import CompileMode, NotCompiledError
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
from carryclip.torch._layout import Layout, Leaf
from carryclip.torch._namespace import xp
from carryclip.torch._scopes import Part, Totals, Verdicts, decided, metrics_of, totals_of
from carryclip.torch._state import AS_COMPUTED, KEYS, Ledger, OptimizerHome, OwnHome, Storage, buffers_of


class NonFiniteGradientError(FloatingPointError):
    """A gradient was not finite under ``nonfinite="raise"``; nothing has been changed."""


class Report(NamedTuple):
    """What a step tells the outside: whether it was skipped (None: it cannot be) and the metrics if measured."""

    skip: Tensor | None
    metrics: Tensor | None


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
        self._clear: dict[tuple[int, int], list[tuple[Tensor, Tensor, int]]] = {}
        """Scopes whose carry is 0 everywhere: their parameters, carries, and how often each was written."""

    @torch.no_grad()
    def run(
        self, layout: Layout, found_inf: Tensor | None, grad_scale: Tensor | None, *, inspect: bool = False
    ) -> Report:
        """Clip the gradients of all parameters that have one.

        ``found_inf`` is a verdict from outside; ``grad_scale`` a loss scale still in them, when only observing;
        ``inspect`` asks for the metrics of this step.
        """
        rules, step, device = layout.rules, self.ledger.steps, self.ledger.skipped.device
        # Everything that can fail for a reason of the user's comes before anything is written.
        sizes = [tuple(map(_simple, rule.region.sizes(step))) for rule in rules]
        work = self._arrange(layout, sizes, grad_scale, in_place=self.write, inspect=inspect)
        if not work.slabs and not work.pieces:
            self.ledger.steps += 1
            return Report(None, None)
        try:
            parts = self._measure(work)
        except UnsuitableError:
            work = self._arrange(layout, sizes, grad_scale, in_place=False, inspect=inspect)
            parts = self._measure(work)
        host = work.host
        totals = {
            number: totals_of([part for part in parts if part.rule == number], device)
            for number, rule in enumerate(rules)
            if rule.region.joint and any(part.rule == number for part in parts)
        }
        skip = self._skip(layout, work, parts, totals, found_inf, step, device)
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
                dropped_sq, diagnosis = self._apply_slab(slab, work, verdicts, doubt, inspect=inspect)
                dropped += [] if dropped_sq is None else [dropped_sq]
                diagnoses += [] if diagnosis is None else [(slab.leaves[0], diagnosis)]
            for piece in work.pieces:
                dropped_sq, diagnosis = self._apply(piece, work, verdicts, doubt, step, inspect=inspect)
                dropped += [] if dropped_sq is None else [dropped_sq]
                diagnoses += [] if diagnosis is None else [(piece.jobs[0].leaf, diagnosis)]
            if host and verdicts:
                self._note_clear(layout, work, verdicts)
            _count_up(work.jobs, doubt)
        elif self.write:
            for slab in work.slabs:
                torch._foreach_zero_(slab.gradients)
            for job in work.jobs:
                job.gradient.zero_()
        self._account(skip, stop if host else None, dropped, verdicts)
        metrics = metrics_of(rules, parts, diagnoses, verdicts, sizes, device) if inspect else None
        return Report(skip, metrics)

    # ------------------------------------------------------------------ arranging

    def _arrange(
        self,
        layout: Layout,
        sizes: list[tuple[Any, ...]],
        scale: Tensor | None,
        *,
        in_place: bool,
        inspect: bool,
    ) -> "_Work":
        """Which way each gradient takes."""
        host = self._on_host(layout)
        large = self._large(layout, sizes) if self.compile else {}
        compiled = _compiled.wanted(self.compile, sum(large.values()))
        slabs: list[Slab] = []
        leaves: list[Leaf] = []
        for number, rule in enumerate(layout.rules):
            members = layout.of_rule(number)
            if in_place and self._suits(rule, sizes[number]):
                big = [leaf for leaf in members if leaf.number in large] if compiled else []
                small = [leaf for leaf in members if leaf.number not in large] if compiled else members
                found, left = _inplace.gather(small, rule, sizes[number][0], self._carry, host=host, inspect=inspect)
                slabs += found
                members = big + left
            leaves += [leaf for leaf in members if leaf.param.grad is not None]
        entries, storage = self.home.entries, self.storage
        jobs = [
            open_job(leaf, layout.rules[leaf.rule], entries(leaf.param), storage, write=self.write, scale=scale)
            for leaf in leaves
        ]
        jobs = [job for job in jobs if job.gradient.numel()]
        fitted = [(job, sizes_of(job, sizes[job.leaf.rule])) for job in jobs]
        # Metrics must not change how a norm is added up, or a run that measures would differ in the last bits. So only
        # a compiled function for coordinates, which needs arrays in between to measure, is cut for that.
        longest = None if compiled or not host else CHUNK
        joint = [pair for pair in fitted if pair[0].rule.region.joint]
        alone = [pair for pair in fitted if not pair[0].rule.region.joint]
        pieces = list(pieces_of(joint, longest, self.small))
        longest = COMPILED_CHUNK if compiled and host and inspect else longest
        pieces += pieces_of(alone, longest, self.small)
        return _Work(slabs, jobs, pieces, self._scratch, host=host, compiled=compiled)

    def _large(self, layout: Layout, sizes: list[tuple[Any, ...]]) -> dict[int, int]:
        """Numbers of the parameters that are worth a compiled function, and how many entries their gradients have."""
        suited = [self.write and self._suits(*pair) for pair in zip(layout.rules, sizes, strict=True)]
        least = [max(self.small, self.worth) if suits else self.small for suits in suited]
        counts = {leaf: grad.numel() for leaf in layout.leaves if (grad := leaf.param.grad) is not None}
        return {leaf.number: count for leaf, count in counts.items() if count >= least[leaf.rule]}

    def _suits(self, rule: Rule, sizes: tuple[Any, ...]) -> bool:
        return _inplace.suits(rule) and self.storage.carry is None and isinstance(sizes[0], float)

    def _carry(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """The carry of a real parameter."""
        entries = self.home.entries(param)
        carry = entries.get(KEYS["carry"])
        if carry is not None and carry.dtype == dtype:
            return carry
        return buffers_of(entries, ("carry",), param, dtype, self.storage).carry

    def _on_host(self, layout: Layout) -> bool:
        """Whether values can be read without waiting: ordinary tensors in the host's memory, and no tracing."""
        tensors = [grad for leaf in layout.leaves if (grad := leaf.param.grad) is not None]
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

    def _is_clear(self, leaf: Leaf, work: "_Work") -> bool:
        """Whether the carry of the parameter's scope is known to be 0, because the last step has left it so."""
        scope = leaf.rule, leaf.scope
        if scope not in work.clear:
            seen = self._clear.get(scope)
            work.clear[scope] = seen is not None and all(
                # Only look: asking for the carry would make one of another type where the model was converted.
                self.home.peek(param).get(KEYS["carry"]) is carry and carry._version == version
                for param, carry, version in seen
            )
        return work.clear[scope]

    # ------------------------------------------------------------------ deciding

    def _skip(
        self,
        layout: Layout,
        work: "_Work",
        parts: "list[Part]",
        totals: "dict[int, Totals]",
        found_inf: Tensor | None,
        step: int,
        device: torch.device,
    ) -> Tensor | None:
        """Whether this step must not count, as a boolean on the device; None if nothing can stop it."""
        outside = None if found_inf is None else (found_inf.to(device, non_blocking=True) > 0).reshape(())
        judged = [part for part in parts if part.sums.bad is not None and layout.rules[part.rule].can_reject]
        if not judged:
            return outside
        if work.host:
            bad: Any = any(bool(part.sums.bad) for part in judged)
            if bad:
                self._remember(layout, *self._culprits(layout, judged, device))
        else:
            numbers, flags = _flags(judged, device)
            bad = torch.stack([part.sums.bad.any().to(device, non_blocking=True) for part in judged]).any()
            self._remember(layout, numbers, flags)
        for number, part in totals.items():
            if layout.rules[number].can_reject:
                if work.host:
                    bad = bad or not all(map(math.isfinite, part.sums.total_sq.tolist()))
                else:
                    bad = bad | ~torch.all(torch.isfinite(part.sums.total_sq))
        if layout.rules[0].nonfinite == "raise":
            guilty = bad if outside is None else bad & ~outside
            if bool(guilty):
                raise self._complaint(layout, judged, step, device)
        bad = _ANSWERS[bad] if work.host else bad
        return bad if outside is None else bad | outside

    def _complaint(self, layout: Layout, judged: "list[Part]", step: int, device: torch.device) -> Exception:
        numbers, flags = self._culprits(layout, judged, device)
        names = [layout.leaves[n].name for n, flag in zip(numbers, flags.tolist(), strict=True) if flag]
        culprit = "; ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return NonFiniteGradientError(
            f"Step {step}: the gradient of {culprit or 'the whole vector (its norm overflows)'} is not finite. "
            "Carry, moments and parameters are unchanged. Skip the batch (optimizer.zero_grad()), or attach "
            'U-Clip with nonfinite="skip".'
        )

    def _culprits(self, layout: Layout, judged: "list[Part]", device: torch.device) -> tuple[list[int], Tensor]:
        """Numbers of the parameters, and whether each is bad, by a second look at each."""
        leaves = {leaf.number: leaf for part in judged for leaf in part.leaves}
        flags = []
        for leaf in leaves.values():
            entries = self.home.entries(leaf.param)
            job = open_job(leaf, layout.rules[leaf.rule], entries, self.storage, write=self.write, scale=None)
            bad = measure(xp, job.rule, job.gradient, present(job).carry, job.dtype).bad
            flags.append(bad.to(device))
        return list(leaves), torch.stack(flags)

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
        settled: dict[tuple[int, int], dict[int, tuple[Tensor, Tensor]]] = {}
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
                    settled.setdefault(scope, {})[leaf.number] = leaf.param, self._carry(leaf.param, dtype)
        for scope, pairs in settled.items():
            if len(pairs) == layout.members(*scope) and not any(carry.is_inference() for _, carry in pairs.values()):
                self._clear[scope] = [(param, carry, carry._version) for param, carry in pairs.values()]

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

    def _account(
        self, skip: Tensor | None, stop: bool | None, dropped: list[Tensor], verdicts: "dict[int, Verdicts]"
    ) -> None:
        """Move the running totals on; ``stop`` is the value of ``skip`` where it is known."""
        ledger = self.ledger
        if skip is not None:
            if stop is None:
                ledger.skipped += skip
                ledger.streak.copy_(torch.where(skip, ledger.streak + 1, 0))
            elif stop:
                ledger.skipped += 1
                ledger.streak += 1
            elif self._skipping:
                ledger.streak.zero_()
            self._skipping = stop is not False
        if self.metrics_every <= 0 or stop:
            return
        kind, device = ledger.dropped.dtype, ledger.dropped.device
        squares = [x.to(device, kind, non_blocking=True) for x in dropped]
        norms = [v.verdict.dropped for v in verdicts.values() if v.verdict.dropped is not None]
        squares += [norm.square().sum().to(kind) for norm in norms]
        if squares:
            amount = torch.stack(squares).sum().sqrt()
            ledger.dropped += amount if skip is None or stop is False else torch.where(skip, 0.0, amount)


class _Work:
    """The gradients of one step, arranged."""

    def __init__(
        self, slabs: list[Slab], jobs: list[Job], pieces: list[Piece], scratch: Scratch, *, host: bool, compiled: bool
    ) -> None:
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
