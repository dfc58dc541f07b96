"""What a clipper can be given, what it is already given to, and errors that say how to fix the rest."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakTensorKeyDictionary

from carryclip.regions import Region
from carryclip.torch._layout import Group

_INNER = ("optimizer", "original_optimizer", "optim", "inner_optimizer", "base_optimizer")

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
    if not (isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks")):
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
