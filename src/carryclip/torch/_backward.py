"""Gradients of one backward pass by itself: where they come from, and how they go on when they are clipped.

What a pass has done to the carry is tried before it is kept: it counts only if the optimizer then takes its step.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from carryclip.torch._layout import Gradients, Layout, Leaf
from carryclip.torch._state import Ledger, OwnHome

Average = torch.futures.Future[Tensor]
"""A bucket that is being averaged."""


class Stage:
    """Two sets of buffers and scalars: those of the last step that was taken, and those of the one under way."""

    def __init__(self, layout: Layout) -> None:
        self.kept = OwnHome()
        self.ledger = Ledger(layout)
        self.trial = OwnHome()
        self.trial_ledger = Ledger(layout)
        self.open = False
        """A step is under way."""

    @torch.no_grad()
    def begin(self) -> None:
        """Start from what is kept; what was tried and not kept is forgotten."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for param, entries in self.kept.state.items():
            mine = self.trial.entries(param)
            for key, value in entries.items():
                if key in mine and mine[key].dtype == value.dtype:
                    targets.append(mine[key])
                    sources.append(value)
                else:
                    mine[key] = value.clone()
        for param in [param for param in self.trial.state if param not in self.kept.state]:
            del self.trial.state[param]
        if targets:
            torch._foreach_copy_(targets, sources)
        self.trial_ledger.follow(self.ledger)
        self.open = True

    def drop(self) -> None:
        """Forget what was tried."""
        self.open = False

    @torch.no_grad()
    def keep(self, unless: Tensor | None, idle: list[Tensor]) -> None:
        """Make it count, unless this is true; None where it is known to count.

        ``idle`` are parameters without a gradient: what was sent on their behalf went nowhere, so they keep what they
        had. DDP shows a parameter to its hook even if no rank has used it.
        """
        self.open = False
        for param in idle:
            self.trial.state.pop(param, None)
            if param in self.kept.state:
                self.trial.state[param] = {key: value.clone() for key, value in self.kept.state[param].items()}
        if unless is None:
            self.kept, self.trial = self.trial, self.kept
            self.ledger.follow(self.trial_ledger, counts=False)
            return
        for param, entries in self.trial.state.items():
            mine = self.kept.entries(param)
            for key, value in entries.items():
                old = mine.get(key, torch.zeros_like(value))
                mine[key] = torch.where(unless.to(value.device, non_blocking=True), old, value)
        self.ledger.follow(self.trial_ledger, counts=False, unless=unless)


class Clipper(Protocol):
    """What a source of gradients asks of the clipper."""

    def clip(self, gradients: Gradients, *, last: bool) -> Tensor | None:
        """Clip in place; whether they are bad, None if they cannot be."""
        ...

    @property
    def needs_all(self) -> bool:
        """Whether this pass must be seen as a whole."""
        ...

    @property
    def loss_scale(self) -> Tensor | None:
        """What gradients are multiplied with."""
        ...


class Buckets:
    """DDP's buckets, through its communication hook.

    Coordinates are clipped at once, while the backward pass goes on. What needs the whole gradient waits for the last
    bucket, and so does sending. DDP lays its buckets out anew after the first pass, so parameters are what counts.
    """

    def __init__(
        self,
        clipper: Clipper,
        stage: Stage,
        leaves: list[Leaf],
        model: DistributedDataParallel,
        average: Callable[[dist.GradBucket], Average],
    ) -> None:
        self.clipper = clipper
        self.stage = stage
        self.numbers = {leaf.param: leaf.number for leaf in leaves}
        # DDP holds its hook where no garbage collector sees it, so the hook must not hold DDP.
        self.model = weakref.ref(model)
        self.average = average
        self._held: list[tuple[dist.GradBucket, Any]] = []
        self._pass = -1
        self._sending = False
        """Some buckets of this pass have come, and some have not."""
        self._adds = False
        """This pass is added to gradients that are averaged already."""
        self._removed = False
        self._arrived: set[int] = set()
        """Numbers of the parameters that had a part in the passes since the last bucket was sent."""
        # Nobody knows which parameter the backward pass comes to first.
        self._handles = [_hooked(leaf.param, partial(self._on_arrival, leaf.number)) for leaf in leaves]
        model.register_comm_hook(None, self._on_bucket)

    def remove(self) -> None:
        """Only average from now on; DDP cannot let go of a hook."""
        self._removed = True
        for handle in self._handles:
            handle.remove()

    def _on_bucket(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if self._removed:
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
                raise RuntimeError(_SECOND)
            self.stage.begin()
            self._held = []
        self._sending = not bucket.is_last()
        if not self.clipper.needs_all:
            self._clip([bucket], last=bucket.is_last())
            return self.average(bucket)
        if not bucket.is_last():
            device = bucket.buffer().device
            promise = torch.futures.Future(devices=[] if device.type == "cpu" else [device])
            self._held.append((bucket, promise))
            return promise
        self._clip([*(held for held, _ in self._held), bucket], last=True)
        for held, promise in self._held:
            self.average(held).add_done_callback(partial(_fulfil, promise))
        self._held = []
        return self.average(bucket)

    @torch.no_grad()
    def _clip(self, buckets: list[dist.GradBucket], *, last: bool) -> None:
        gradients: Gradients = [None] * len(self.numbers)
        for bucket in buckets:
            for param, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # DDP shows zeros for a parameter that had no part, which would pay its carry to nobody.
                if self.numbers.get(param) in self._arrived:
                    gradients[self.numbers[param]] = gradient
        # The average carries a bad gradient to all ranks, which then skip together.
        _clip_unscaled(self.clipper, gradients, [bucket.buffer() for bucket in buckets], last=last)
        if last:
            self._arrived = set()

    def _on_arrival(self, number: int, gradient: Tensor) -> None:
        """A parameter's gradient is about to be added; the first of a pass tells what has become of the one before."""
        self._arrived.add(number)
        now = _current_pass()
        # Reentrant checkpointing runs passes inside of the one that is being sent, and goes back to an older one.
        if now <= self._pass or self._sending:
            return
        self._pass = now
        self._adds = self.stage.open and self._has_left()
        if not self._adds:
            self.stage.drop()

    def _has_left(self) -> bool:
        """Whether the last pass, which was averaged and not stepped with, is still in the gradients.

        An ordinary loop does not ask, so that looking at values, which waits for the device, is rare: after an overflow
        or a batch that was dropped, and only if ``zero_grad()`` has left tensors.
        """
        left = [param.grad for param in self.numbers if param.grad is not None]
        return bool(left) and bool(torch.stack([gradient.any().to(left[0].device) for gradient in left]).any())


class Passes:
    """Backward passes on one device, each clipped before it is added to ``.grad``.

    While one is under way, what was there is put aside; when it is over, what it has brought is clipped and added.
    """

    def __init__(self, clipper: Clipper, stage: Stage, leaves: list[Leaf]) -> None:
        # The parameters hold the hooks: if these held clipper or parameters, neither would be let go.
        self._clipper = weakref.ref(clipper)
        self.stage = stage
        self.leaves = leaves
        self._aside: dict[int, Tensor | None] = {}
        self._left: list[tuple[Tensor | None, int]] | None = None
        """The gradients as the last pass has left them, and how often each was written."""
        self._pass = -1
        self._handles = [_hooked(leaf.param, partial(_arrived, weakref.ref(self), leaf.number)) for leaf in leaves]

    def remove(self) -> None:
        """Let gradients be added as they are."""
        for handle in self._handles:
            handle.remove()

    def on_arrival(self, number: int, gradient: Tensor) -> None:
        """A parameter's gradient is about to be added."""
        leaf = self.leaves[number]
        if gradient.is_sparse:
            raise TypeError(_SPARSE)
        now = _current_pass()
        if now < self._pass:
            raise RuntimeError(_NESTED)
        if now > self._pass:
            self._pass = now
            self._forget_failed()
            engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(partial(self._on_end, now))
            if not (self.stage.open and self._is_continued()):
                self.stage.begin()
        self._aside[leaf.number] = leaf.param.grad
        leaf.param.grad = None

    def _forget_failed(self) -> None:
        """Put back what a pass that has failed found, unless ``zero_grad()`` has been called since."""
        failed, self._aside = self._aside, {}
        if any(self.leaves[number].param.grad is not None for number in failed):
            for number, kept in failed.items():
                self.leaves[number].param.grad = kept  # type: ignore[assignment]

    def _is_continued(self) -> bool:
        """Whether this pass is added to the last one: gradients are as that has left them, or at least not zero."""
        pairs = list(zip(self.leaves, self._left or [], strict=False))
        if pairs and all(
            leaf.param.grad is gradient and (gradient is None or gradient._version == version)
            for leaf, (gradient, version) in pairs
        ):
            return True
        return any(leaf.param.grad is not None and bool(leaf.param.grad.any()) for leaf in self.leaves)

    @torch.no_grad()
    def _on_end(self, ended: int) -> None:
        """The backward pass is over."""
        if ended != self._pass:
            raise RuntimeError(_NESTED)
        aside, self._aside = self._aside, {}
        gradients: Gradients = [leaf.param.grad if leaf.number in aside else None for leaf in self.leaves]
        brought = [gradient for gradient in gradients if gradient is not None]
        clipper = self._clipper()
        if brought and clipper is not None:
            _clip_unscaled(clipper, gradients, brought, last=True)
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            there = aside.get(leaf.number)
            if there is not None:
                leaf.param.grad = there if gradient is None else there.add_(gradient)
        now = [leaf.param.grad for leaf in self.leaves]
        self._left = [(gradient, -1 if gradient is None else gradient._version) for gradient in now]


def _arrived(passes: "weakref.ref[Passes]", number: int, gradient: Tensor) -> None:
    found = passes()
    if found is not None:
        found.on_arrival(number, gradient)


def _hooked(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register a hook that is called from the day on which the parameter needs a gradient, if it does not today."""
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    handle = param.register_hook(hook)
    if frozen:
        param.requires_grad_(False)
    return handle


_NESTED = (
    "LocalUClip: one backward pass runs inside another, as reentrant checkpointing does, so neither can be clipped by "
    "itself. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)


_SECOND = (
    "LocalUClip: a second backward pass before optimizer.step() would be added to gradients that are averaged already. "
    "Run all passes but the last of a step inside `with model.no_sync():`, and call optimizer.zero_grad() after each "
    "step."
)


_SPARSE = (
    "LocalUClip clips dense gradients: use sparse=False in the embedding, or UClip, which takes sparse ones after they "
    "are averaged."
)


def _clip_unscaled(clipper: Clipper, gradients: Gradients, memory: list[Tensor], *, last: bool) -> None:
    """Clip gradients at their true size; ``memory`` is where they lie.

    One that is bad leaves a NaN in it, which is still seen when others have been added or averaged.
    """
    scale = clipper.loss_scale
    if scale is not None:
        inverse = scale.double().reciprocal()
        for part in memory:
            part.mul_(inverse.to(part.device, part.dtype, non_blocking=True))
    bad = clipper.clip(gradients, last=last)
    if scale is not None:
        for part in memory:
            part.mul_(scale.to(part.device, part.dtype, non_blocking=True))
    if bad is not None:
        # In a gradient that is clipped: a bucket also has those of parameters that nobody looks at before the step.
        first = next((gradient for gradient in gradients if gradient is not None and gradient.numel()), None)
        if first is None:
            return
        first = first.view(-1)[:1] if first.is_contiguous() else first
        first.add_(torch.where(bad.to(first.device, non_blocking=True), torch.nan, 0.0).to(first.dtype))


def _current_pass() -> int:
    """A number that each backward pass has for itself."""
    return torch._C._current_graph_task_id()  # type: ignore[attr-defined]


def _fulfil(promise: Any, done: Any) -> None:
    try:
        promise.set_result(done.value())
    except Exception as error:  # it belongs to whoever waits
        promise.set_exception(error)
