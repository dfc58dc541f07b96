"""``UClip``: the clipper people attach to their optimizer."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from carryclip.advice import Advice
from carryclip.algorithm import NonFinite
from carryclip.carry import CarryPolicy
from carryclip.torch import _foreign, _layout
from carryclip.torch._compiled import CompileMode
from carryclip.torch._hooks import Hooks
from carryclip.torch._layout import Group
from carryclip.torch._session import Session, check_every
from carryclip.torch._state import PREFIX, OwnHome, wide
from carryclip.torch._watch import Metrics


class UClip:
    """Clip gradients inside ``optimizer.step()`` and carry over what was cut.

    With ``nonfinite="skip"`` a bad batch changes neither carry nor moments: a fused optimizer truly skips the step; any
    other receives a zero gradient, so its momentum and weight decay still act.

    Args:
        target: an optimizer; a list of optimizers, clipped as one at the first ``step()`` of each round; or parameters,
            for the explicit form (call ``clip_()`` between ``backward()`` and ``step()``).
        region: where updates must lie, e.g. ``Norm(1.0)``; or a mapping from param group (number or name) to region or
            None. A param group may also hold its own under the key ``"uclip"``.
        carry: True (the paper), False (plain clipping), ``Gated()``, ``Capped(radii)`` or ``Leaky(kappa)``.
        nonfinite: ``"skip"``, ``"zero"`` (bad entries become 0), ``"raise"`` or ``"propagate"``.
        metrics_every: measure every so many steps; 0 switches metrics and automatic warnings off.
        observe: change nothing, only record what clipping would do; see ``advise()``.
        compile: True compiles the step for large tensors with ``torch.compile``: less time per step for half a minute
            at the first one. ``"auto"`` does so for models of some size. Without a compiler it goes on as it is.
        carry_dtype: ``"bfloat16"`` stores the carry in half the memory, rounded at random so that nothing is lost on
            average; the default is at least float32.
        moments_dtype: the same for moments and feed averages.
        process_group: ranks each of which has other parameters, as under ZeRO; norms and skipped steps are then those
            of all of them. A ``ZeroRedundancyOptimizer`` brings its own, and DTensors need none.

    >>> import torch
    >>> from carryclip import Component
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> clipper = UClip(optimizer, Component(1.0))
    >>> weight.grad = torch.tensor([3.0, 0.5])
    >>> optimizer.step()
    >>> weight.data, clipper.carry(weight)
    (tensor([-1.0000, -0.5000]), tensor([2., 0.]))
    """

    def __init__(
        self,
        target: Any,
        region: Any,
        carry: CarryPolicy = True,
        nonfinite: NonFinite = "skip",
        *,
        metrics_every: int = 10,
        observe: bool = False,
        compile: CompileMode = False,
        carry_dtype: str | torch.dtype | None = None,
        moments_dtype: str | torch.dtype | None = None,
        process_group: Any = None,
    ) -> None:
        self._session = Session(
            target,
            region,
            carry,
            nonfinite,
            metrics_every=metrics_every,
            observe=observe,
            compile=compile,
            carry_dtype=carry_dtype,
            moments_dtype=moments_dtype,
            process_group=process_group,
        )
        optimizers = self._session.optimizers
        # The hooks hold the session. Held from here as well, model and carry would outlive their last user.
        hooks = Hooks(self._session, optimizers, observe=observe) if optimizers else None
        self._hooks = None if hooks is None else weakref.ref(hooks)
        self._removed = False
        try:
            self._session.begin()
        except BaseException:
            self.remove()
            raise

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers this clipper is attached to; empty in the explicit form."""
        return self._session.optimizers

    @property
    def metrics_every(self) -> int:
        """Steps between two that are measured; may be changed at any time."""
        return self._session.stepper.metrics_every

    @metrics_every.setter
    def metrics_every(self, every: int) -> None:
        self._session.stepper.metrics_every = check_every(every)

    def clip_(self) -> None:
        """Clip the gradients in place (explicit form), once per step, after ``backward()`` and any unscaling."""
        if self._removed:
            raise RuntimeError("This clipper was removed. Make a new one with UClip(params, region).")
        if self._session.attached:
            raise RuntimeError(
                "This clipper is attached to its optimizer and clips inside step(); do not call clip_() as well."
            )
        self._session.run(None, None)

    def metrics(self) -> Metrics:
        """Figures of the last measured step, and running totals; waits for the device only when a number is used.

        - ``grad_norm``, ``sum_norm``, ``update_norm``, ``carry_norm``, ``radius_norm``: Euclidean norms of g,
          g + carry, u, the new carry and the radius.
        - ``clipped_fraction``: share of coordinates that clipping changed.
        - ``carry_ratio``: the largest |carry|, in radii.
        - ``carry_feed``: how much of a radius the gradient adds in the carry's direction, in [-1, 1], averaged over the
          coordinates with |carry| as weight; near 1 for long means wind-up.
        - ``skipped_steps``, ``dropped_norm``: over the whole run.
        """
        return self._session.watch.metrics()

    def carry(self, param: Tensor | str | int) -> Tensor:
        """The carry of a parameter, given itself, its name or position; zeros before its first step."""
        session = self._session
        leaf = _layout.find(session.layout.leaves, param, session.summary())
        found = session.stepper.home.peek(leaf.param).get(PREFIX + "carry")
        if found is not None:
            return found
        kind = session.storage.kind("carry", leaf.param, wide(leaf.param.dtype))
        return torch.zeros_like(leaf.param, dtype=kind, requires_grad=False)

    def nonfinite_parameters(self) -> dict[str, int]:
        """Which parameters had non-finite gradients, and in how many steps; waits for the device."""
        return self._session.stepper.agreement.culprits(self._session.layout)

    def advise(self) -> Advice:
        """What the observed gradients say about clipping, and a line to paste; needs ``observe=True``."""
        session = self._session
        if session.observer is None:
            raise RuntimeError(
                "advise() needs observed steps: attach with UClip(optimizer, region, observe=True) and train on."
            )
        return session.observer.advise(session.layout, max(session.ledger.steps - 1, 0), session.optimizers)

    def remove(self, *, forget: bool = False) -> None:
        """Take the hooks off. The carry stays in the optimizer's state, where attaching again finds it.

        Args:
            forget: also delete the carry and all else that U-Clip keeps there.
        """
        session = self._session
        hooks = None if self._hooks is None else self._hooks()
        if hooks is not None:
            hooks.remove()
        self._removed = True
        _foreign.release(session, session.params())
        for optimizer in session.optimizers if forget and session.observer is None else []:
            for entries in [*optimizer.param_groups, *optimizer.state.values()]:
                for key in [key for key in entries if str(key).startswith(PREFIX)]:
                    del entries[key]

    # ------------------------------------------------------------------ checkpoints of the explicit form

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs (explicit form); otherwise it is part of ``optimizer.state_dict()``."""
        session, home = self._session, self._explicit_home("state_dict")
        session.check()
        groups: list[Group] = [{} for _ in session.layout.groups]
        session.ledger.write(groups, session.layout, session.description())
        state = {leaf.number: dict(home.peek(leaf.param)) for leaf in session.layout.leaves}
        return {"groups": groups, "state": {number: entries for number, entries in state.items() if entries}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict()`` (explicit form)."""
        session, home = self._session, self._explicit_home("load_state_dict")
        layout = session.layout
        groups, state = state_dict.get("groups"), state_dict.get("state")
        if groups is None or state is None:
            raise ValueError(
                f"Not a state of UClip: expected the keys 'groups' and 'state', found {sorted(state_dict)}."
            )
        if len(groups) != len(layout.groups):
            raise ValueError(
                f"The state has {len(groups)} groups of parameters, this clipper has {len(layout.groups)}."
            )
        for number, entries in state.items():
            leaf = layout.leaves[number] if number < len(layout.leaves) else None
            found = entries.get(PREFIX + "carry")
            if leaf is None or (found is not None and found.shape != leaf.param.shape):
                where = f"parameter {number}" if leaf is None else leaf.name
                raise ValueError(f"The state does not fit these parameters: {where} is missing or has another shape.")
        home.state.clear()
        session.stepper.forget()
        for number, entries in state.items():
            param = layout.leaves[number].param
            home.entries(param).update({k: v.to(param.device, copy=True) for k, v in entries.items()})
        session.take_over(layout.leaves, groups, layout.groups)
        session.watch.reset()

    def _explicit_home(self, method: str) -> OwnHome:
        home = self._session.stepper.home
        if self._session.attached or not isinstance(home, OwnHome):
            raise RuntimeError(f"The carry is part of the optimizer's state: use optimizer.{method}(...) instead.")
        return home

    def __repr__(self) -> str:
        return self._session.in_words()

    def __reduce__(self) -> tuple[Any, ...]:
        session = self._session
        options = {
            "carry": session.carry_policy,
            "nonfinite": session.nonfinite,
            "metrics_every": self.metrics_every,
            "observe": session.observer is not None,
            "compile": session.stepper.planner.compile,
            "carry_dtype": session.storage.carry,
            "moments_dtype": session.storage.moments,
            "process_group": session.process_group,
        }
        region = session.regions.default
        if session.attached:
            return _attach_again, (session.optimizers, region, options, self._removed)
        return _make_explicit, (session.own_groups, region, options, self.state_dict(), self._removed)


def _attach_again(optimizers: list[Optimizer], region: Any, options: dict[str, Any], removed: bool) -> UClip:
    """Attach to copied optimizers, unless they came with their clipper (``uclipped``)."""
    own = getattr(optimizers[0], "uclip", None)
    if isinstance(own, UClip) and own.optimizers == optimizers:
        return own
    clipper = UClip(optimizers, region, **options)
    if removed:
        clipper.remove()
    return clipper


def _make_explicit(
    groups: list[Group], region: Any, options: dict[str, Any], state: dict[str, Any], removed: bool
) -> UClip:
    clipper = UClip(groups, region, **options)
    clipper.load_state_dict(state)
    if removed:
        clipper.remove()
    return clipper
