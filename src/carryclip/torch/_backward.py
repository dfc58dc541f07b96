"""Gradients of one backward pass by itself: where they come from, and how they go on when they are clipped.

What a pass has done to the carry is tried before it is kept: it counts only if the optimizer then takes its step.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from carryclip.carry import CarryPolicy
from carryclip.judgement import Traits
from carryclip.torch._layout import Gradients, Layout
from carryclip.torch._pack import writable
from carryclip.torch._state import Ledger, OwnHome
from carryclip.torch._step import Measured, Stepper
from carryclip.torch._watch import Watch

Average = torch.futures.Future[Tensor]
"""A bucket that is being averaged."""


class Stage:
    """Clips backward passes, with two sets of buffers and scalars: of the last step taken, and of the one under way."""

    def __init__(
        self, layout: Layout, carry: CarryPolicy, where: str, metrics_every: int, scaler: Any, traits: Traits
    ) -> None:
        self.layout = layout
        self.kept, self.ledger = OwnHome(), Ledger(layout)
        self.trial, self.trial_ledger = OwnHome(), Ledger(layout)
        self.stepper = Stepper(self.trial, self.trial_ledger, metrics_every)
        self.watch = Watch(self.ledger, where, carry, traits, quiet=False)
        self.measured: Measured | None = None
        """The metrics of the step under way."""
        self.open = False
        """A step is under way: there is something to keep, or to forget."""
        self._drops = carry is not True
        self.scaler = scaler

    @torch.no_grad()
    def begin(self) -> None:
        """Start from what is kept; what was tried and not kept is forgotten."""
        for param, entries in self.trial.state.items():
            for key in [key for key in entries if key not in self.kept.peek(param)]:
                del entries[key]
        _copy(self.kept, self.trial)
        self.trial_ledger.follow(self.ledger)
        self.open = True

    @torch.no_grad()
    def clip(self, gradients: Gradients, memory: list[Tensor], *, last: bool) -> None:
        """Clip a backward pass or a part of it, in place and at its true size; ``memory`` is where the gradients lie.

        One that is bad leaves a NaN in it, which is still seen when others have been added or averaged.
        """
        scale = self.scaler._scale if self.scaler is not None and self.scaler.is_enabled() else None
        if scale is not None:
            _multiply(memory, scale.double().reciprocal())
        self.trial_ledger.steps = self.ledger.steps  # the parts of a pass are of one step
        report = self.stepper.run(self.layout, None, None, inspect=last and self._measures(), gradients=gradients)
        if report.measured is not None:
            self.measured = report.measured
        if self.stepper.planner.shut:
            self.watch.note_shut(self.ledger.steps, self.stepper.planner.shut[0].region)
        if scale is not None:
            _multiply(memory, scale)
        # In a gradient that is clipped: a bucket also has those of parameters that nobody looks at before the step.
        first = next((gradient for gradient in gradients if gradient is not None and gradient.numel()), None)
        if report.skip is not None and first is not None:
            bad = report.skip.to(first.device, non_blocking=True)
            first[(0,) * first.dim()].add_(torch.where(bad, torch.nan, 0.0).to(first.dtype))

    def _measures(self) -> bool:
        every = self.stepper.metrics_every
        return every > 0 and ((self.ledger.steps + 1) % every == 0 or not self.watch.measured)

    @property
    def needs_all(self) -> bool:
        """Whether this pass must be seen as a whole: for a norm, metrics, or the tally of what is dropped."""
        tallies = self._drops and self.stepper.metrics_every > 0
        return tallies or self._measures() or self.layout.joint is not None

    @torch.no_grad()
    def keep(self, unless: Tensor | None) -> None:
        """Make it count, unless this is true; None where it is known to count.

        Parameters without a gradient keep what they had, because what was sent on their behalf went nowhere: DDP shows
        a parameter to its hook even if no rank has used it.
        """
        self.open = False
        for leaf in self.layout.leaves:
            if leaf.param.grad is None:
                self.trial.state.pop(leaf.param, None)
        _copy(self.trial, self.kept, unless)
        self.ledger.follow(self.trial_ledger, counts=False, unless=unless)


def _copy(source: OwnHome, target: OwnHome, unless: Tensor | None = None) -> None:
    """Copy all buffers, unless this is true."""
    old: list[Tensor] = []
    new: list[Tensor] = []
    for param, entries in source.state.items():
        mine = target.entries(param)
        for key, value in entries.items():
            if unless is not None:
                before = mine.get(key, torch.zeros_like(value))
                mine[key] = torch.where(unless.to(value.device, non_blocking=True), before, value)
            elif key in mine and mine[key].dtype == value.dtype:
                old.append(mine[key])
                new.append(value)
            else:
                mine[key] = value.clone()
    if old:
        torch._foreach_copy_(old, new)


def _multiply(memory: list[Tensor], factor: Tensor) -> None:
    for part in memory:
        part.mul_(factor.to(part.device, part.dtype, non_blocking=True))


class Source:
    """Where gradients come from: something that is told when one is about to be added to a parameter's."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.leaves = stage.layout.leaves
        self._pass = -1
        """The latest backward pass; numbers grow, but where one runs inside another it goes back to an older one."""
        self._handles: list[Any] = []
        for leaf in self.leaves:
            # A frozen parameter takes no hook, and needs one for the day on which it is trained.
            needs_gradient = leaf.param.requires_grad
            leaf.param.requires_grad_(True)
            # The parameters hold the hooks: if these held the source, and with it the parameters, none would be let go.
            self._handles.append(leaf.param.register_hook(partial(_arrived, weakref.ref(self), leaf.number)))
            leaf.param.requires_grad_(needs_gradient)

    def remove(self) -> None:
        """Let gradients be added as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_arrival(self, number: int, gradient: Tensor, now: int) -> None:
        """A parameter's gradient is about to be added, in the pass ``now``."""
        raise NotImplementedError

    def _has_gradients(self) -> bool:
        """Whether some gradient is not zero.

        An ordinary loop does not ask, so that looking at values, which waits for the device, is rare: after an overflow
        or a batch that was dropped, and only if ``zero_grad()`` has left tensors.
        """
        left = [leaf.param.grad for leaf in self.leaves if leaf.param.grad is not None]
        return bool(left) and bool(torch.stack([gradient.any().to(left[0].device) for gradient in left]).any())


def _arrived(source: "weakref.ref[Source]", number: int, gradient: Tensor) -> None:
    found = source()
    if found is not None:
        found.on_arrival(number, gradient, torch._C._current_graph_task_id())  # type: ignore[attr-defined]


class Buckets(Source):
    """DDP's buckets, through its communication hook.

    Coordinates are clipped at once, while the backward pass goes on. What needs the whole gradient waits for the last
    bucket, and so does sending. DDP lays its buckets out anew after the first pass, so parameters are what counts.
    """

    def __init__(
        self, stage: Stage, model: DistributedDataParallel, average: Callable[[dist.GradBucket], Average]
    ) -> None:
        super().__init__(stage)
        self.numbers = {leaf.param: leaf.number for leaf in self.leaves}
        # DDP holds its hook where no garbage collector sees it, so the hook must not hold DDP.
        self.model = weakref.ref(model)
        self.average = average
        self._held: list[tuple[dist.GradBucket, Any]] = []
        self._sending = False
        """Some buckets of this pass have come, and some have not."""
        self._adds = False
        """This pass is added to gradients that are averaged already."""
        self._arrived: set[int] = set()
        """Numbers of the parameters that had a part in the passes since the last bucket was sent."""
        model.register_comm_hook(None, self._on_bucket)

    def _on_bucket(self, state: Any, bucket: dist.GradBucket) -> Average:
        if not self._handles:  # removed, and DDP cannot let go of a hook
            return self.average(bucket)
        if bucket.buffer().is_sparse:
            raise TypeError(_SPARSE)
        if bucket.index() == 0:
            if getattr(getattr(self.model(), "_join_config", None), "enable", False):
                raise RuntimeError(
                    "LocalUClip does not work inside model.join(): a rank that has run out of data would go on paying "
                    "its carry. Give every rank the same number of batches."
                )
            if self._adds:
                raise RuntimeError(
                    "LocalUClip: a second backward pass before optimizer.step() would be added to gradients that are "
                    "averaged already. Run all passes but the last of a step inside `with model.no_sync():`, and call "
                    "optimizer.zero_grad() after each step."
                )
            self.stage.begin()
            self._held = []
        self._sending = not bucket.is_last()
        if self._sending and self.stage.needs_all:
            device = bucket.buffer().device
            promise = torch.futures.Future(devices=[] if device.type == "cpu" else [device])
            self._held.append((bucket, promise))
            return promise
        held, self._held = self._held, []
        self._clip([*(early for early, _ in held), bucket])
        for early, promise in held:
            self.average(early).add_done_callback(partial(_fulfil, promise))
        return self.average(bucket)

    def _clip(self, buckets: list[dist.GradBucket]) -> None:
        gradients: Gradients = [None] * len(self.leaves)
        for bucket in buckets:
            for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # DDP shows zeros for a parameter that had no part, which would pay its carry to nobody.
                if self.numbers.get(param) in self._arrived:
                    gradients[self.numbers[param]] = gradient
        # The average carries a bad gradient to all ranks, which then skip together.
        self.stage.clip(gradients, [bucket.buffer() for bucket in buckets], last=not self._sending)
        if not self._sending:
            self._arrived = set()

    def on_arrival(self, number: int, gradient: Tensor, now: int) -> None:
        """A parameter's gradient is about to be added; the first of a pass tells what has become of the one before."""
        self._arrived.add(number)
        # Reentrant checkpointing runs passes inside of the one that is being sent.
        if now > self._pass and not self._sending:
            self._pass = now
            # If the last pass was averaged and not stepped with, it may still be in the gradients.
            self._adds = self.stage.open and self._has_gradients()
            self.stage.open = self._adds


def _fulfil(promise: Any, done: Any) -> None:
    try:
        promise.set_result(done.value())
    except Exception as error:  # it belongs to whoever waits
        promise.set_exception(error)


class Passes(Source):
    """Backward passes on one device, each clipped before it is added to ``.grad``.

    While one is under way, what was there is put aside; when it is over, what it has brought is clipped and added.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._aside: dict[int, Tensor | None] = {}
        self._left: list[tuple[Tensor | None, int]] = []
        """The gradients as the last pass has left them, and how often each was written."""

    def on_arrival(self, number: int, gradient: Tensor, now: int) -> None:
        if gradient.is_sparse:
            raise TypeError(_SPARSE)
        if now < self._pass:
            raise RuntimeError(_NESTED)
        if now > self._pass:
            self._pass = now
            self._forget_failed()
            engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(partial(self._on_end, now))
            if not (self.stage.open and self._is_continued()):
                self.stage.begin()
        param = self.leaves[number].param
        self._aside[number] = param.grad
        param.grad = None

    def _forget_failed(self) -> None:
        """Put back what a pass that has failed found, unless ``zero_grad()`` has been called since."""
        failed, self._aside = self._aside, {}
        if any(self.leaves[number].param.grad is not None for number in failed):
            for number, kept in failed.items():
                self.leaves[number].param.grad = kept  # type: ignore[assignment]

    def _is_continued(self) -> bool:
        """Whether this pass is added to the last one: gradients are as that has left them, or at least not zero."""
        pairs = list(zip(self._marks(), self._left, strict=False))  # none before the end of the first pass
        if pairs and all(now[0] is left[0] and now[1] == left[1] for now, left in pairs):
            return True
        return self._has_gradients()

    def _marks(self) -> list[tuple[Tensor | None, int]]:
        gradients = self.stage.layout.gradients()
        return [(gradient, -1 if gradient is None else gradient._version) for gradient in gradients]

    @torch.no_grad()
    def _on_end(self, ended: int) -> None:
        """The backward pass is over."""
        if ended != self._pass:
            raise RuntimeError(_NESTED)
        aside, self._aside = self._aside, {}
        gradients: Gradients = [None] * len(self.leaves)
        for number in aside:
            param = self.leaves[number].param
            if param.grad is not None:
                gradients[number] = writable(param, param.grad)  # here, because others are added to what is clipped
        brought = [gradient for gradient in gradients if gradient is not None]
        if brought:
            self.stage.clip(gradients, brought, last=True)
        for number, there in aside.items():
            gradient = gradients[number]
            if there is not None:
                self.leaves[number].param.grad = there if gradient is None else there.add_(gradient)
        self._left = self._marks()


_NESTED = (
    "LocalUClip: one backward pass runs inside another, as reentrant checkpointing does, so neither can be clipped by "
    "itself. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)

_SPARSE = (
    "LocalUClip clips dense gradients: use sparse=False in the embedding, or UClip, which takes sparse ones after they "
    "are averaged."
)
