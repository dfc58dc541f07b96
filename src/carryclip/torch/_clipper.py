"""``UClip``: the clipper people attach to their optimizer."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from carryclip.algorithm import NonFinite
from carryclip.carry import CarryPolicy, check_policy
from carryclip.diagnosis import warn_user
from carryclip.torch import _layout, _targets
from carryclip.torch._adopt import drop_unused, mend, take_over
from carryclip.torch._advice import Advice, Observer, check_observable
from carryclip.torch._callers import warn_of_clipping
from carryclip.torch._compiled import CompileMode, check_mode
from carryclip.torch._deepspeed import Partition, check_rules, stepping_engine
from carryclip.torch._engine import Engine, Report
from carryclip.torch._hooks import Hooks
from carryclip.torch._layout import Group, Leaf, RegionMap
from carryclip.torch._state import (
    PREFIX,
    REGION,
    SKIPPED,
    STEPS,
    Ledger,
    OptimizerHome,
    OwnHome,
    averages_of,
    has_stepped,
    params_of,
    read_storage,
    wide,
)
from carryclip.torch._watch import Metrics, Watch, has_values


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
        check_every(metrics_every)
        optimizers, self._own_groups, found = _targets.parse(target)
        self._process_group = found if process_group is None else process_group
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.regions = RegionMap(region)
        self.regions.check(self._groups)
        self.carry_policy = check_policy(carry)
        self._observer = Observer() if observe else None
        self._layout = _layout.build(self._groups, self.regions, carry, nonfinite, self._process_group)
        self.nonfinite: NonFinite = nonfinite
        if observe:
            # A watcher must not raise into the training it watches, and must not take bad values for data.
            self.nonfinite = "skip"
            self._layout = _layout.build(self._groups, self.regions, carry, self.nonfinite, self._process_group)
            check_observable(self._layout)
        self._signature = self._shape_of_groups()
        self._looked = False
        self._partition: Partition | None = None
        self._round: set[int] = set()
        """Parameters that DeepSpeed has stepped since the step began."""
        _targets.claim(self, self._params(), watch_only=observe)
        home = OptimizerHome(optimizers) if optimizers and not observe else OwnHome()
        self.ledger = Ledger(self._layout)
        self._storage = read_storage(carry_dtype, moments_dtype, self._params())
        self._engine = Engine(
            home,
            self.ledger,
            1 if observe else metrics_every,
            write=not observe,
            compile=check_mode(compile),
            storage=self._storage,
        )
        self._watch = Watch(self.ledger, self.summary(), self.carry_policy, quiet=observe)
        self._hooks = Hooks(self, optimizers, observe=observe) if optimizers else None
        self._removed = False
        try:
            for optimizer in optimizers if not observe else []:
                self._adopt_found(optimizer)
                if has_stepped(optimizer) and not any(REGION in group for group in optimizer.param_groups):
                    warn_user(
                        f"{self.summary()}: the optimizer has taken steps without U-Clip, so the carry starts from "
                        "zero. If it comes from a checkpoint, attach UClip before loading that: a distributed "
                        "checkpoint brings back only what is asked for."
                    )
            self._link()
        except BaseException:
            self.remove()
            raise

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers this clipper is attached to; empty in the explicit form."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    # ------------------------------------------------------------------ use

    @property
    def metrics_every(self) -> int:
        """Steps between two that are measured; may be changed at any time."""
        return self._engine.metrics_every

    @metrics_every.setter
    def metrics_every(self, every: int) -> None:
        self._engine.metrics_every = check_every(every)

    def clip_(self) -> None:
        """Clip the gradients in place (explicit form), once per step, after ``backward()`` and any unscaling."""
        if self._removed:
            raise RuntimeError("This clipper was removed. Make a new one with UClip(params, region).")
        if self._optimizers:
            raise RuntimeError(
                "This clipper is attached to its optimizer and clips inside step(); do not call clip_() as well."
            )
        self.run(None, None)

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
        return self._watch.metrics()

    def carry(self, param: Tensor | str | int) -> Tensor:
        """The carry of a parameter, given itself, its name or position; zeros before its first step."""
        leaf = _layout.find(self._layout.leaves, param, self.summary())
        found = self._engine.home.peek(leaf.param).get(PREFIX + "carry")
        if found is not None:
            return found
        kind = self._storage.kind("carry", leaf.param, wide(leaf.param.dtype))
        return torch.zeros_like(leaf.param, dtype=kind, requires_grad=False)

    def nonfinite_parameters(self) -> dict[str, int]:
        """Which parameters had non-finite gradients, and in how many steps; waits for the device."""
        return self._engine.judge.culprits(self._layout)

    def advise(self) -> Advice:
        """What the observed gradients say about clipping, and a line to paste; needs ``observe=True``."""
        if self._observer is None:
            raise RuntimeError(
                "advise() needs observed steps: attach with UClip(optimizer, region, observe=True) and train on."
            )
        return self._observer.advise(self._layout, max(self.ledger.steps - 1, 0), self.optimizers)

    def remove(self, *, forget: bool = False) -> None:
        """Take the hooks off. The carry stays in the optimizer's state, where attaching again finds it.

        Args:
            forget: also delete the carry and all else that U-Clip keeps there.
        """
        if self._hooks is not None:
            self._hooks.remove()
        self._removed = True
        _targets.release(self, self._params())
        for optimizer in self.optimizers if forget and self._observer is None else []:
            for entries in [*optimizer.param_groups, *optimizer.state.values()]:
                for key in [key for key in entries if str(key).startswith(PREFIX)]:
                    del entries[key]

    # ------------------------------------------------------------------ checkpoints of the explicit form

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs (explicit form); otherwise it is part of ``optimizer.state_dict()``."""
        home = self._explicit_home("state_dict")
        self.check()
        groups: list[Group] = [{} for _ in self._layout.groups]
        self.ledger.write(groups, self._layout, self._description())
        state = {leaf.number: dict(home.peek(leaf.param)) for leaf in self._layout.leaves}
        return {"groups": groups, "state": {number: entries for number, entries in state.items() if entries}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict()`` (explicit form)."""
        home = self._explicit_home("load_state_dict")
        groups, state = state_dict.get("groups"), state_dict.get("state")
        if groups is None or state is None:
            raise ValueError(
                f"Not a state of UClip: expected the keys 'groups' and 'state', found {sorted(state_dict)}."
            )
        if len(groups) != len(self._layout.groups):
            raise ValueError(
                f"The state has {len(groups)} groups of parameters, this clipper has {len(self._layout.groups)}."
            )
        for number, entries in state.items():
            leaf = self._layout.leaves[number] if number < len(self._layout.leaves) else None
            found = entries.get(PREFIX + "carry")
            if leaf is None or (found is not None and found.shape != leaf.param.shape):
                where = f"parameter {number}" if leaf is None else leaf.name
                raise ValueError(f"The state does not fit these parameters: {where} is missing or has another shape.")
        home.state.clear()
        self._engine.forget()
        for number, entries in state.items():
            param = self._layout.leaves[number].param
            home.entries(param).update({k: v.to(param.device, copy=True) for k, v in entries.items()})
        self._take_over(self._layout.leaves, groups, self._layout.groups)
        self._watch.reset()

    def _explicit_home(self, method: str) -> OwnHome:
        if self._optimizers or not isinstance(self._engine.home, OwnHome):
            raise RuntimeError(f"The carry is part of the optimizer's state: use optimizer.{method}(...) instead.")
        return self._engine.home

    # ------------------------------------------------------------------ what the hooks call

    def run(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> Report:
        """One step of the algorithm on the gradients as they are now."""
        self._look_around()
        self.refresh()
        step = self.ledger.steps
        # The first step after a load is measured too, so that metrics do not stay empty.
        measure = self._engine.metrics_every > 0 and (step % self._engine.metrics_every == 0 or self._watch.step < 0)
        report = self._engine.run(self._layout, found_inf, grad_scale, inspect=measure)
        if self._observer is not None:
            self._observer.record(self._layout, report, grad_scale)
        else:
            for group in self._groups if self._optimizers else []:
                group[STEPS] = self.ledger.steps
        if report.measured is not None:
            self._watch.record(*report.measured)
        return report

    def prepare(self) -> None:
        """Make the buffers, so that a checkpoint can ask for them; the optimizer is only being set up."""
        self.refresh()
        if self._observer is None:
            self._engine.prepare(self._layout)

    def _look_around(self) -> None:
        """Find out, at the first step, who steps the optimizer; and, under DeepSpeed, whether this is a new step."""
        if not self._looked:
            self._looked = True
            warn_of_clipping()
            self._partition = stepping_engine(self.optimizers[0]) if len(self.optimizers) == 1 else None
            if self._partition is not None:
                self._process_group = self._partition.group
                self._signature = []  # lay the parameters out anew
        if self._partition is not None and self._partition.calls > 1:
            here = {id(param) for group in self._groups for param in group["params"]}
            if self._round and not self._round & here:
                self.ledger.steps -= 1  # another group of the same step
            else:
                self._round = set()
            self._round |= here

    def settle(self, optimizer: Optimizer) -> None:
        """The optimizer has taken its step and its own state exists."""
        if isinstance(self._engine.home, OptimizerHome):
            self._engine.home.settle(optimizer)

    def refresh(self) -> None:
        """Take in param groups that were added, regions that were changed, and states loaded behind our back."""
        for optimizer in self.optimizers if self._observer is None else []:
            # ZeroRedundancyOptimizer loads the optimizer inside it without telling it.
            if optimizer.param_groups[0].get(SKIPPED, self.ledger.skipped) is not self.ledger.skipped:
                self.adopt(optimizer, marked=True)
        signature = self._shape_of_groups()
        if len(signature) == len(self._signature) and all(map(_same, signature, self._signature)):
            return
        old = self._layout
        layout = _layout.build(self._groups, self.regions, self.carry_policy, self.nonfinite, self._process_group)
        if self._partition is not None:
            check_rules(layout.rules, self._partition)
        _targets.claim(self, [leaf.param for leaf in layout.leaves], watch_only=self._observer is not None)
        self._layout, self._signature = layout, signature
        kept = {leaf.param: leaf for leaf in layout.leaves}
        _targets.release(self, [leaf.param for leaf in old.leaves if leaf.param not in kept])
        for before in old.leaves:
            leaf = kept.get(before.param)
            if leaf is not None:
                was, rule = old.rules[before.rule], layout.rules[leaf.rule]
                if averages_of(was) != averages_of(rule):
                    drop_unused(self._engine.home.peek(leaf.param), rule, keep_averages=False)
        self._engine.move(old, layout)
        self.ledger.fit(layout, old)
        self._link()

    def adopt(self, optimizer: Optimizer, *, marked: bool) -> None:
        """The optimizer has loaded a checkpoint."""
        home = self._engine.home
        if isinstance(home, OptimizerHome):
            home.forget(optimizer)
        self._engine.judge.bad_steps = None
        self._engine.forget()
        self._watch.reset()
        if marked:
            self._adopt_found(optimizer)
        else:
            self.ledger.reset()
            if any(optimizer.state.values()):
                warn_user(
                    f"{self.summary()}: the checkpoint was written without U-Clip, so the carry starts from zero."
                )
        self._link()

    def check(self) -> None:
        """Fetch the metrics, which warns if there is something to warn of."""
        if self._watch.step >= 0:
            vector = self._watch.vector()
            if has_values(vector):
                self._watch.check(vector.tolist())

    # ------------------------------------------------------------------ inside

    @property
    def _groups(self) -> list[Group]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups] or self._own_groups

    def _params(self) -> list[Tensor]:
        return [leaf.param for leaf in self._layout.leaves]

    def _shape_of_groups(self) -> list[tuple[tuple[int, ...], Any]]:
        """Changes when groups or parameters do, or the region a group brings along, which is held so that it stays."""
        absent = RegionMap
        return [(tuple(map(id, group["params"])), group.get(_layout.GROUP_KEY, absent)) for group in self._groups]

    def _link(self) -> None:
        """Share the scalars with the param groups, so that they are saved."""
        if self._optimizers and self._observer is None:
            self.ledger.write(self._groups, self._layout, self._description())

    def _adopt_found(self, optimizer: Optimizer) -> None:
        """Go on with what is in the optimizer's state."""
        mine = set(params_of(optimizer))
        leaves = [leaf for leaf in self._layout.leaves if leaf.param in mine]
        mend(optimizer, leaves, self._storage, self.summary())
        own = {id(group) for group in optimizer.param_groups}
        pairs = [pair for pair in zip(self._groups, self._layout.groups, strict=True) if id(pair[0]) in own]
        self._take_over(leaves, [group for group, _ in pairs], [place for _, place in pairs])

    def _take_over(self, leaves: list[Leaf], groups: list[Group], places: list[Any]) -> None:
        take_over(self._layout, self.ledger, self._engine.home, leaves, groups, places, self._description())

    def _description(self) -> str:
        own = {k: group[_layout.GROUP_KEY] for k, group in enumerate(self._groups) if _layout.GROUP_KEY in group}
        exceptions = f" but {_layout.describe(own)}" if own else ""
        return f"{_layout.describe(self.regions.default)}{exceptions}, carry={self.carry_policy!r}"

    def summary(self) -> str:
        """One line: what is clipped, and to what."""
        names = " + ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "parameters"
        return f"UClip({names}, {self._description()})"

    def __repr__(self) -> str:
        leaves = self._layout.leaves
        size = sum(leaf.param.numel() for leaf in leaves if not is_lazy(leaf.param))
        alone = sum(place is None for place in self._layout.groups)
        verb = "watches (observe=True, changes nothing)" if self._observer is not None else "clips"
        carry = {True: "what is cut is carried to the next step", False: "what is cut is lost (plain clipping)"}
        kept = (
            carry[self.carry_policy]
            if isinstance(self.carry_policy, bool)
            else f"what is cut is kept under {self.carry_policy!r}"
        )
        skips = all(getattr(o, "_step_supports_amp_scaling", False) for o in self.optimizers) and self.optimizers
        bad = {
            "skip": "skips the step" if skips else "gives the optimizer a zero gradient and keeps the carry",
            "zero": "has its bad entries set to 0",
            "raise": "raises an error",
            "propagate": "goes through, and spoils the carry",
        }[self.nonfinite]
        if self._observer is not None:
            kept, bad = "advise() says what clipping would do", "is left out"
        lines = [
            self.summary(),
            f"  {verb} {_count(len(leaves), 'parameter')} ({size:,} numbers) in "
            + _count(len(self._layout.groups) - alone, "group")
            + (f", leaves {_count(alone, 'group')} alone" if alone else "")
            + ("" if self._optimizers else "; explicit form, call clip_() before each step"),
            f"  {kept}; a non-finite gradient {bad}",
        ]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {
            "carry": self.carry_policy,
            "nonfinite": self.nonfinite,
            "metrics_every": self._engine.metrics_every,
            "observe": self._observer is not None,
            "compile": self._engine.compile,
            "carry_dtype": self._storage.carry,
            "moments_dtype": self._storage.moments,
            "process_group": self._process_group,
        }
        if self._optimizers:
            return _attach_again, (self.optimizers, self.regions.default, options, self._removed)
        return _make_explicit, (self._own_groups, self.regions.default, options, self.state_dict(), self._removed)


def check_every(every: int) -> int:
    """A number of steps between two that are measured."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ValueError(f"metrics_every must be a whole number of steps, or 0 for never; got {every!r}.")
    return every


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether a group has the parameters and the region it had; an equal region may be another object by now."""
    return one[0] == other[0] and one[1] is other[1]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


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
