"""``UClip``: the clipper people attach to their optimizer."""

import inspect
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from carryclip.advice import Advice
from carryclip.algorithm import NonFinite, Rule
from carryclip.carry import DEFAULT, CarryPolicy
from carryclip.groups import Regions
from carryclip.policy import Policy
from carryclip.regions import Norm, Region
from carryclip.torch import _foreign, _layout
from carryclip.torch._compiled import CompileMode, check_mode
from carryclip.torch._hooks import Hooks, stop_waiting
from carryclip.torch._layout import Group, RegionMap
from carryclip.torch._session import Session, check_every
from carryclip.torch._state import PREFIX, OwnHome, carry_of, read_storage, refill
from carryclip.torch._watch import Metrics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # not in every build of torch

_ASSIGNABLE = {"metrics_every", "_session", "_hooks", "_removed"}


class UClip:
    """Clip gradients inside ``optimizer.step()`` and give back what was cut.

    With ``nonfinite="skip"`` a bad batch changes neither carry nor moments: a fused optimizer truly skips the step; any
    other receives a zero gradient, so its momentum and weight decay still act.

    Args:
        target: an optimizer; a list of optimizers, clipped as one at the first ``step()`` of each round; or parameters,
            for the explicit form (call ``clip_()`` between ``backward()`` and ``step()``).
        region: where updates must lie, e.g. ``Norm(1.0)``; or a mapping from param group (number or name) to region or
            None. A param group may also hold its own under the key ``"uclip"``.
        carry: what becomes of what is cut. The default adds back, a little at each step, the bias that
            it has measured, and is safe with momentum and Adam.
            ``Shrunk()`` and ``Drip()`` are such policies, False is plain clipping. True is the full carry of the paper;
            it, ``Gated()``, ``Capped(radii)`` and ``Leaky(kappa)`` are for SGD without momentum.
        nonfinite: ``"skip"``, ``"zero"`` (bad entries become 0), ``"raise"`` or ``"propagate"``.
        metrics_every: measure the first step and then every so many: with 10 the 10th, 20th, ..., after which trainers
            log. 0 switches metrics and automatic warnings off.
        observe: change nothing, only record what clipping would do; see ``advise()``.
        compile: True compiles the step for large tensors with ``torch.compile``: the first step takes half a minute
            longer, later ones less time. ``"auto"`` does so for large models. Without a compiler nothing is compiled.
        carry_dtype: ``"bfloat16"`` stores the carry in half the memory, rounded at random so that nothing is lost on
            average; the default is at least float32.
        moments_dtype: the same for moments and feed averages.
        process_group: ranks each of which has other parameters, as under ZeRO; norms and skipped steps are then those
            of all of them. A ``ZeroRedundancyOptimizer`` brings its own, and DTensors need none.

    >>> import torch
    >>> from carryclip import Component
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> clipper = UClip(optimizer, Component(1.0), carry=True)
    >>> weight.grad = torch.tensor([3.0, 0.5])
    >>> optimizer.step()
    >>> weight.data, clipper.carry(weight)
    (tensor([-1.0000, -0.5000]), tensor([2., 0.]))
    """

    def __init__(
        self,
        target: Optimizer | Iterable[Optimizer] | Iterable[Tensor] | Iterable[Group],
        region: Region | Mapping[Any, Region | None],
        carry: CarryPolicy = DEFAULT,
        nonfinite: NonFinite = "skip",
        *,
        metrics_every: int = 10,
        observe: bool = False,
        compile: CompileMode = False,
        carry_dtype: str | torch.dtype | None = None,
        moments_dtype: str | torch.dtype | None = None,
        process_group: "ProcessGroup | None" = None,
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
    def region(self) -> Any:
        """Where updates must lie, as it was given; ``change()`` gives another."""
        return self._session.regions.default

    @property
    def carry_policy(self) -> CarryPolicy:
        """What becomes of what is cut, as it was given; ``change()`` gives another. The carry is ``carry(p)``."""
        return self._session.carry_policy

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

    def change(self, region: Regions | None = None, *, carry: CarryPolicy | None = None) -> None:
        """Clip to another region, or with another carry policy, from the next step on. The carry is kept.

        Moments and feed averages are kept where they mean the same, and start anew otherwise. With ``carry=False`` what
        waits is dropped. Checkpoints written from now on are of the new region. A change that does not fit the
        parameters raises an error and leaves everything as it was. For a radius that changes at every step use a
        schedule: ``Norm(lambda step: ...)``.

        Args:
            region: as for ``UClip``; by default it stays. A param group's own ``"uclip"`` goes first, as ever.
            carry: as for ``UClip``; by default it stays.

        >>> import torch
        >>> from carryclip import Component
        >>> p = torch.nn.Parameter(torch.zeros(1))
        >>> clipper = UClip([p], Component(1.0), carry=True)
        >>> p.grad = torch.tensor([5.0])
        >>> clipper.clip_(); p.grad, clipper.carry(p)
        (tensor([1.]), tensor([4.]))
        >>> clipper.change(Component(3.0))
        >>> p.grad = torch.tensor([0.0])
        >>> clipper.clip_(); p.grad, clipper.carry(p)
        (tensor([3.]), tensor([1.]))
        """
        session = self._session
        if region is None and carry is None:
            raise TypeError("change() needs something to change: change(Norm(0.5)), change(carry=False), or both.")
        if self._removed:
            raise RuntimeError("This clipper was removed: make a new UClip, which finds the carry where it was left.")
        if session.observer is not None:
            raise RuntimeError("This clipper only watches (observe=True): remove() it and watch with another region.")
        session.change(self.region if region is None else region, self.carry_policy if carry is None else carry)

    def metrics(self) -> Metrics:
        """Figures of the last measured step, and running totals; waits for the device only when a number is used.

        - ``grad_norm``, ``sum_norm``, ``update_norm``, ``carry_norm``, ``radius_norm``: Euclidean norms of g, of what
          is clipped (g + carry, or what the policy mixes), u, the new carry and the radius.
        - ``delay``: how many steps a gradient waits until it is sent, sum_norm/radius_norm as far as that is kept.
          Below 2 it is harmless; 10 acts like a momentum of 0.9 on top of the optimizer's own, and 100 is stale.
        - ``clipped_fraction``: share of coordinates that clipping changed.
        - ``carry_ratio``: the largest |carry|, in radii.
        - ``carry_feed``: how much of a radius the gradient adds in the carry's direction, in [-1, 1], averaged over the
          coordinates with |carry| as weight; near 1 for long means wind-up.
        - ``skipped_steps``, ``dropped_norm``: over the whole run.
        """
        if not self._removed:
            self._session.warn_of_strangers()
        return self._session.watch.metrics()

    def carry(self, param: Tensor | str | int) -> Tensor:
        """The carry of a parameter, given itself, its name or position; zeros before its first step."""
        session = self._session
        leaf = _layout.find(session.layout.leaves, param, session.summary())
        return carry_of(session.stepper.home, leaf.param, session.storage)

    def nonfinite_parameters(self) -> dict[str, int]:
        """Which parameters had non-finite gradients, and in how many steps; waits for the device."""
        return self._session.stepper.agreement.culprits(self._session.layout)

    def advise(self) -> Advice:
        """What the observed gradients say about clipping, and a line to paste; needs ``observe=True``."""
        session = self._session
        if session.observer is None:
            raise RuntimeError(
                "This clipper clips, and keeps no gradients for advise(). Call remove() on it, attach with "
                "UClip(optimizer, region, observe=True) instead, and train on."
            )
        session.warn_of_strangers()
        return session.observer.advise(session.layout, max(session.ledger.steps - 1, 0))

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
        stop_waiting(session)
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
        refill(home, layout.leaves, state)
        session.stepper.forget()
        session.take_over(layout.leaves, groups, layout.groups)
        session.watch.reset()

    def _explicit_home(self, method: str) -> OwnHome:
        home = self._session.stepper.home
        if self._session.attached or not isinstance(home, OwnHome):
            raise RuntimeError(f"The carry is part of the optimizer's state: use optimizer.{method}(...) instead.")
        return home

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ASSIGNABLE:
            raise AttributeError(_how_to_set(name, value))
        super().__setattr__(name, value)

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


def _how_to_set(name: str, value: Any) -> str:
    """Why an attribute of a clipper cannot be assigned, and what to call instead."""
    if name in ("region", "radius"):
        example = repr(value) if isinstance(value, Region) else "Norm(0.5)"
        return f"clipper.{name} cannot be assigned. Call clipper.change({example}): it keeps the carry."
    if name in ("carry", "carry_policy"):
        example = repr(value) if isinstance(value, (bool, Policy)) else "Gated()"
        return f"clipper.{name} cannot be assigned. Call clipper.change(carry={example}); clipper.carry(p) is a tensor."
    return (
        f"clipper.{name} cannot be assigned: it would change nothing. metrics_every can be; region and carry policy "
        "change with clipper.change(region, carry=...). For all else call clipper.remove() and make a new UClip, which "
        "takes the carry over."
    )


def check_arguments(owner: str, region: Any, options: dict[str, Any]) -> None:
    """Raise now what ``UClip(optimizer, region, **options)`` would raise later, as far as it needs no optimizer."""
    signature = inspect.signature(UClip)
    try:
        given = signature.bind(None, region, **options)
    except TypeError as error:
        names = [name for name in signature.parameters if name not in ("target", "region")]
        raise TypeError(f"{owner}: {error}; the options of UClip are {', '.join(names)}.") from None
    given.apply_defaults()
    found = given.arguments
    RegionMap(region)
    Rule(Norm(1.0), found["carry"], found["nonfinite"])  # any region: these two are checked there
    check_every(found["metrics_every"])
    check_mode(found["compile"])
    read_storage(found["carry_dtype"], found["moments_dtype"], [])


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
