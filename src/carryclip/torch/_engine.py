"""One step over all parameters: gradient -> measure -> decide -> apply -> update and state.

There are three ways through a step, with the same results: in place (constant regions), the pure functions on pieces
(everything), and the pure functions compiled (large tensors, on request). Away from the CPU nothing here reads a value
back, except under ``nonfinite="raise"``.
"""

import contextlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from carryclip.algorithm import Age, Rule, Sums, Verdict, age, apply, decide, measure
from carryclip.diagnosis import LAST_STEP, Diagnosis, last_step, of_scopes
from carryclip.torch import _compiled, _inplace
from carryclip.torch._compiled import CompileMode, NotCompiledError
from carryclip.torch._inplace import ORDINARY, Scratch, Slab, UnsuitableError
from carryclip.torch._jobs import CHUNK, COMPILED_CHUNK, SMALL, Job, Piece, open_job, pieces_of, present, sizes_of
from carryclip.torch._layout import Layout, Leaf
from carryclip.torch._namespace import xp
from carryclip.torch._state import AS_COMPUTED, KEYS, Ledger, OptimizerHome, OwnHome, Storage, buffers_of


class NonFiniteGradientError(FloatingPointError):
    """A gradient was not finite under ``nonfinite="raise"``; nothing has been changed."""


class Report(NamedTuple):
    """What a step tells the outside: whether it was skipped (None: it cannot be) and the metrics if measured."""

    skip: Tensor | None
    metrics: Tensor | None


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
        self.bad_steps: Tensor | None = None
        """How often each clipped parameter was not finite."""
        self._clear: dict[tuple[int, int], list[tuple[Tensor, int]]] = {}
        """Scopes whose carry is 0 everywhere, as far as their carries have not been written since."""

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
        sizes = [rule.region.sizes(step) for rule in rules]
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
            number: _totals([part for part in parts if part.rule == number], device)
            for number, rule in enumerate(rules)
            if rule.region.joint and any(part.rule == number for part in parts)
        }
        skip = self._skip(layout, work, parts, totals, found_inf, step, device)
        self.ledger.steps += 1
        stop = host and skip is not None and bool(skip)
        verdicts: dict[int, _Verdicts] = {}
        dropped: list[Tensor] = []
        diagnoses: list[tuple[Leaf, Diagnosis]] = []
        if not stop:
            doubt = None if host else skip
            verdicts = {n: self._decide(layout, n, part, sizes[n][0], doubt) for n, part in totals.items()}
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
        metrics = _metrics(rules, parts, diagnoses, verdicts, sizes, device) if inspect else None
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
        compiled = _compiled.wanted(self.compile, layout.entries_from(self.small)) if self.compile else False
        slabs: list[Slab] = []
        leaves: list[Leaf] = []
        for number, rule in enumerate(layout.rules):
            members = layout.of_rule(number)
            if in_place and self._suits(rule, sizes[number]):
                large = [leaf for leaf in members if leaf.param.numel() >= self.small] if compiled else []
                small = [leaf for leaf in members if leaf.param.numel() < self.small] if compiled else members
                found, left = _inplace.gather(small, rule, sizes[number][0], self._carry, host=host, inspect=inspect)
                slabs += found
                members = large + left
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
        return _Work(slabs=slabs, jobs=jobs, pieces=pieces, host=host, compiled=compiled)

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

    def _measure(self, work: "_Work") -> "list[_Part]":
        """The sums of every slab and piece."""
        parts = [_Part.of_slab(slab, self._measure_slab(slab, work)) for slab in work.slabs]
        return parts + [_Part.of_piece(piece, self._measure_piece(piece, work)) for piece in work.pieces]

    def _measure_slab(self, slab: Slab, work: "_Work") -> Sums:
        rule = slab.rule
        if rule.region.joint:
            clear = work.host and self._is_clear(slab.leaves[0], work)
            return _inplace.measure_norm(slab, work.scratch, clear=clear) if work.host else _inplace.measure_norms(slab)
        if rule.nonfinite == "propagate":
            return Sums()
        return _inplace.look(slab) if work.host else Sums(bad=_inplace.bad_flags(slab))

    def _measure_piece(self, piece: Piece, work: "_Work") -> Sums:
        job = piece.jobs[0]
        if work.compiled and piece.large and job.rule.region.joint:
            with contextlib.suppress(NotCompiledError):
                return _compiled.measured(job.rule, piece.gradient, piece.buffers.carry, job.dtype)
        return measure(xp, job.rule, piece.gradient, piece.buffers.carry, job.dtype)

    def _is_clear(self, leaf: Leaf, work: "_Work") -> bool:
        """Whether the carry of the parameter's scope is known to be 0, because the last step has left it so."""
        scope = leaf.rule, leaf.scope
        if scope not in work.clear:
            seen = self._clear.get(scope)
            work.clear[scope] = seen is not None and all(carry._version == version for carry, version in seen)
        return work.clear[scope]

    # ------------------------------------------------------------------ deciding

    def _skip(
        self,
        layout: Layout,
        work: "_Work",
        parts: "list[_Part]",
        totals: "dict[int, _Totals]",
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
                overflow = ~torch.all(torch.isfinite(part.sums.total_sq))
                bad = (bad or bool(overflow)) if work.host else bad | overflow
        if layout.rules[0].nonfinite == "raise":
            guilty = bad if outside is None else bad & ~outside
            if bool(guilty):
                raise self._complaint(layout, judged, step, device)
        bad = torch.full((), bad, dtype=torch.bool, device=device) if work.host else bad
        return bad if outside is None else bad | outside

    def _complaint(self, layout: Layout, judged: "list[_Part]", step: int, device: torch.device) -> Exception:
        numbers, flags = self._culprits(layout, judged, device)
        names = [layout.leaves[n].name for n, flag in zip(numbers, flags.tolist(), strict=True) if flag]
        culprit = "; ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return NonFiniteGradientError(
            f"Step {step}: the gradient of {culprit or 'the whole vector (its norm overflows)'} is not finite. "
            "Carry, moments and parameters are unchanged. Skip the batch (optimizer.zero_grad()), or attach "
            'U-Clip with nonfinite="skip".'
        )

    def _culprits(self, layout: Layout, judged: "list[_Part]", device: torch.device) -> tuple[list[int], Tensor]:
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

    def _decide(self, layout: Layout, number: int, part: "_Totals", radius: Any, skip: Tensor | None) -> "_Verdicts":
        """Scalars per scope, and the gate's memory moved on in place."""
        rule = layout.rules[number]
        feed = memory = present = None
        if rule.gates_scopes:
            memory = feed = self.ledger.feeds[number]
            if len(part.place) < len(layout.scopes[number]):
                present = torch.tensor(list(part.place), device=memory.count.device)
                feed = type(memory)(memory.average[present], memory.count[present])
        verdict, moved = decide(xp, rule, part.sums, radius, feed, skip, part.rounding)
        if memory is not None and moved is not None:
            for stored, new in zip(memory, moved, strict=True):
                stored.copy_(new) if present is None else stored.index_copy_(0, present, new.to(stored.dtype))
        return _Verdicts(verdict, part.place)

    # ------------------------------------------------------------------ applying

    def _apply_slab(
        self, slab: Slab, work: "_Work", verdicts: "dict[int, _Verdicts]", skip: Tensor | None, *, inspect: bool
    ) -> tuple[Any, Any]:
        """Write one slab; returns (square of what was dropped, diagnosis), each None if not asked for."""
        leaf, place = slab.leaves[0], slab.gradients[0].device
        keep = None if skip is None else (~skip).to(place, slab.dtype, non_blocking=True)
        own = verdicts.get(leaf.rule)
        if own is None:
            return _inplace.clip_components(slab, keep, work.scratch, tally=self.metrics_every > 0, inspect=inspect)
        inside = work.host and not inspect and not own.clips(leaf.scope)
        if inside and (not slab.carries or self._is_clear(leaf, work)):
            work.untouched.add((leaf.rule, leaf.scope))
            return None, None
        verdict = own.of(leaf.scope, place, slab.dtype)
        return None, _inplace.clip_norm(slab, verdict.scale, verdict.keep, keep, inspect=inspect)

    def _note_clear(self, layout: Layout, work: "_Work", verdicts: "dict[int, _Verdicts]") -> None:
        """Remember the scopes whose sums were all inside, so that their carry is 0 now."""
        settled: dict[tuple[int, int], dict[int, Tensor]] = {}
        for slab in work.slabs:
            scope = slab.leaves[0].rule, slab.leaves[0].scope
            own = verdicts.get(scope[0])
            if own is None or not slab.carries or scope in work.untouched:
                continue
            self._clear.pop(scope, None)
            if slab.dtype == slab.gradients[0].dtype and not own.clips(scope[1]):
                for leaf in slab.leaves:
                    settled.setdefault(scope, {})[leaf.number] = self._carry(leaf.param, slab.dtype)
        for scope, carries in settled.items():
            if len(carries) == layout.members(*scope) and not any(carry.is_inference() for carry in carries.values()):
                self._clear[scope] = [(carry, carry._version) for carry in carries.values()]

    def _apply(
        self,
        piece: Piece,
        work: "_Work",
        verdicts: "dict[int, _Verdicts]",
        skip: Tensor | None,
        step: int,
        *,
        inspect: bool,
    ) -> tuple[Any, Any]:
        """Write one piece; returns (square of what was dropped, diagnosis), each None if not asked for."""
        job = piece.jobs[0]
        own = verdicts.get(job.leaf.rule)
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
        self, skip: Tensor | None, stop: bool | None, dropped: list[Tensor], verdicts: "dict[int, _Verdicts]"
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
            else:
                ledger.streak.zero_()
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

    def __init__(self, slabs: list[Slab], jobs: list[Job], pieces: list[Piece], *, host: bool, compiled: bool) -> None:
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
        self.scratch: Scratch = {}
        self.clocks: dict[int, Age] = {}


class _Part(NamedTuple):
    """Sums of a slab or a piece, which belong to one scope."""

    leaves: list[Leaf]
    gradients: list[Tensor]
    dtype: torch.dtype
    sums: Sums

    @classmethod
    def of_slab(cls, slab: Slab, sums: Sums) -> "_Part":
        """The sums of a slab."""
        return cls(slab.leaves, slab.gradients, slab.dtype, sums)

    @classmethod
    def of_piece(cls, piece: Piece, sums: Sums) -> "_Part":
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


class _Totals(NamedTuple):
    """Sums per scope of one rule, and where each scope that takes part is among them."""

    sums: Sums
    place: dict[int, int]
    rounding: float
    """How far, relative to its size, rounding to the narrowest gradient's type may move an update."""


class _Verdicts:
    """A rule's verdict, handed out scope by scope."""

    def __init__(self, verdict: Verdict, place: dict[int, int]) -> None:
        self.verdict = verdict
        self.place = place
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


def _totals(parts: list[_Part], device: torch.device) -> _Totals:
    """Add up the sums of a ``Norm``'s arrays within each scope that takes part."""
    place: dict[int, int] = {}
    for part in parts:
        place.setdefault(part.scope, len(place))
    where = [place[part.scope] for part in parts]
    dtype = _widest(part.dtype for part in parts)

    def total(name: str) -> Tensor | None:
        column = [getattr(part.sums, name) for part in parts]
        return None if column[0] is None else _by_scope(column, where, len(place), device, dtype)

    narrow = {part.gradients[0].dtype for part in parts if part.gradients[0].dtype != part.dtype}
    sums = Sums(None, total("total_sq"), total("carry_sq"), total("dot"))
    return _Totals(sums, place, max((torch.finfo(kind).eps / 2 for kind in narrow), default=0.0))


def _flags(judged: list[_Part], device: torch.device) -> tuple[list[int], Tensor]:
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


def _metrics(
    rules: list[Rule],
    measured: list[_Part],
    diagnoses: list[tuple[Leaf, Diagnosis]],
    verdicts: dict[int, _Verdicts],
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
