"""What is known of others' code: what a clipper can be attached to, who steps the optimizer, and who clips as well.

Frameworks leave no trace on the optimizer they step, so they are looked for among the callers, once. Errors say what to
pass instead.
"""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from carryclip.algorithm import Rule
from carryclip.diagnosis import warn_user
from carryclip.regions import Norm, Region
from carryclip.torch._layout import Group

# ----------------------------------------------------------------------
# What a clipper is given

_INNER = ("optimizer", "original_optimizer", "optim", "inner_optimizer", "base_optimizer")

_REGISTRIES = [
    f"_optimizer_{event}_{when}_hooks"
    for event in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]
"""What ``Optimizer.__init__`` makes; optimizers that do not call it have no hooks."""

_owners: Any = WeakTensorKeyDictionary()
"""Which clipper works on a parameter, so that no gradient is clipped twice."""


def parse(target: Any) -> tuple[list[Optimizer], list[Group], Any]:
    """Optimizers, or groups of parameters, or an error that says what to pass; and the process group of ZeRO."""
    if isinstance(target, Optimizer) and (inner := _inside_zero(target)) is not None:
        return [_hookable(inner)], [], target.process_group  # type: ignore[attr-defined]
    if isinstance(target, Region):
        raise TypeError(f"The arguments are swapped: write UClip(optimizer, {target!r}).")
    if isinstance(target, type) and issubclass(target, Optimizer):
        name = target.__name__
        raise TypeError(f"{name} is a class: pass an instance, or make a clipping class with uclipped({name}, region).")
    if isinstance(target, LRScheduler):
        raise TypeError("UClip needs the optimizer, not its learning-rate scheduler: pass scheduler.optimizer.")
    if isinstance(target, torch.nn.Module):
        raise TypeError(
            "UClip needs an optimizer or parameters, not a module: pass the optimizer, or model.parameters()."
        )
    if isinstance(target, Optimizer) or hasattr(target, "param_groups"):
        return [_hookable(target)], [], None
    if isinstance(target, Tensor):
        target = [target]
    if not isinstance(target, Iterable):
        raise TypeError(f"UClip needs an optimizer, a list of optimizers, or parameters; got {type(target).__name__}.")
    items = list(target)
    if not items:
        raise ValueError(
            "UClip got an empty list: there are no parameters to clip. (A generator may be used up already.)"
        )
    if all(isinstance(item, Optimizer) or hasattr(item, "param_groups") for item in items):
        if len({id(item) for item in items}) < len(items):
            raise ValueError("The same optimizer is in the list twice.")
        if any(isinstance(item, Optimizer) and _inside_zero(item) is not None for item in items):
            raise TypeError("A ZeroRedundancyOptimizer is clipped by itself: write UClip(zero, region), not a list.")
        return [_hookable(item) for item in items], [], None
    return [], _groups(items), None


def _inside_zero(optimizer: Optimizer) -> Any:
    """The optimizer of this rank's share of the parameters inside a ``ZeroRedundancyOptimizer``; None for others."""
    if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
        return None
    inner: Any = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            "ZeroRedundancyOptimizer with overlap_with_ddp=True steps inside the backward pass, where there is nothing "
            "to hook: leave overlap_with_ddp out."
        )
    return inner


def _hookable(optimizer: Any) -> Optimizer:
    name = type(optimizer).__name__
    if name == "AcceleratedOptimizer":  # Accelerate's wrapper steps the optimizer inside it as it is
        return _hookable(optimizer.optimizer)
    if not (isinstance(optimizer, Optimizer) and all(hasattr(optimizer, registry) for registry in _REGISTRIES)):
        for attribute in _INNER:
            if isinstance(getattr(optimizer, attribute, None), Optimizer):
                raise TypeError(
                    f"{name} is a wrapper without step hooks. Attach to the optimizer inside it: "
                    f"UClip(wrapped.{attribute}, ...) (a {type(getattr(optimizer, attribute)).__name__}), best before "
                    "wrapping."
                )
        raise TypeError(
            f"{name} has no step hooks, so U-Clip cannot see its steps. Attach to the torch.optim.Optimizer inside it, "
            "or use the explicit form: clipper = UClip(params, region), then clipper.clip_() before each step."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS evaluates the gradient many times per step and needs consistent values: clipping with a carry would "
            "break its line search. Use a first-order optimizer such as SGD or AdamW with U-Clip."
        )
    return optimizer


def _groups(items: list[Any]) -> list[Group]:
    """Parameters, (name, parameter) pairs or param-group dicts as groups."""
    if all(isinstance(item, dict) for item in items):
        groups = []
        for item in items:
            if "params" not in item:
                raise TypeError(f"A group of parameters needs the key 'params'; got the keys {list(item)}.")
            params = item["params"]
            params = [params] if isinstance(params, Tensor) else list(params)
            groups.append({**item, **(_groups(params)[0] if params else {"params": []})})
        return groups
    names = [item[0] for item in items if isinstance(item, tuple) and len(item) == 2]
    params = [item[1] for item in items if isinstance(item, tuple) and len(item) == 2] if names else items
    if len(params) != len(items) or not all(isinstance(param, Tensor) for param in params):
        odd = next((p for p in items if not isinstance(p, (Tensor, tuple, Optimizer))), items[0])
        raise TypeError(
            "UClip needs an optimizer, a list of optimizers, or parameters; the list holds something else: "
            f"{type(odd).__name__}."
        )
    return [{"params": params, "param_names": names} if names else {"params": params}]


def claim(clipper: Any, params: list[Tensor], *, watch_only: bool) -> None:
    """Note that ``clipper`` works on ``params``; refuse if another one does."""
    if any(_other_owner(clipper, param) is not None for param in params):
        gc.collect()  # a clipper that nobody can reach any more may only be waiting for this
    for param in params:
        owner = _other_owner(clipper, param)
        if owner is not None and watch_only:
            raise RuntimeError(
                f"These parameters are clipped already, by {owner.summary()}: what is left of their gradients tells "
                "little. Attach the watcher first, or call .remove() on the clipper."
            )
        if owner is not None:
            raise RuntimeError(
                f"These parameters are clipped already, by {owner.summary()}. Clipping twice would bias what the carry "
                "keeps: call .remove() on that clipper first, or use only one of the two."
            )
    for param in params if not watch_only else []:
        _owners[param] = weakref.ref(clipper)


def _other_owner(clipper: Any, param: Tensor) -> Any:
    reference = _owners.get(param)
    owner = reference() if reference is not None else None
    return None if owner is clipper else owner


def release(clipper: Any, params: Iterable[Tensor]) -> None:
    """Undo ``claim``."""
    for param in params:
        reference = _owners.get(param)
        if reference is not None and reference() is clipper:
            del _owners[param]


# ----------------------------------------------------------------------
# Who steps the optimizer

_SET_UP = {
    "_init_optim_state": "torch.distributed.checkpoint",
    "initialize_optimizer_states": "deepspeed",
}
"""Functions that step with gradients of zero, only so that the optimizer makes its state; and where they are."""

_FRAMEWORKS = ("deepspeed.", "lightning.", "pytorch_lightning.", "torch.amp.", "transformers.")


def makes_state() -> bool:
    """Whether this step is none of the training: a framework takes it to have the optimizer's state made."""
    return any(
        frame.f_code.co_name in _SET_UP
        and frame.f_globals.get("__name__", "").startswith(_SET_UP[frame.f_code.co_name])
        for frame in _frames()
    )


def owners() -> Iterator[Any]:
    """The objects of frameworks whose methods are being run, from the innermost. Costs some time: ask once."""
    for frame in _frames():
        code = frame.f_code
        if code.co_varnames[: min(code.co_argcount, 1)] != ("self",):
            continue
        if not frame.f_globals.get("__name__", "").startswith(_FRAMEWORKS):
            continue
        names = frame.f_locals
        owner = names.get("self")
        if type(names) is dict:
            # Before Python 3.13 this is a copy that the frame keeps, and with it a batch, until the training is over.
            names.clear()
        if owner is not None:
            yield owner


def calling_scaler() -> Any:
    """The ``GradScaler`` that is just stepping the optimizer, if one is."""
    scalers = (owner for owner in owners() if isinstance(owner, torch.amp.GradScaler) and owner.is_enabled())
    return next(scalers, None)


def warn_of_clipping() -> None:
    """Warn if a trainer among the callers clips as well; the outermost counts, which sets up those inside it."""
    found = [said for owner in owners() if (said := _clips(owner)) is not None]
    if found:
        who, remedy = found[-1]
        warn_user(f"{who} before U-Clip does, and throws away what the carry should keep: set {remedy}.")


def _clips(owner: Any) -> tuple[str, str] | None:
    """How a trainer says that it clips, and what switches that off."""
    kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(owner).__mro__}
    if ("transformers", "Trainer") in kinds and owner.args.max_grad_norm:
        limit = owner.args.max_grad_norm
        return f"The trainer clips to max_grad_norm={limit:g}", "TrainingArguments(max_grad_norm=0.0)"
    if kinds & {("lightning", "Trainer"), ("pytorch_lightning", "Trainer")} and owner.gradient_clip_val:
        limit = owner.gradient_clip_val
        return f"Trainer(gradient_clip_val={limit}) clips", "Trainer(gradient_clip_val=None)"
    if ("deepspeed", "DeepSpeedEngine") in kinds and owner.gradient_clipping():
        limit = owner.gradient_clipping()
        return f"DeepSpeed's gradient_clipping={limit:g} clips", '"gradient_clipping": 0 in its configuration'
    return None


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


# ----------------------------------------------------------------------
# DeepSpeed, which steps flat partitions, one group after the other


class Partition(NamedTuple):
    """How ZeRO cuts the parameters up."""

    group: Any
    """The process group whose ranks have the other parts."""
    calls: int
    """How often the optimizer is stepped for one step of the training."""


def stepping_engine(optimizer: Optimizer) -> Partition | None:
    """The ZeRO optimizer that is just stepping this one, if one is."""
    if "deepspeed" not in sys.modules:
        return None
    zero: Any = None
    for owner in owners():
        ours = type(owner).__module__.startswith("deepspeed.") and getattr(owner, "optimizer", None) is optimizer
        if zero is None and ours and hasattr(owner, "dp_process_group"):
            zero = owner
    if zero is None:
        return None
    # Stages 1 and 2 step group by group, stage 3 by smaller parts still; others all at once.
    parts = getattr(zero, "bit16_groups", None) or getattr(zero, "fp16_groups", None) or [None]
    return Partition(zero.dp_process_group, len(parts))


def check_rules(rules: list[Rule], partition: Partition) -> None:
    """Refuse norms that DeepSpeed leaves no way to measure."""
    for region in [rule.region for rule in rules if isinstance(rule.region, Norm)]:
        if region.over != "all" or partition.calls > 1:
            why = "each tensor is cut up" if region.over != "all" else "the optimizer is stepped once for each group"
            raise TypeError(
                f"{region!r} cannot be measured under DeepSpeed's ZeRO, where {why}. Use one param group with "
                "Norm(radius), a region that looks at each coordinate (Component, Adaptive, Sign), or FSDP2."
            )
