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
from torch.utils._pytree import tree_map_only

from carryclip.algorithm import NonFinite
from carryclip.carry import DEFAULT, CarryPolicy, check_policy
from carryclip.diagnosis import warn_user
from carryclip.groups import Regions
from carryclip.torch import _foreign, _layout
from carryclip.torch._agree import NonFiniteGradientError
from carryclip.torch._backward import Average, Buckets, Passes, Source, Stage
from carryclip.torch._hooks import Hooks
from carryclip.torch._layout import Leaf, RegionMap
from carryclip.torch._session import check_every
from carryclip.torch._state import AS_COMPUTED, PREFIX, STEPS, carry_of, params_of, refill, take_over
from carryclip.torch._step import Report
from carryclip.torch._watch import Metrics


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
        metrics_every: as for ``UClip``, but each rank measures by itself.

    >>> import torch
    >>> from carryclip import Component
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> clipper = LocalUClip(model, optimizer, Component(1.0), carry=True)
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
        region: Regions,
        carry: CarryPolicy = DEFAULT,
        nonfinite: NonFinite = "skip",
        *,
        scaler: Any = None,
        hook: Callable[[Any, dist.GradBucket], Average] | None = None,
        hook_state: Any = None,
        metrics_every: int = 10,
    ) -> None:
        check_every(metrics_every)
        optimizers, _, split = _foreign.parse(optimizer)
        if len(optimizers) != 1:
            raise TypeError("LocalUClip needs the model and one optimizer: LocalUClip(model, optimizer, region).")
        if split is not None:
            raise TypeError("ZeroRedundancyOptimizer steps a share of the parameters on each rank: use UClip with it.")
        optimizer = optimizers[0]
        # The optimizer holds the hooks, and these hold the clipper.
        self._optimizer = weakref.ref(optimizer)
        self._name = type(optimizer).__name__
        self._known = len(params_of(optimizer))
        """How many parameters the optimizer has."""
        self.regions = RegionMap(region)
        self.regions.check(optimizer.param_groups)
        self.carry_policy = check_policy(carry)
        self.nonfinite: NonFinite = nonfinite
        # An error on one rank would leave the others waiting, so all of them learn of it and raise at the step.
        inner: NonFinite = "skip" if nonfinite == "raise" else nonfinite
        self._layout = _layout.build(optimizer.param_groups, self.regions, carry, inner)
        model = _check_model(model, self._layout.leaves)
        traits = _foreign.traits(optimizers)
        hasty = _foreign.warn_of_haste("LocalUClip", self.carry_policy, traits, region)
        self._stage = Stage(self._layout, carry, self.summary(), metrics_every, scaler, traits)
        self._stage.watch.hasty = hasty
        self._stepper = self._stage.stepper
        self._blamed: dict[str, int] = {}
        """What ``nonfinite_parameters()`` said at the last step, where an error has to say which are new."""
        self._looked = False
        self._params = [leaf.param for leaf in self._layout.leaves]
        _foreign.claim(self, self._params, watch_only=False)
        try:
            self._source = self._connect(model, hook, hook_state)
        except BaseException:
            _foreign.release(self, self._params)
            raise
        self._hooks = weakref.ref(Hooks(self, [optimizer], observe=False, saved=False))

    def _connect(self, model: nn.Module, hook: Any, hook_state: Any) -> Source:
        if hook is None and hook_state is not None:
            raise TypeError("hook_state is the state of a hook, and there is none: pass hook=... too.")
        self._group, self._rank, self._size = None, 0, 1
        if not isinstance(model, DistributedDataParallel):
            if hook is not None:
                raise TypeError("hook is for a DistributedDataParallel; this is a module on one device.")
            return Passes(self._stage)
        self._group: Any = model.process_group
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if hook is None:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            hook, hook_state = allreduce_hook, self._group
        return Buckets(self._stage, model, partial(hook, hook_state))

    # ------------------------------------------------------------------ use

    def metrics(self) -> Metrics:
        """As ``UClip.metrics()``, of this rank's gradients."""
        return self._stage.watch.metrics()

    def carry(self, param: Tensor | str | int) -> Tensor:
        """This rank's carry of a parameter after the last step, given itself, its name or position."""
        param = _layout.find(self._layout.leaves, param, self.summary()).param
        return carry_of(self._stage.kept, param, AS_COMPUTED)

    def nonfinite_parameters(self) -> dict[str, int]:
        """Which parameters had non-finite gradients on this rank, and in how many passes; waits for the device."""
        return self._stepper.agreement.culprits(self._layout)

    def remove(self) -> None:
        """Clip no more. DDP cannot let go of a communication hook: it goes on averaging."""
        hooks = self._hooks()
        if hooks is not None:
            hooks.remove()
        self._source.remove()
        _foreign.release(self, self._params)

    def summary(self) -> str:
        """One line: what is clipped, and to what."""
        return f"LocalUClip({self._name}, {_layout.describe(self.regions.default)}, carry={self.carry_policy!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "A LocalUClip hangs on its model and cannot be copied or pickled. Save state_dict() or "
            "gathered_state_dict(), and make a new one for the copy."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and "_hooks" in vars(self):
            raise AttributeError(
                f"{name} cannot be assigned: it would change nothing. Keep state_dict(), call remove(), make a new "
                "LocalUClip and load the state into it: it takes the carry over."
            )
        super().__setattr__(name, value)

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
        mine = tree_map_only(Tensor, Tensor.cpu, self.state_dict())
        if self._size == 1:
            return {"ranks": [mine]}
        found = [None] * self._size if self._rank == 0 else None
        dist.gather_object(mine, found, dist.get_global_rank(self._group, 0), self._group)
        return None if found is None else {"ranks": found}

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
        state = mine[0]["state"] if mine else _mean_carries(states)
        layout, stage = self._layout, self._stage
        refill(stage.kept, layout.leaves, state)
        stage.open = False
        stage.ledger.reset()
        if mine:
            groups = mine[0]["groups"]
            take_over(layout, stage.ledger, stage.kept, layout.leaves, groups, layout.groups, self.summary())
        else:
            stage.ledger.steps = int(states[0]["groups"][0].get(STEPS, 0))
        self._stepper.forget()
        stage.watch.reset()

    # ------------------------------------------------------------------ what the optimizer's hooks call

    @torch.no_grad()
    def run(self, found_inf: Tensor | None, grad_scale: Tensor | None, stale: frozenset[int] = frozenset()) -> Report:
        """The optimizer is about to step on the averaged gradients: keep the carry, unless the step must not count."""
        self._look_around()
        stage, ledger = self._stage, self._stage.ledger
        gradients = [gradient for gradient in self._layout.gradients() if gradient is not None and gradient.numel()]
        skip = None
        if found_inf is not None:
            skip = (found_inf > 0).reshape(()).to(ledger.skipped.device)
        if self.nonfinite != "propagate" and gradients:
            largest = torch._foreach_norm(gradients, float("inf"))
            largest = [x.to(ledger.skipped.device, non_blocking=True) for x in largest]
            bad = ~torch.isfinite(torch.stack(largest)).all()
            if self.nonfinite == "raise":
                self._complain(bad if skip is None else bad & ~skip)
            skip = bad if skip is None else bad | skip
        doubt = skip
        if skip is not None and skip.is_cpu and not skip:  # reading it waits for nothing
            doubt = None
        if doubt is not None:
            for gradient in gradients:
                gradient.copy_(torch.where(doubt.to(gradient.device), 0.0, gradient))
        if stage.open:
            stage.keep(doubt)
        ledger.steps += 1
        if skip is not None:
            ledger.count(skip)
        if stage.measured is not None:
            stage.watch.record(stage.measured.metrics, skip, stage.measured.step)
            stage.measured = None
        return Report(skip, None)

    def _look_around(self) -> None:
        """Warn of parameters that no hook sees; and look, at the first step, who takes it."""
        optimizer = self._optimizer()
        now = 0 if optimizer is None else len(params_of(optimizer))
        if now > self._known:
            warn_user(
                f"{self.summary()}: {now - self._known} parameters were added to the optimizer since it was attached, "
                "and are not clipped. Make the LocalUClip when the optimizer has them all."
            )
            self._known = now
        if self._looked:
            return
        scaler = _foreign.calling_scaler()
        if scaler is not None and scaler is not self._stage.scaler:
            raise RuntimeError(
                "A GradScaler steps the optimizer, and LocalUClip was not told of it, so that scaled gradients were "
                "clipped as if that were their size. Use LocalUClip(model, optimizer, region, scaler=scaler)."
            )
        _foreign.warn_of_clipping()
        self._looked = True

    def _complain(self, bad: Tensor) -> None:
        """Raise an error if this is true, on all ranks, and say which parameters are new among those not finite."""
        before, self._blamed = self._blamed, self.nonfinite_parameters()
        if not bad:
            return
        self._stage.open = False
        names = [name for name, count in self._blamed.items() if count > before.get(name, 0)]
        where = f"here: {'; '.join(names[:5])}" if names else "on another rank"
        raise NonFiniteGradientError(
            f"Step {self._stage.ledger.steps}: a gradient is not finite, {where}. The carry is unchanged. Skip the "
            'batch (optimizer.zero_grad()), or use nonfinite="skip".'
        )

    def _ignore(self, *args: Any, **options: Any) -> None:
        """Nothing of ours is in the optimizer's state, so there is nothing to do when that changes."""

    prepare = settle = refresh = adopt = check = _ignore


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


def _mean_carries(states: list[dict[str, Any]]) -> dict[int, dict[str, Tensor]]:
    """The mean over the ranks for each parameter; a rank that has no carry yet counts as zero."""
    key = PREFIX + "carry"
    mean: dict[int, dict[str, Tensor]] = {}
    for number in states[0]["state"]:
        found = [state["state"][number][key] for state in states if key in state["state"].get(number, {})]
        mean[number] = {key: torch.stack(found).sum(0) / len(states)} if found else {}
    return mean
