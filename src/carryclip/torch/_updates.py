"""``clip_updates``: clip the optimizer's step instead of the gradient, with any policy, in units of the weights.

The carry e waits in the units of the step: with n the optimizer's own step, w = clip(n + e), e = n + e - w and the
weights move by w. So weights less carry move by exactly what the optimizer wanted, whatever optimizer that is and
however its learning rate changes. Clipping is ``UClip`` in its explicit form, on tensors that hold the step.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from carryclip.carry import CarryPolicy
from carryclip.regions import Component, Norm, Region, at_step
from carryclip.torch._clipper import UClip
from carryclip.torch._watch import Metrics

Units = Literal["rate", "weight"]

TWO_RATES = Component(2.0)
"""In units of the learning rate: an Adam step whose gradient has its usual size is about half of it."""


class ClippedUpdates:
    """What ``clip_updates`` attaches to an optimizer."""

    def __init__(self, optimizer: Optimizer, region: Region, carry: CarryPolicy, nonfinite: Any, units: Units) -> None:
        self.optimizer = optimizer
        self._weights: list[Tensor] = []
        self._before: list[torch.nn.Parameter] = []
        groups = []
        for group in optimizer.param_groups:
            held = [_held(p) for p in group["params"]]
            self._weights += group["params"]
            self._before += held
            mine = region if units == "weight" else _in_rates(region, group)
            groups.append({"params": held, "uclip": mine})
        self._clipper = UClip(groups, region, carry, nonfinite)
        self._handles = [
            optimizer.register_step_pre_hook(self._remember),
            optimizer.register_step_post_hook(self._clip),
        ]

    @torch.no_grad()
    def _remember(self, *_: Any) -> None:
        """Keep the weights as they are before the step."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if count != len(self._weights):
            raise RuntimeError(
                "A param group was added after clip_updates: call remove() and clip_updates(optimizer, ...) again."
            )
        for weight, before in zip(self._weights, self._before, strict=True):
            before.copy_(weight)

    @torch.no_grad()
    def _clip(self, *_: Any) -> None:
        """Replace the step that was made by the clipped one."""
        pairs = list(zip(self._weights, self._before, strict=True))
        for weight, before in pairs:
            before.grad = None if weight.grad is None else before - weight
        self._clipper.clip_()
        for weight, before in pairs:
            if before.grad is not None:
                weight.copy_(before - before.grad)
                before.grad = None

    def metrics(self) -> Metrics:
        """As ``UClip.metrics()``, of steps where that speaks of gradients."""
        return self._clipper.metrics()

    def carry(self, param: Tensor) -> Tensor:
        """What waits for a parameter, in its own units."""
        for weight, before in zip(self._weights, self._before, strict=True):
            if weight is param:
                return self._clipper.carry(before)
        raise KeyError("This tensor is no parameter of the optimizer whose updates are clipped.")

    def state_dict(self) -> dict[str, Any]:
        """The carry and all else that a resumed run needs. It is *not* part of ``optimizer.state_dict()``."""
        return self._clipper.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict()``."""
        self._clipper.load_state_dict(state_dict)

    def remove(self) -> None:
        """Take the hooks off; what waits is given up."""
        for handle in self._handles:
            handle.remove()


def clip_updates(
    optimizer: Optimizer,
    region: Region = TWO_RATES,
    carry: CarryPolicy = False,
    nonfinite: Literal["skip", "zero", "raise", "propagate"] = "skip",
    *,
    units: Units = "rate",
) -> ClippedUpdates:
    """Clip what ``optimizer.step()`` does to the weights, weight decay included; gradients stay as they are.

    Args:
        optimizer: any ``torch.optim.Optimizer`` but LBFGS, in one process or under DDP.
        region: where the step must lie: ``Component`` or ``Norm``. The default holds each weight's step within two
            learning rates, which an Adam step exceeds only where gradients are far above their usual size.
        carry: what becomes of what is cut; False, plain clipping, is the default. Drip() pays it back slowly. The full
            carry (True) has the proofs, for steps whose mean stays within the radius; it is for SGD without momentum.
        nonfinite: what a step that is not finite does: ``"skip"`` leaves the weights as they were. The optimizer's own
            state has taken it in already, so guard gradients as well.
        units: ``"rate"``: radii count in the learning rate of each param group, at each step; ``"weight"``: they are
            lengths. Before plain SGD ``"rate"`` is the gradient's radius, with a carry that no schedule revalues.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> clipped = clip_updates(optimizer, Component(1.0), carry=True)
    >>> weight.grad = torch.tensor([3.0, 0.5])
    >>> optimizer.step()
    >>> weight.data, clipped.carry(weight)
    (tensor([-0.1000, -0.0500]), tensor([0.2000, 0.0000]))
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"clip_updates needs a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if isinstance(optimizer, LBFGS):
        raise TypeError("clip_updates cannot clip LBFGS: its steps depend on where the last ones ended.")
    if units not in ("rate", "weight"):
        raise ValueError(f"clip_updates: units must be 'rate' or 'weight', got {units!r}.")
    _check_region(region, units, len(optimizer.param_groups))
    return ClippedUpdates(optimizer, region, carry, nonfinite, units)


def _check_region(region: object, units: Units, groups: int) -> None:
    if not isinstance(region, (Component, Norm)):
        raise TypeError(f"clip_updates: region must be Component(...) or Norm(...), got {region!r}.")
    if units == "weight":
        return
    if isinstance(region, Norm):
        if region.rule is not None:
            raise TypeError(f'clip_updates: {region.rule!r} says its own radius: write units="weight".')
        if region.over == "all" and groups > 1:
            raise ValueError(
                "clip_updates: param groups have learning rates of their own, so one Norm over all of them has none. "
                'Use Norm(..., over="group"), or units="weight".'
            )
    if not (callable(region.radius) or isinstance(region.radius, (int, float))):
        raise TypeError('clip_updates: radii given per parameter are lengths: write units="weight".')


def _held(param: Tensor) -> torch.nn.Parameter:
    if hasattr(param, "device_mesh") or param.is_sparse:
        raise TypeError("clip_updates works on dense parameters that are whole on each rank; this one is not.")
    return torch.nn.Parameter(torch.empty_like(param, requires_grad=False), requires_grad=True)


def _in_rates(region: Any, group: dict[str, Any]) -> Region:
    """The region with its radius times the group's learning rate of the day."""

    def radius(step: Any) -> Any:
        rate: Any = group["lr"]
        # A learning rate that is a tensor stays one, so that nothing waits for a device.
        return at_step("clip_updates", region.radius, step) * (rate if isinstance(rate, Tensor) else float(rate))

    return replace(region, radius=radius)
