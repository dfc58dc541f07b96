"""The optimizer hooks: when to clip, how AMP and closures are met, and what happens at load and save."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from carryclip.diagnosis import CarryClipWarning
from carryclip.torch._engine import Report, writable
from carryclip.torch._state import PREFIX, REGION, params_of, wide


class Clipper(Protocol):
    """What the hooks ask of the clipper."""

    def run(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> Report:
        """Clip now."""
        ...

    def settle(self, optimizer: Optimizer) -> None:
        """The optimizer has taken its step."""
        ...

    def adopt(self, optimizer: Optimizer, *, marked: bool) -> None:
        """The optimizer's state was replaced; ``marked`` if U-Clip wrote the checkpoint."""
        ...

    def check(self) -> None:
        """A good moment to look at the metrics."""
        ...


class Hooks:
    """Connects a clipper with one or several optimizers.

    Several optimizers are clipped together at the first ``step()`` of a round; a round ends when one steps again.
    """

    def __init__(self, clipper: Clipper, optimizers: list[Optimizer], *, observe: bool) -> None:
        self.clipper = clipper
        self.optimizers = optimizers
        self.observe = observe
        self._clipped_ahead: set[int] = set()
        self._skip: Tensor | None = None
        self._planted: set[int] = set()
        self._young_momentum: dict[int, list[Tensor]] = {}
        self._saved: dict[int, tuple[list[Any], dict[Any, dict[str, Tensor]], bool]] = {}
        self._handles: list[Any] = []
        for optimizer in optimizers:
            _attached.add(optimizer)
            self._handles += [
                optimizer.register_step_pre_hook(self.before_step),
                optimizer.register_step_post_hook(self.after_step),
            ]
            if not observe:
                self._handles += [
                    optimizer.register_load_state_dict_pre_hook(self.before_load),
                    optimizer.register_load_state_dict_post_hook(self.after_load),
                    optimizer.register_state_dict_pre_hook(self.before_save),
                ]
        _watch_for_orphans()

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------ stepping

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clip; or, if a closure will compute the gradients, clip when it has."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._clip(optimizer)
            return None
        wrapped = self._clip_after(optimizer, closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _clip_after(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        calls = 0

        def clipped_closure() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError(
                    f"{type(optimizer).__name__} evaluated its closure twice in one step. U-Clip works with optimizers "
                    "that take one gradient per step; each further one would be clipped and carried again."
                )
            loss = closure()
            self._clip(optimizer)
            return loss

        return clipped_closure

    def _clip(self, optimizer: Optimizer) -> None:
        key = id(optimizer)
        if key in self._planted:  # left behind by a step that raised
            self._planted.discard(key)
            del optimizer.found_inf  # type: ignore[attr-defined]
        if len(self.optimizers) > 1 and getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "Several optimizers under one U-Clip need unscaled gradients: call scaler.unscale_(optimizer) for each "
                "of them before the first scaler.step()."
            )
        if key in self._clipped_ahead:
            self._clipped_ahead.discard(key)
        else:
            self._clipped_ahead = {id(other) for other in self.optimizers} - {key}
            found_inf = getattr(optimizer, "found_inf", None)
            self._skip = self.clipper.run(found_inf, self._take_scale(optimizer)).skip
        if not self.observe:
            self._tell(optimizer)

    def _take_scale(self, optimizer: Optimizer) -> Tensor | None:
        """Divide out the loss scale that GradScaler leaves to fused optimizers, in the way ``unscale_`` does.

        Returned is a scale that is still in the gradients, because observing must not change them.
        """
        scale = getattr(optimizer, "grad_scale", None)
        if scale is None or self.observe:
            return scale
        inverse = scale.double().reciprocal().float()
        with torch.no_grad():
            for param in dict.fromkeys(params_of(optimizer)):
                if param.grad is not None:
                    gradient = param.grad._values() if param.grad.is_sparse else writable(param)
                    gradient.mul_(inverse.to(gradient.device, non_blocking=True))
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        return None

    def _tell(self, optimizer: Optimizer) -> None:
        """Let a fused optimizer skip by itself; the others have received a zero gradient."""
        if self._skip is None or not _can_skip(optimizer):
            return
        found_inf = self._skip.to(torch.float32)
        if hasattr(optimizer, "found_inf"):
            found_inf = torch.maximum(found_inf, optimizer.found_inf.to(found_inf.device).reshape(()))  # type: ignore[attr-defined]
        else:
            self._planted.add(id(optimizer))
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        if isinstance(optimizer, torch.optim.SGD) and id(optimizer) not in self._young_momentum:
            self._young_momentum[id(optimizer)] = [
                param
                for param in params_of(optimizer)
                if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
            ]

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move new buffers in and take back what the hook lent."""
        if id(optimizer) in self._planted:
            self._planted.discard(id(optimizer))
            del optimizer.found_inf  # type: ignore[attr-defined]
        young = self._young_momentum.pop(id(optimizer), None)
        if young and self._skip is not None:
            # A fused SGD that skips its very first step leaves its momentum buffers uninitialised.
            for param in young:
                momentum = optimizer.state.get(param, {}).get("momentum_buffer")
                if momentum is not None:
                    momentum.copy_(torch.where(self._skip.to(momentum.device), 0.0, momentum))
        self.clipper.settle(optimizer)

    # ------------------------------------------------------------------ checkpoints

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Set our entries aside: ``load_state_dict`` would cast them to the parameters' type."""
        order = [key for group in state_dict["param_groups"] for key in group["params"]]
        ours = {
            key: {name: value for name, value in entries.items() if str(name).startswith(PREFIX)}
            for key, entries in state_dict["state"].items()
            if isinstance(entries, dict)
        }
        marked = any(REGION in group for group in state_dict["param_groups"])
        self._saved[id(optimizer)] = (order, ours, marked)

    def after_load(self, optimizer: Optimizer) -> None:
        """Put them back as they were saved."""
        order, ours, marked = self._saved.pop(id(optimizer), ([], {}, False))
        for key, param in zip(order, params_of(optimizer), strict=True):
            for name, value in ours.get(key, {}).items():
                optimizer.state[param][name] = value.to(param.device, copy=True)
        self.clipper.adopt(optimizer, marked=marked)

    def before_save(self, optimizer: Optimizer) -> None:
        """Saving is a good moment to warn."""
        self.clipper.check()


def widen(optimizer: Optimizer) -> list[str]:
    """Bring our buffers back to at least float32; returns the names of those that had been cast down."""
    cast = set()
    for param in params_of(optimizer):
        entries = optimizer.state.get(param, {})
        for name in [name for name in entries if str(name).startswith(PREFIX)]:
            value = entries[name]
            wanted = torch.int64 if name == PREFIX + "count" else wide(param.dtype)
            if param.is_complex() and wanted != torch.int64:
                wanted = wanted.to_complex()
            if value.dtype != wanted:
                cast.add(name)
                entries[name] = value.to(wanted)
    return sorted(cast)


def _can_skip(optimizer: Optimizer) -> bool:
    """Whether the optimizer honours ``found_inf``; a copy of a fused one has lost the attribute that says so."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    return supports or all(group.get("fused") for group in optimizer.param_groups)


_attached: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_watching = False


def _watch_for_orphans() -> None:
    """Warn when an optimizer holds a carry but lost its hooks, as copies and unpickled ones do."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_warn_if_orphaned)


def _warn_if_orphaned(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _attached:
        return
    _attached.add(optimizer)
    if any(REGION in group for group in optimizer.param_groups):
        warnings.warn(
            f"This {type(optimizer).__name__} holds the carry of U-Clip but no clipper is attached (deepcopy and "
            "pickle drop hooks), so its gradients are not clipped. Attach one with UClip(optimizer, region), or make it with "
            "uclipped().",
            CarryClipWarning,
            stacklevel=4,
        )
