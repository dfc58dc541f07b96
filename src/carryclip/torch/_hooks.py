"""The optimizer hooks: when to clip, how AMP and closures are met, and what happens at load and save."""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from carryclip.diagnosis import warn_user
from carryclip.groups import GROUP_KEY
from carryclip.torch._foreign import calling_scaler, makes_state
from carryclip.torch._pack import writable
from carryclip.torch._shards import local
from carryclip.torch._state import PREFIX, REGION, is_marked, params_of
from carryclip.torch._step import Report


class _Clipper(Protocol):
    """What the hooks ask of a clipper; ``Session`` says what each call means."""

    def run(self, found_inf: Tensor | None, grad_scale: Tensor | None, stale: frozenset[int] = ...) -> Report: ...
    def prepare(self) -> None: ...
    def settle(self, optimizer: Optimizer) -> None: ...
    def refresh(self) -> None: ...
    def adopt(self, optimizer: Optimizer, *, marked: bool) -> None: ...
    def check(self) -> None: ...


class _Unseen(Protocol):
    """A clipper that may be attached to the wrong optimizer."""

    def warn_of_strangers(self) -> None: ...


class Hooks:
    """Connects a clipper with one or several optimizers.

    Several optimizers are clipped together at the first ``step()`` of a round. One whose gradients are still those that
    were clipped then just takes its step; any other begins a new round, in which gradients of the others that have not
    changed since they were clipped have no part: each gradient is taken in once. With ``saved`` the optimizer's
    checkpoints hold the clipper's state as well.
    """

    def __init__(self, clipper: _Clipper, optimizers: list[Optimizer], *, observe: bool, saved: bool = True) -> None:
        self.clipper = clipper
        self.observe = observe
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._stepped: set[int] = set()
        """Optimizers that have taken a step of the training."""
        self._ahead: set[int] = set()
        """Optimizers whose gradients were clipped in a round that another has begun, and that have not stepped yet."""
        self._clipped: dict[int, tuple[Callable[[], Tensor | None], int]] = {}
        """By id of the parameter, the gradient that the last round has left, and how often it had been written; kept
        only if there are several optimizers."""
        self._skip: Tensor | None = None
        self._found_inf_set: dict[int, Tensor] = {}
        """The ``found_inf`` given to each optimizer that had none."""
        self._new_momentum: list[Tensor] = []
        """Parameters for which the step that is under way makes the momentum."""
        self._loading: dict[int, tuple[bool, list[dict[str, Tensor]], list[dict[str, Any]]]] = {}
        """During a load: whether U-Clip wrote the checkpoint, our buffers by parameter, and the groups' regions."""
        self._handles: list[Any] = []
        # What is compiled around ``optimizer.step()`` would trace into the hooks, and fail.
        untraced: Any = torch.compiler.disable
        for optimizer in optimizers:
            _attached.add(optimizer)
            self._handles.append(optimizer.register_step_pre_hook(untraced(self.before_step)))
            self._handles.append(optimizer.register_step_post_hook(untraced(self.after_step)))
            if saved and not observe:
                self._handles += [
                    optimizer.register_load_state_dict_pre_hook(self.before_load),
                    optimizer.register_load_state_dict_post_hook(self.after_load),
                    optimizer.register_state_dict_pre_hook(self.before_save),
                    optimizer.register_state_dict_post_hook(self.after_save),
                ]
        watch_others()

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
        calls = 0

        def clipped_closure() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError(
                    f"{type(optimizer).__name__} evaluated its closure twice in one step. U-Clip needs an optimizer "
                    "that takes one gradient per step: each further one would be clipped and carried again."
                )
            loss = closure()
            self._clip(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], clipped_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": clipped_closure}

    def _clip(self, optimizer: Optimizer) -> None:
        self._unset_found_inf(optimizer)
        self._new_momentum = []
        # Later, state is made only for optimizers that have none, such as plain SGD.
        if (not optimizer.state or id(optimizer) not in self._stepped) and makes_state():
            self.clipper.prepare()
            return
        self._stepped.add(id(optimizer))
        if len(self._optimizers) > 1:
            self._clip_together(optimizer)
        else:
            found_inf = getattr(optimizer, "found_inf", None)
            self._skip = self.clipper.run(found_inf, self._take_scale(optimizer)).skip
        if not self.observe:
            self._pass_on_skip(optimizer)

    def _clip_together(self, optimizer: Optimizer) -> None:
        """Clip all optimizers' gradients, unless this one's were clipped at the step of another."""
        if id(optimizer) in self._ahead:
            self._ahead.discard(id(optimizer))
            if all(map(self._is_unchanged, params_of(optimizer))):
                return
        others = [other for ref in self._optimizers if (other := ref()) is not None and other is not optimizer]
        stale: set[int] = set()
        fresh: set[Optimizer] = set()  # with gradients that no round has clipped
        for other in others:
            for param in [param for param in params_of(other) if param.grad is not None]:
                if self._is_unchanged(param):
                    stale.add(id(param))
                else:
                    fresh.add(other)
        self._refuse_scaled(optimizer, fresh)
        self._skip = self.clipper.run(getattr(optimizer, "found_inf", None), None, frozenset(stale)).skip
        self._ahead |= {id(other) for other in fresh}
        self._clipped = {
            id(param): (weakref.ref(param.grad), local(param.grad)._version)
            for each in (optimizer, *others)
            for param in params_of(each)
            if param.grad is not None
        }

    def _is_unchanged(self, param: Tensor) -> bool:
        """Whether its gradient is that of the last round: the same tensor, not written since; or none then and now."""
        if param.grad is None or id(param) not in self._clipped:
            return param.grad is None and id(param) not in self._clipped
        gradient, version = self._clipped[id(param)]
        return gradient() is param.grad and local(param.grad)._version == version

    def _refuse_scaled(self, optimizer: Optimizer, fresh: set[Optimizer]) -> None:
        """Complain about gradients that still hold a loss scale, which a norm over all of them must not see."""
        scaled = getattr(optimizer, "grad_scale", None) is not None
        scaler = calling_scaler()
        if scaler is not None:
            # GradScaler unscales an optimizer at its own step; READY says that it has not done so yet.
            stages = [scaler._per_optimizer_states[id(other)]["stage"].name for other in fresh]
            scaled = scaled or "READY" in stages
        if scaled:
            raise RuntimeError(
                "Several optimizers under one U-Clip need unscaled gradients: call scaler.unscale_(optimizer) for each "
                "of them before the first scaler.step()."
            )

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
                    dense = local(param.grad)
                    gradient = dense._values() if dense.is_sparse else writable(param, dense)
                    gradient.mul_(inverse.to(gradient.device, non_blocking=True))
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        return None

    def _pass_on_skip(self, optimizer: Optimizer) -> None:
        """Let a fused optimizer skip by itself; the others have received a zero gradient."""
        # A copy of a fused optimizer has lost the attribute that says so, but not its groups' flag.
        supports = getattr(optimizer, "_step_supports_amp_scaling", False)
        if self._skip is None or not all(group.get("fused", supports) for group in optimizer.param_groups):
            return
        found_inf = self._skip.to(torch.float32)
        if hasattr(optimizer, "found_inf"):
            theirs: Tensor = optimizer.found_inf  # type: ignore[attr-defined]
            found_inf = torch.maximum(found_inf, theirs.to(found_inf.device).reshape(()))
        else:
            self._found_inf_set[id(optimizer)] = found_inf
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        if isinstance(optimizer, torch.optim.SGD):
            self._new_momentum = [
                param
                for group in optimizer.param_groups
                if group["momentum"]
                for param in group["params"]
                if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
            ]

    def _unset_found_inf(self, optimizer: Optimizer) -> None:
        """Remove the ``found_inf`` set here, also if the step has raised; never GradScaler's own."""
        found_inf = self._found_inf_set.pop(id(optimizer), None)
        if found_inf is not None and getattr(optimizer, "found_inf", None) is found_inf:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move new buffers in and undo what was set for this step."""
        self._unset_found_inf(optimizer)
        for param in self._new_momentum:
            # A fused SGD that skips its very first step leaves its momentum buffers uninitialised.
            momentum = optimizer.state.get(param, {}).get("momentum_buffer")
            if momentum is not None and self._skip is not None:
                momentum.copy_(torch.where(self._skip.to(momentum.device), 0.0, momentum))
        self._new_momentum = []
        self.clipper.settle(optimizer)

    # ------------------------------------------------------------------ checkpoints

    def before_save(self, optimizer: Optimizer) -> None:
        """Saving is a good moment to warn."""
        self.clipper.refresh()
        self.clipper.check()

    def after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Checkpoints hold tensors and numbers only, so that they load with ``weights_only=True``."""
        for group in state_dict["param_groups"]:
            group.pop(GROUP_KEY, None)

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Set our buffers aside, and the groups' regions."""
        # They would be cast to the parameters' type: https://github.com/pytorch/pytorch/issues/43706.
        self.clipper.refresh()
        groups = state_dict["param_groups"]
        buffers = []
        for key in [key for group in groups for key in group["params"]]:
            entries = state_dict["state"].get(key)
            items = entries.items() if isinstance(entries, dict) else ()
            buffers.append({name: value for name, value in items if str(name).startswith(PREFIX)})
        regions = [{key: group[key] for key in (GROUP_KEY, "name") if key in group} for group in optimizer.param_groups]
        marked = any(REGION in group for group in groups)
        self._loading[id(optimizer)] = marked, buffers, regions

    def after_load(self, optimizer: Optimizer) -> None:
        """Put them back as they were."""
        marked, buffers, regions = self._loading.pop(id(optimizer))
        for param, own in zip(params_of(optimizer), buffers, strict=True):
            for name, value in own.items():
                optimizer.state[param][name] = value.to(param.device, copy=True)
        for group, kept in zip(optimizer.param_groups, regions, strict=True):
            group.update(kept)
        self.clipper.adopt(optimizer, marked=marked)


_attached: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


_others: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
"""How many steps were taken by optimizers to which nothing is attached."""


_waiting: "weakref.WeakSet[_Unseen]" = weakref.WeakSet()
"""Clippers that have seen no step."""

PATIENCE = 100
"""Steps of an optimizer to which nothing is attached between two looks at the clippers that have seen none."""


def await_step(clipper: _Unseen) -> None:
    """Warn, without being asked, if others step the parameters and this clipper sees none of it."""
    _waiting.add(clipper)


def stop_waiting(clipper: _Unseen) -> None:
    """It has seen a step, or was removed."""
    _waiting.discard(clipper)


@cache  # once for all clippers
def watch_others() -> None:
    """Look at the steps of optimizers to which nothing is attached."""
    register_optimizer_step_pre_hook(_note_other)


def others() -> "weakref.WeakKeyDictionary[Optimizer, int]":
    """How many steps each of them has taken so far."""
    return weakref.WeakKeyDictionary(_others)


def _note_other(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count the step; warn of an optimizer that holds a carry but lost its hooks, as copies and unpickled ones do."""
    if optimizer in _attached or torch.compiler.is_compiling():
        return
    steps = _others.get(optimizer, 0)
    _others[optimizer] = steps + 1
    if (steps + 1) % PATIENCE == 0:
        for clipper in list(_waiting):
            clipper.warn_of_strangers()
    if getattr(optimizer, "optim", None) in _attached:  # ZeroRedundancyOptimizer shows the groups of the one inside it
        return
    if steps == 0 and is_marked(optimizer):
        warn_user(
            f"This {type(optimizer).__name__} holds the carry of U-Clip but no clipper is attached (deepcopy and "
            "pickle drop hooks, and a checkpoint brings none), so its gradients are not clipped. Attach one with "
            "UClip(optimizer, region), or make it with uclipped()."
        )
