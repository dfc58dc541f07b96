"""What is known of others (optimizers, Lightning, Hugging Face, DeepSpeed, ZeRO): targets, traits, who steps and clips.

Frameworks leave no trace on the optimizer they step, so they are looked for among the callers, once. Errors say what to
pass instead.
"""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from carryclip.algorithm import Rule
from carryclip.carry import CarryPolicy, policy_of
from carryclip.diagnosis import FRAMEWORKS, warn_user
from carryclip.groups import Group, describe
from carryclip.judgement import Traits
from carryclip.regions import Norm, Region

# ------------------------------------------------------------------ what a clipper is given

_INNER = ("optimizer", "original_optimizer", "optim", "inner_optimizer", "base_optimizer")

_REGISTRIES = ("_optimizer_step_pre_hooks", "_optimizer_load_state_dict_post_hooks")
"""Some of what ``Optimizer.__init__`` makes; optimizers that do not call it have no hooks."""

_owners: Any = WeakTensorKeyDictionary()
"""Weak reference to the clipper that works on a parameter, so that no gradient is clipped twice."""


def parse(target: Any) -> tuple[list[Optimizer], list[Group], Any]:
    """Optimizers, or groups of parameters, or an error that says what to pass; and the process group of ZeRO."""
    if isinstance(target, Region):
        raise TypeError(f"The arguments are swapped: write UClip(optimizer, {target!r}).")
    if isinstance(target, type) and issubclass(target, Optimizer):
        name = target.__name__
        raise TypeError(f"{name} is a class: pass an instance, or make a clipping class with uclipped({name}, region).")
    if isinstance(target, LRScheduler):
        raise TypeError("UClip needs the optimizer, not its learning-rate scheduler: pass scheduler.optimizer.")
    if isinstance(target, torch.nn.Module):
        raise TypeError(
            "UClip needs an optimizer, not a module: pass the optimizer, and its step() clips. model.parameters() is "
            "for loops that call clip_() themselves, before each optimizer.step()."
        )
    if _is_zero(target):
        # It steps the optimizer inside it, which has this rank's share of the parameters.
        if not isinstance(getattr(target, "optim", None), Optimizer):
            raise TypeError("ZeroRedundancyOptimizer(overlap_with_ddp=True) has no steps to hook: leave that out.")
        return [_hookable(target.optim)], [], target.process_group
    if _is_optimizer(target):
        return [_hookable(target)], [], None
    if isinstance(target, Tensor):
        target = [target]
    if not isinstance(target, Iterable):
        raise TypeError(f"UClip needs an optimizer, a list of optimizers, or parameters; got {type(target).__name__}.")
    items = list(target)
    if not items:
        raise ValueError("UClip got an empty list: there are no parameters to clip. (Is it a used-up generator?)")
    if not all(map(_is_optimizer, items)):
        return [], _groups(items), None
    if len({id(item) for item in items}) < len(items):
        raise ValueError("The same optimizer is in the list twice.")
    if any(map(_is_zero, items)):
        raise TypeError("A ZeroRedundancyOptimizer is clipped by itself: write UClip(zero, region), not a list.")
    return [_hookable(item) for item in items], [], None


def _is_optimizer(item: Any) -> bool:
    return isinstance(item, Optimizer) or hasattr(item, "param_groups")


def _is_zero(item: Any) -> bool:
    return isinstance(item, Optimizer) and type(item).__name__ == "ZeroRedundancyOptimizer"


def _hookable(optimizer: Any) -> Optimizer:
    name = type(optimizer).__name__
    if name == "AcceleratedOptimizer":  # Accelerate's wrapper steps the optimizer inside it as it is
        return _hookable(optimizer.optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS evaluates the gradient many times per step, which no carry fits: use SGD or AdamW.")
    if isinstance(optimizer, Optimizer) and any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"{name} has differentiable=True, and no derivative passes through a clipped step: the clip would "
            "silently be left out. Clip inside your own differentiable function instead."
        )
    if isinstance(optimizer, Optimizer) and all(hasattr(optimizer, registry) for registry in _REGISTRIES):
        return optimizer
    for attribute in _INNER:
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, Optimizer):
            raise TypeError(
                f"{name} is a wrapper without step hooks. Attach to the optimizer inside it, best before wrapping: "
                f"UClip(wrapped.{attribute}, ...) (a {type(inner).__name__})."
            )
    raise TypeError(
        f"{name} has no step hooks, so U-Clip cannot see its steps. Attach to the torch.optim.Optimizer inside it, "
        "or use the explicit form: clipper = UClip(params, region), then clipper.clip_() before each step."
    )


def _groups(items: list[Any]) -> list[Group]:
    """Param-group dicts, parameters or (name, parameter) pairs as groups."""
    given = items if all(isinstance(item, dict) for item in items) else [{"params": items}]
    groups = []
    for group in given:
        if "params" not in group:
            raise TypeError(f"A group of parameters needs the key 'params'; got the keys {list(group)}.")
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        names = {}
        if params and all(isinstance(param, tuple) and len(param) == 2 for param in params):
            names = {"param_names": [name for name, _ in params]}
            params = [param for _, param in params]
        others = {type(param).__name__ for param in params if not isinstance(param, Tensor)}
        if others:
            found = ", ".join(sorted(others))
            raise TypeError(f"UClip needs optimizers only or parameters only; the list holds something else: {found}.")
        groups.append({**group, "params": params, **names})
    return groups


def claim(clipper: Any, params: list[Tensor], *, watch_only: bool) -> None:
    """Note that ``clipper`` works on ``params``; refuse if another one does."""
    if _other_owner(clipper, params) is not None:
        gc.collect()  # a clipper that nobody can reach any more may only be waiting for this
    owner = _other_owner(clipper, params)
    if owner is not None:
        advice = (
            "Clipping twice would bias what the carry keeps: call .remove() on that clipper first; in a notebook do so "
            "before the cell runs again."
        )
        if watch_only:
            advice = "What is left of their gradients says little. Attach the watcher first, or call .remove()."
        raise RuntimeError(f"These parameters are clipped already, by {owner.summary()}. {advice}")
    if not watch_only:
        for param in params:
            _owners[param] = weakref.ref(clipper)


def release(clipper: Any, params: Iterable[Tensor]) -> None:
    """Undo ``claim``."""
    for param in params:
        if _owner(param) is clipper:
            del _owners[param]


def _other_owner(clipper: Any, params: list[Tensor]) -> Any:
    found = (_owner(param) for param in params)
    return next((owner for owner in found if owner is not None and owner is not clipper), None)


def _owner(param: Tensor) -> Any:
    reference = _owners.get(param)
    return None if reference is None else reference()


# ------------------------------------------------------------------ who steps the optimizer

_SET_UP = {"_init_optim_state": "torch.distributed.checkpoint", "initialize_optimizer_states": "deepspeed"}
"""Functions that step with gradients of zero, only so that the optimizer makes its state; and where they are."""

_FRAMEWORKS = (
    "deepspeed.",
    "lightning.",
    "pytorch_lightning.",
    "torch.amp.",
    "torch.distributed.optim.",
    "transformers.",
)
"""Modules among whose objects whoever steps, or makes, the optimizer is looked for."""
FRAMEWORKS.update({"accelerate", "deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"})


def makes_state() -> bool:
    """Whether this step is none of the training: a framework takes it to have the optimizer's state made."""
    for frame in _frames():
        place = _SET_UP.get(frame.f_code.co_name)
        if place is not None and frame.f_globals.get("__name__", "").startswith(place):
            return True
    return False


def owners() -> Iterator[Any]:
    """The objects of frameworks whose methods are being run, from the innermost. Costs some time: ask once."""
    for frame in _frames():
        code = frame.f_code
        is_method = code.co_argcount > 0 and code.co_varnames[0] == "self"
        if not is_method or not frame.f_globals.get("__name__", "").startswith(_FRAMEWORKS):
            continue
        names = frame.f_locals
        owner = names.get("self")
        if type(names) is dict:
            # Before Python 3.13 (PEP 667) this is a copy that the frame keeps, and with it a batch, to the very end.
            names.clear()
        if owner is not None:
            yield owner


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def calling_scaler() -> Any:
    """The ``GradScaler`` that is just stepping the optimizer, if one is."""
    for owner in owners():
        if isinstance(owner, torch.amp.GradScaler) and owner.is_enabled():
            return owner
    return None


def warn_of_clipping() -> bool:
    """Warn if a trainer among the callers clips as well; the outermost counts, which sets up those inside it.

    Returned is whether there was one.
    """
    found = None
    for owner in owners():
        found = _clipping_of(owner) or found
    if found is not None:
        who, remedy = found
        warn_user(f"{who} before U-Clip does, and throws away what the carry should keep: set {remedy}.")
    return found is not None


def _clipping_of(owner: Any) -> tuple[str, str] | None:
    """That a trainer clips, in words, and what switches it off."""
    kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(owner).__mro__}
    if ("transformers", "Trainer") in kinds and owner.args.max_grad_norm:
        limit = owner.args.max_grad_norm
        return f"The trainer clips to max_grad_norm={limit:g}", "TrainingArguments(max_grad_norm=0.0)"
    if kinds & {("lightning", "Trainer"), ("pytorch_lightning", "Trainer")} and owner.gradient_clip_val:
        return f"Trainer(gradient_clip_val={owner.gradient_clip_val}) clips", "Trainer(gradient_clip_val=None)"
    if ("deepspeed", "DeepSpeedEngine") in kinds and owner.gradient_clipping():
        limit = owner.gradient_clipping()
        return f"DeepSpeed's gradient_clipping={limit:g} clips", '"gradient_clipping": 0 in its configuration'
    return None


# ------------------------------------------------------------------ DeepSpeed, which steps flat partitions


DIVIDING = {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"}
"""Optimizers that divide gradients by a running average of their size, or keep signs or directions alone.

By name, because torch has grown by some of them, and others write their own of the same name.
"""


def traits(optimizers: Sequence[torch.optim.Optimizer]) -> Traits:
    """What advice and warnings need to know of those who will be given the updates; nothing is known of none."""
    if not optimizers:
        return Traits()
    names = dict.fromkeys(type(each).__name__ for each in optimizers)
    return Traits(
        name=" and ".join(names),
        divides=any(_divides(each) for each in optimizers),
        momentum=max(_momentum(each) for each in optimizers),
    )


def _divides(optimizer: torch.optim.Optimizer) -> bool:
    known = any(kind.__name__ in DIVIDING for kind in type(optimizer).__mro__)
    # What else has betas is of Adam's kind too, or takes signs as Lion does.
    return known or any("betas" in group for group in optimizer.param_groups)


def _momentum(optimizer: torch.optim.Optimizer) -> float:
    """The largest of its groups."""
    found = [0.0]
    for group in optimizer.param_groups:
        found.append(float(group.get("momentum") or 0.0))
        if group.get("betas"):
            found.append(float(group["betas"][0]))
    return max(found)


def warn_of_haste(form: str, carry: CarryPolicy, optimizer: Traits, region: Any) -> bool:
    """Warn of a carry that pays at once before an optimizer that averages updates, or divides by their size.

    Returned is whether it does.
    """
    if not policy_of(carry).hasty or not optimizer.smooths:
        return False
    given = "the full carry" if carry is True else repr(carry)
    line = f"UClip(optimizer, {describe(region)})" if form == "UClip" else "the same without carry="
    warn_user(
        f"{form}: {given} in front of {optimizer} often trains far worse than plain clipping at the same learning "
        "rate, because the carry makes successive updates point the same way and the optimizer adds them up. Write "
        f"{line}, whose default carry is safe with any optimizer, or carry=False. If this is what you want to study, "
        "try a tenth of the learning rate and watch clipper.metrics()['delay']."
    )
    return True


class Partition(NamedTuple):
    """How ZeRO cuts the parameters up."""

    group: Any
    """The process group whose ranks have the other parts."""
    calls: int
    """How often the optimizer is stepped for one step of the training."""


def stepping_engine(optimizer: Optimizer) -> Partition | None:
    """The ZeRO optimizer that is just stepping this one, if one is."""
    for zero in owners() if "deepspeed" in sys.modules else ():
        ours = type(zero).__module__.startswith("deepspeed.") and getattr(zero, "optimizer", None) is optimizer
        if ours and hasattr(zero, "dp_process_group"):
            # Stages 1 and 2 step group by group, stage 3 by smaller parts still; others all at once.
            parts = getattr(zero, "bit16_groups", None) or getattr(zero, "fp16_groups", None) or [None]
            return Partition(zero.dp_process_group, len(parts))
    return None


def check_rules(rules: list[Rule], partition: Partition) -> None:
    """Refuse norms that DeepSpeed leaves no way to measure."""
    for region in [rule.region for rule in rules if isinstance(rule.region, Norm)]:
        if region.over != "all" or partition.calls > 1:
            why = "each tensor is cut up" if region.over != "all" else "the optimizer is stepped once for each group"
            raise TypeError(
                f"{region!r} cannot be measured under DeepSpeed's ZeRO, where {why}. Use one param group with "
                "Norm(radius), a region that looks at each coordinate (Component, Adaptive, Sign), or FSDP2."
            )
