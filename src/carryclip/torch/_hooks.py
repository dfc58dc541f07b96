"""The optimizer hooks: when to clip, how AMP and closures are met, and what happens at load and save."""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from carryclip.diagnosis import warn_user
from carryclip.torch._bundles import writable
from carryclip.torch._foreign import calling_scaler, makes_state
from carryclip.torch._layout import GROUP_KEY
from carryclip.torch._shards import local
from carryclip.torch._state import PREFIX, is_marked, is_marked_group, params_of
from carryclip.torch._step import Report


class Clipper(Protocol):
    """What the hooks ask of the clipper."""

    def run(self, found_inf: Tensor | None, grad_scale: Tensor | None, stale: frozenset[int] = ...) -> Report:
        """Clip now, but for parameters whose gradients were taken in before."""
        ...

    def prepare(self) -> None:
        """Make what a step would make, and count nothing: this one is taken only to set the optimizer up."""
        ...

    def settle(self, optimizer: Optimizer) -> None:
        """The optimizer has taken its step."""
        ...

    def refresh(self) -> None:
        """Param groups may have been added."""
        ...

    def adopt(self, optimizer: Optimizer, *, marked: bool) -> None:
        """The optimizer's state was replaced; ``marked`` if U-Clip wrote the checkpoint."""
        ...

    def check(self) -> None:
        """A good moment to look at the metrics."""
        ...


class Hooks:
    """Connects a clipper with one or several optimizers.

    Several optimizers are clipped together at the first ``step()`` of a round. One whose gradients are still those that
    were clipped then just takes its step; any other begins a new round, in which gradients of the others that have not
    changed since they were clipped have no part: each gradient is taken in once. With ``saved`` the optimizer's
    checkpoints hold the clipper's state as well.
    """

    def __init__(self, clipper: Clipper, optimizers: list[Optimizer], *, observe: bool, saved: bool = True) -> None:
        self.clipper = clipper
        self.observe = observe
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._stepped: set[int] = set()
        """Optimizers that have taken a step of the training."""
        self._ahead: set[int] = set()
        """Optimizers whose gradients were clipped in a round that another has begun, and that have not stepped yet."""
        self._taken: dict[int, Marks] = {}
        """The gradients of each optimizer as the last round has left them; kept only if there are several."""
        self._skip: Tensor | None = None
        self._lent: dict[int, Tensor] = {}
        self._young_momentum: dict[int, list[Tensor]] = {}
        self._loading: dict[int, _Loading] = {}
        self._handles: list[Any] = []
        for optimizer in optimizers:
            _attached.add(optimizer)
            self._handles += [
                optimizer.register_step_pre_hook(_untraced(self.before_step)),
                optimizer.register_step_post_hook(_untraced(self.after_step)),
            ]
            if saved and not observe:
                self._handles += [
                    optimizer.register_load_state_dict_pre_hook(self.before_load),
                    optimizer.register_load_state_dict_post_hook(self.after_load),
                    optimizer.register_state_dict_pre_hook(self.before_save),
                    optimizer.register_state_dict_post_hook(self.after_save),
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
        self._take_back(optimizer)
        self._young_momentum.pop(id(optimizer), None)
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
            self._tell(optimizer)

    def _clip_together(self, optimizer: Optimizer) -> None:
        """Clip all optimizers' gradients, unless this one's were clipped at the step of another."""
        if id(optimizer) in self._ahead:
            self._ahead.discard(id(optimizer))
            if len(self._unchanged(optimizer)) == len(set(params_of(optimizer))):
                return
        others = [other for ref in self._optimizers if (other := ref()) is not None and other is not optimizer]
        stale = frozenset(number for other in others for number in self._unchanged(other, absent=False))
        fresh = [other for other in others if any(_has_fresh(param, stale) for param in params_of(other))]
        self._refuse_scaled(optimizer, fresh)
        self._skip = self.clipper.run(getattr(optimizer, "found_inf", None), None, stale).skip
        self._ahead |= {id(other) for other in fresh}
        self._taken = {id(each): _marks(each) for each in (optimizer, *others)}

    def _unchanged(self, optimizer: Optimizer, *, absent: bool = True) -> set[int]:
        """Ids of the parameters whose gradients are those of the last round: the same tensors, not written since.

        With ``absent`` those that had none and have none count as well.
        """
        found = set()
        for param in params_of(optimizer):
            mark = self._taken.get(id(optimizer), {}).get(id(param))
            gradient = param.grad
            if gradient is None:
                if absent and mark is None:
                    found.add(id(param))
            elif mark is not None and mark[0]() is gradient and mark[1] == local(gradient)._version:
                found.add(id(param))
        return found

    def _refuse_scaled(self, optimizer: Optimizer, fresh: list[Optimizer]) -> None:
        """Complain about gradients that still hold a loss scale, which a norm over all of them must not see."""
        scaler = calling_scaler()
        scaled = getattr(optimizer, "grad_scale", None) is not None
        states: Any = {} if scaler is None else scaler._per_optimizer_states
        for other in fresh:
            # GradScaler unscales an optimizer at its own step; READY says that it has not done so yet.
            scaled = scaled or (scaler is not None and states[id(other)]["stage"].name == "READY")
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

    def _tell(self, optimizer: Optimizer) -> None:
        """Let a fused optimizer skip by itself; the others have received a zero gradient."""
        if self._skip is None or not _can_skip(optimizer):
            return
        found_inf = self._skip.to(torch.float32)
        if hasattr(optimizer, "found_inf"):
            theirs: Tensor = optimizer.found_inf  # type: ignore[attr-defined]
            found_inf = torch.maximum(found_inf, theirs.to(found_inf.device).reshape(()))
        else:
            self._lent[id(optimizer)] = found_inf
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        if isinstance(optimizer, torch.optim.SGD):
            self._young_momentum[id(optimizer)] = [
                param
                for group in optimizer.param_groups
                if group["momentum"]
                for param in group["params"]
                if param.grad is not None and optimizer.state.get(param, {}).get("momentum_buffer") is None
            ]

    def _take_back(self, optimizer: Optimizer) -> None:
        """Remove the verdict lent to a fused optimizer, also if its step has raised; never GradScaler's own."""
        lent = self._lent.pop(id(optimizer), None)
        if lent is not None and getattr(optimizer, "found_inf", None) is lent:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move new buffers in and take back what the hook lent."""
        self._take_back(optimizer)
        for param in self._young_momentum.pop(id(optimizer), []):
            # A fused SGD that skips its very first step leaves its momentum buffers uninitialised.
            momentum = optimizer.state.get(param, {}).get("momentum_buffer")
            if momentum is not None and self._skip is not None:
                momentum.copy_(torch.where(self._skip.to(momentum.device), 0.0, momentum))
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
        """Set our entries aside: ``load_state_dict`` would cast them to the parameters' type."""
        self.clipper.refresh()
        self._loading[id(optimizer)] = _Loading(optimizer, state_dict)

    def after_load(self, optimizer: Optimizer) -> None:
        """Put them back as they were saved."""
        loading = self._loading.pop(id(optimizer))
        loading.finish(optimizer)
        self.clipper.adopt(optimizer, marked=loading.marked)


def _untraced(hook: Callable[..., Any]) -> Any:
    """The hook, but not for a compiler: what is compiled around ``optimizer.step()`` would trace into it, and fail."""
    return torch.compiler.disable(hook)


class _Loading:
    """What a load in progress must not lose: our buffers in their own type, and the groups' own regions."""

    def __init__(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        self.marked = any(map(is_marked_group, groups))
        self._order = [key for group in groups for key in group["params"]]
        self._ours = {
            key: {name: value for name, value in entries.items() if str(name).startswith(PREFIX)}
            for key, entries in state_dict["state"].items()
            if isinstance(entries, dict)
        }
        self._regions = [
            {key: group[key] for key in (GROUP_KEY, "name") if key in group} for group in optimizer.param_groups
        ]

    def finish(self, optimizer: Optimizer) -> None:
        """Put it back."""
        for key, param in zip(self._order, params_of(optimizer), strict=True):
            for name, value in self._ours.get(key, {}).items():
                optimizer.state[param][name] = value.to(param.device, copy=True)
        for group, kept in zip(optimizer.param_groups, self._regions, strict=True):
            group.update(kept)


Marks = dict[int, tuple[Callable[[], Tensor | None], int]]
"""Which tensors an optimizer's gradients are, by id of the parameter, and how often they have been written."""


def _marks(optimizer: Optimizer) -> Marks:
    gradients = [(param, param.grad) for param in params_of(optimizer)]
    return {id(param): (weakref.ref(grad), local(grad)._version) for param, grad in gradients if grad is not None}


def _has_fresh(param: Tensor, stale: frozenset[int]) -> bool:
    return param.grad is not None and id(param) not in stale


def _can_skip(optimizer: Optimizer) -> bool:
    """Whether the optimizer honours ``found_inf``; a copy of a fused one has lost the attribute that says so."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    fused = [group.get("fused", supports) for group in optimizer.param_groups]
    return bool(fused) and all(fused)


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
    if getattr(optimizer, "optim", None) in _attached:  # ZeroRedundancyOptimizer shows the groups of the one inside it
        return
    if is_marked(optimizer):
        warn_user(
            f"This {type(optimizer).__name__} holds the carry of U-Clip but no clipper is attached (deepcopy and "
            "pickle drop hooks, and a checkpoint brings none), so its gradients are not clipped. Attach one with "
            "UClip(optimizer, region), or make it with uclipped()."
        )
