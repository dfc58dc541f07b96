"""``LocalUClip``: clip before gradients are averaged or added up, with a carry for each rank."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from carryclip.algorithm import NonFinite
from carryclip.carry import CarryPolicy, check_policy
from carryclip.diagnosis import warn_user
from carryclip.torch import _foreign, _layout
from carryclip.torch._agree import NonFiniteGradientError
from carryclip.torch._backward import Average, Buckets, Passes, Stage
from carryclip.torch._foreign import calling_scaler, warn_of_clipping
from carryclip.torch._hooks import Hooks
from carryclip.torch._layout import Gradients, Leaf, RegionMap
from carryclip.torch._session import check_every
from carryclip.torch._state import PREFIX, params_of, take_over, wide
from carryclip.torch._step import Measured, Report, Stepper
from carryclip.torch._watch import Metrics, Watch


class LocalUClip:
    """Clip each rank's gradient before DDP averages them, or each micro-batch's before it is added to the others.

    Every rank has a carry of its own. What a backward pass does to it counts only if the optimizer then takes its step:
    overflows and skipped steps leave it as it was, on all ranks.

    Args:
        model: a ``DistributedDataParallel``; or a module on one device, of which each backward pass (each micro-batch)
            is clipped by itself before it is added to ``.grad``.
        optimizer: the optimizer that steps its parameters.
        region: where each rank's, or each micro-batch's, update must lie, after any division of the loss.
        carry: as for ``UClip``.
        nonfinite: as for ``UClip``; under ``"skip"`` one rank's bad gradient makes all of them skip.
        scaler: the ``GradScaler``, if losses are scaled: gradients are clipped at their true size.
        hook: the communication hook that averages, such as ``fp16_compress_hook``; by default DDP's own all-reduce.
        hook_state: what the hook gets as its state.
        metrics_every: measure every so many steps, each rank by itself; 0 for never.

    >>> import torch
    >>> from carryclip import Component
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> clipper = LocalUClip(model, optimizer, Component(1.0))
    >>> for size in (3.0, 0.5):  # two micro-batches: 1 is sent and 2 carried, then 1 sent and 1.5 carried
    ...     model(torch.full((1, 1), size)).sum().backward()
    >>> model.weight.grad
    tensor([[2.]])
    >>> optimizer.step(); clipper.carry(model.weight)
    tensor([[1.5000]])
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        region: Any,
        carry: CarryPolicy = True,
        nonfinite: NonFinite = "skip",
        *,
        scaler: Any = None,
        hook: Callable[[Any, dist.GradBucket], Average] | None = None,
        hook_state: Any = None,
        metrics_every: int = 10,
    ) -> None:
        check_every(metrics_every)
        (optimizer,), _, split = _checked(optimizer)
        # The optimizer holds the hooks, and these hold the clipper.
        self._optimizer = weakref.ref(optimizer)
        if split is not None:
            raise TypeError("ZeroRedundancyOptimizer steps a share of the parameters on each rank: use UClip with it.")
        self.regions = RegionMap(region)
        self._name = type(optimizer).__name__
        self.regions.check(optimizer.param_groups)
        self.carry_policy = check_policy(carry)
        self.nonfinite: NonFinite = nonfinite
        # An error on one rank would leave the others waiting, so all of them learn of it and raise at the step.
        inner: NonFinite = "skip" if nonfinite == "raise" else nonfinite
        self._layout = _layout.build(optimizer.param_groups, self.regions, carry, inner)
        model = _check_model(model, self._layout.leaves)
        if hook is not None and not isinstance(model, DistributedDataParallel):
            raise TypeError("hook is for a DistributedDataParallel; this is a module on one device.")
        if hook is None and hook_state is not None:
            raise TypeError("hook_state is the state of a hook, and there is none: pass hook=... too.")
        _foreign.claim(self, [leaf.param for leaf in self._layout.leaves], watch_only=False)
        self._stage = Stage(self._layout)
        self._stepper = Stepper(self._stage.trial, self._stage.trial_ledger, metrics_every)
        self._scaler = scaler
        self._measured: Measured | None = None
        self._blamed: Tensor | None = None
        """How often each parameter was not finite up to the last step, where an error has to say which are now."""
        self._looked = False
        self._known = len(params_of(optimizer))
        """How many parameters the optimizer has."""
        self._watch = Watch(self._stage.ledger, self.summary(), carry, quiet=False)
        self._hooks = weakref.ref(Hooks(self, [optimizer], observe=False, saved=False))
        self._source: Buckets | Passes | None = None
        try:
            self._connect(model, hook, hook_state)
        except BaseException:
            self.remove()
            raise

    def _connect(self, model: nn.Module, hook: Any, hook_state: Any) -> None:
        leaves, self._group, self._rank, self._size = self._layout.leaves, None, 0, 1
        if isinstance(model, DistributedDataParallel):
            self._group: Any = model.process_group
            self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
            if hook is None:
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

                hook, hook_state = allreduce_hook, model.process_group
            self._source = Buckets(self, self._stage, leaves, model, partial(hook, hook_state))
        else:
            self._source = Passes(self, self._stage, leaves)

    # ------------------------------------------------------------------ use

    def metrics(self) -> Metrics:
        """As ``UClip.metrics()``, of this rank's gradients."""
        return self._watch.metrics()

    def carry(self, param: Tensor | str | int) -> Tensor:
        """This rank's carry of a parameter after the last step, given itself, its name or position."""
        leaf = _layout.find(self._layout.leaves, param, self.summary())
        found = self._stage.kept.peek(leaf.param).get(PREFIX + "carry")
        return (
            torch.zeros_like(leaf.param, dtype=wide(leaf.param.dtype), requires_grad=False) if found is None else found
        )

    def nonfinite_parameters(self) -> dict[str, int]:
        """Which parameters had non-finite gradients on this rank, and in how many passes; waits for the device."""
        return self._stepper.agreement.culprits(self._layout)

    def remove(self) -> None:
        """Clip no more. DDP cannot let go of a communication hook: it goes on averaging."""
        hooks = self._hooks()
        if hooks is not None:
            hooks.remove()
        if self._source is not None:
            self._source.remove()
        _foreign.release(self, [leaf.param for leaf in self._layout.leaves])

    def summary(self) -> str:
        """One line: what is clipped, and to what."""
        what = f"{_layout.describe(self.regions.default)}, carry={self.carry_policy!r}"
        return f"LocalUClip({self._name}, {what})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "A LocalUClip hangs on its model and cannot be copied or pickled. Save state_dict() or "
            "gathered_state_dict(), and make a new one for the copy."
        )

    def __repr__(self) -> str:
        unit = f"rank {self._rank} of {self._size}" if self._size > 1 else "each backward pass"
        return f"{self.summary()}\n  {unit} clips its own gradient before it is added to the others"

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, to be saved in a file of its own; ``gathered_state_dict()`` has all of them."""
        state = {leaf.number: dict(self._stage.kept.peek(leaf.param)) for leaf in self._layout.leaves}
        groups: list[dict[str, Any]] = [{} for _ in self._layout.groups]
        self._stage.ledger.write(groups, self._layout, self.summary())
        return {"rank": self._rank, "size": self._size, "groups": groups, "state": state}

    def gathered_state_dict(self) -> dict[str, Any] | None:
        """The states of all ranks, on the first of them, in the host's memory; None on the others. All must call it."""
        mine = _on_host(self.state_dict())
        if self._size == 1:
            return {"ranks": [mine]}
        found: list[Any] = [None] * self._size if self._rank == 0 else []
        dist.gather_object(mine, found or None, dist.get_global_rank(self._group, 0), self._group)
        return {"ranks": found} if self._rank == 0 else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict()`` of this rank, or from ``gathered_state_dict()``.

        The latter also fits another number of ranks: each then gets the mean of the carries, so that what is still to
        be paid on average stays the same; averages of the region and the gate start anew.
        """
        states = state_dict.get("ranks", [state_dict])
        if not all(isinstance(state, dict) and {"rank", "size", "groups", "state"} <= set(state) for state in states):
            raise ValueError(f"Not a state of LocalUClip: it has the keys {sorted(state_dict)}.")
        mine = [state for state in states if (state["rank"], state["size"]) == (self._rank, self._size)]
        if not mine and len(states) < states[0]["size"]:
            raise ValueError(
                f"This is the state of rank {states[0]['rank']} of {states[0]['size']}, and this is rank {self._rank} "
                f"of {self._size}. Load the file of this rank, or one made by gathered_state_dict()."
            )
        state = mine[0]["state"] if mine else {n: _mean_carry(states, n) for n in states[0]["state"]}
        self._check_shapes(state)
        self._stage.drop()
        for home in (self._stage.kept, self._stage.trial):
            home.state.clear()
        self._stage.ledger.reset()
        self._take(state)
        if mine:
            groups = mine[0]["groups"]
            take_over(
                self._layout, self._stage.ledger, self._stage.kept, self._layout.leaves, groups, self._layout.groups,
                self.summary(),
            )  # fmt: skip
        else:
            self._stage.ledger.steps = int(next(iter(states[0]["groups"])).get(f"{PREFIX}steps", 0))
        self._stepper.forget()
        self._watch.reset()

    def _check_shapes(self, state: dict[int, dict[str, Tensor]]) -> None:
        leaves = self._layout.leaves
        for number, entries in state.items():
            carry = entries.get(PREFIX + "carry")
            if number >= len(leaves) or (carry is not None and carry.shape != leaves[number].param.shape):
                where = f"parameter {number}" if number >= len(leaves) else leaves[number].name
                raise ValueError(f"The state does not fit: {where} is missing or has another shape.")

    def _take(self, state: dict[int, dict[str, Tensor]]) -> None:
        for number, entries in state.items():
            param = self._layout.leaves[number].param
            copies = {key: value.to(param.device, copy=True) for key, value in entries.items()}
            self._stage.kept.entries(param).update(copies)

    # ------------------------------------------------------------------ what the backward pass calls

    def clip(self, gradients: Gradients, *, last: bool) -> Tensor | None:
        """Clip a backward pass or a part of it; whether it is bad here, None if it cannot be."""
        stage, step = self._stage, self._stage.ledger.steps
        self._stepper.home, self._stepper.ledger = stage.trial, stage.trial_ledger
        stage.trial_ledger.steps = step
        report = self._stepper.run(self._layout, None, None, inspect=last and self._measures(), gradients=gradients)
        if report.measured is not None:
            self._measured = report.measured
        return report.skip

    def _measures(self) -> bool:
        every = self._stepper.metrics_every
        return every > 0 and (self._stage.ledger.steps % every == 0 or not self._watch.measured)

    @property
    def needs_all(self) -> bool:
        """Whether this pass must be seen as a whole: for a norm, metrics, or the tally of what is dropped."""
        tallies = self._stepper.metrics_every > 0 and self.carry_policy is not True
        return tallies or self._measures() or any(rule.region.joint for rule in self._layout.rules)

    @property
    def loss_scale(self) -> Tensor | None:
        """What the scaler has multiplied the gradients with."""
        return None if self._scaler is None or not self._scaler.is_enabled() else self._scaler._scale

    # ------------------------------------------------------------------ what the optimizer's hooks call

    @torch.no_grad()
    def run(self, found_inf: Tensor | None, grad_scale: Tensor | None, stale: frozenset[int] = frozenset()) -> Report:
        """The optimizer is about to step on the averaged gradients: keep the carry, unless the step must not count."""
        self._look_around()
        self._look_for_others()
        stage = self._stage
        gradients = [leaf.param.grad for leaf in self._layout.leaves if leaf.param.grad is not None]
        gradients = [gradient for gradient in gradients if gradient.numel()]
        skip = None if found_inf is None else (found_inf > 0).reshape(())
        if self.nonfinite != "propagate" and gradients:
            device = stage.ledger.skipped.device
            largest = [x.to(device, non_blocking=True) for x in torch._foreach_norm(gradients, float("inf"))]
            bad = ~torch.isfinite(torch.stack(largest)).all()
            if self.nonfinite == "raise" and bool(bad if skip is None else bad & ~skip):
                stage.drop()
                complaint = self._complaint()
                self._blamed = _copied(self._stepper.agreement.bad_steps)
                raise complaint
            skip = bad if skip is None else bad | skip.to(device)
        host = skip is not None and skip.is_cpu
        known = bool(skip) if skip is not None and host else None
        if skip is not None and (known is None or known):
            for gradient in gradients:
                gradient.copy_(torch.where(skip.to(gradient.device), 0.0, gradient))
        if stage.open and known:
            stage.drop()
        elif stage.open:
            idle = [leaf.param for leaf in self._layout.leaves if leaf.param.grad is None]
            stage.keep(None if known is False or skip is None else skip, idle)
        ledger = stage.ledger
        ledger.steps += 1
        if self.nonfinite == "raise":
            self._blamed = _copied(self._stepper.agreement.bad_steps)
        if skip is not None:
            ledger.skipped += skip
            ledger.streak.copy_(torch.where(skip, ledger.streak + 1, 0))
        if self._measured is not None:
            self._watch.record(self._measured.metrics, skip, self._measured.step)
            self._measured = None
        return Report(skip, None)

    def _look_around(self) -> None:
        """At the first step, refuse a scaler that nobody told of, and warn if a trainer clips as well."""
        if self._looked:
            return
        scaler = calling_scaler()
        if scaler is not None and scaler is not self._scaler:
            raise RuntimeError(
                "A GradScaler steps the optimizer, and LocalUClip was not told of it, so that scaled gradients were "
                "clipped as if that were their size. Use LocalUClip(model, optimizer, region, scaler=scaler)."
            )
        warn_of_clipping()
        self._looked = True

    def _look_for_others(self) -> None:
        """Warn of parameters that were added to the optimizer, which no hook sees."""
        optimizer = self._optimizer()
        now = 0 if optimizer is None else len(params_of(optimizer))
        if now > self._known:
            warn_user(
                f"{self.summary()}: {now - self._known} parameters were added to the optimizer since it was attached, "
                "and are not clipped. Make the LocalUClip when the optimizer has them all."
            )
            self._known = now

    def _complaint(self) -> Exception:
        counts: Any = self._stepper.agreement.bad_steps
        new = [] if counts is None else (counts if self._blamed is None else counts - self._blamed).tolist()
        names = [leaf.name for leaf, count in zip(self._layout.leaves, new, strict=False) if count]
        where = f"here: {'; '.join(names[:5])}" if names else "on another rank"
        return NonFiniteGradientError(
            f"Step {self._stage.ledger.steps}: a gradient is not finite, {where}. The carry is unchanged. Skip the "
            'batch (optimizer.zero_grad()), or use nonfinite="skip".'
        )

    def prepare(self) -> None:
        """Nothing of ours is in the optimizer's state."""

    def settle(self, optimizer: Optimizer) -> None:
        """Nothing of ours is in the optimizer's state."""

    def refresh(self) -> None:
        """Groups that are added later are not clipped; a step says so."""

    def adopt(self, optimizer: Optimizer, *, marked: bool) -> None:
        """Nothing of ours is in the optimizer's state."""

    def check(self) -> None:
        """Metrics are looked at when they are read."""


def _checked(optimizer: Any) -> tuple[list[Optimizer], list[Any], Any]:
    optimizers, groups, split = _foreign.parse(optimizer)
    if len(optimizers) != 1:
        raise TypeError("LocalUClip needs the model and one optimizer: LocalUClip(model, optimizer, region).")
    return optimizers, groups, split


def _check_model(model: Any, leaves: list[Leaf]) -> nn.Module:
    """The model, or the DDP inside it: what DDP averages must be clipped by its own hook."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"LocalUClip needs the model first: LocalUClip(model, optimizer, region); got {model!r:.80}.")
    if not any(leaf.param.requires_grad for leaf in leaves):
        raise ValueError("All parameters of the optimizer are frozen: there is nothing to clip.")
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    model = inside[0] if inside else model
    if not inside and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warn_user(
            "LocalUClip got a module without DistributedDataParallel, so each backward pass on this process is clipped "
            "by itself. If DDP wraps it, pass the wrapped one: DDP would write over what is clipped."
        )
    own = set(model.parameters())
    foreign = [leaf.name for leaf in leaves if leaf.param not in own]
    if foreign:
        raise ValueError(
            f"The optimizer steps parameters that are not the model's ({foreign[0]}): they would not be clipped. Give "
            "them an optimizer of their own, or wrap the whole model."
        )
    if any(leaf.sharded for leaf in leaves):
        raise TypeError("LocalUClip works with DistributedDataParallel; sharded parameters are clipped by UClip.")
    return model


def _mean_carry(states: list[dict[str, Any]], number: int) -> dict[str, Tensor]:
    carries = [state["state"].get(number, {}).get(PREFIX + "carry") for state in states]
    found = [carry for carry in carries if carry is not None]
    return {PREFIX + "carry": torch.stack(found).sum(0) / len(states)} if found else {}


def _copied(counts: Tensor | None) -> Tensor | None:
    return None if counts is None else counts.clone()


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(entry) for key, entry in value.items()}
    return [_on_host(entry) for entry in value] if isinstance(value, list) else value
