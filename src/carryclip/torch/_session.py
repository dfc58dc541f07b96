"""A clipper at work: one layout of parameters, its state, and everything the optimizer's hooks ask for."""

import weakref
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from carryclip.algorithm import NonFinite, Rule
from carryclip.carry import CarryPolicy, check_policy, policy_of
from carryclip.diagnosis import warn_user
from carryclip.torch import _foreign, _layout
from carryclip.torch._compiled import CompileMode, check_mode
from carryclip.torch._foreign import Partition, check_rules, stepping_engine, warn_of_clipping
from carryclip.torch._hooks import await_step, others, stop_waiting, watch_others
from carryclip.torch._layout import Group, Layout, Leaf, RegionMap
from carryclip.torch._observe import Observer, check_observable
from carryclip.torch._state import (
    SKIPPED,
    STEPS,
    Ledger,
    OptimizerHome,
    OwnHome,
    averages_of,
    drop_unused,
    has_stepped,
    is_marked,
    mend,
    params_of,
    read_storage,
    take_over,
)
from carryclip.torch._step import Report, Stepper
from carryclip.torch._watch import CLIPPED, Watch, has_values

STRANGE = 2
"""Steps of another optimizer, and none of ours, of which one warns."""


class Session:
    """What ``UClip`` and the hooks share. Arguments are those of ``UClip``; optimizers are held weakly."""

    def __init__(
        self,
        target: Any,
        region: Any,
        carry: CarryPolicy,
        nonfinite: NonFinite,
        *,
        metrics_every: int,
        observe: bool,
        compile: CompileMode,
        carry_dtype: Any,
        moments_dtype: Any,
        process_group: Any,
    ) -> None:
        check_every(metrics_every)
        optimizers, self.own_groups, found = _foreign.parse(target)
        self.process_group = found if process_group is None else process_group
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._names = " + ".join(type(optimizer).__name__ for optimizer in optimizers) or "parameters"
        self.regions = RegionMap(region)
        self.regions.check(self.groups)
        self.carry_policy = check_policy(carry)
        self.observer = Observer(optimizers) if observe else None
        self.nonfinite: NonFinite = nonfinite
        self.layout = self._build()
        if observe:
            # A watcher must not raise into the training it watches, and must not take bad values for data.
            self.nonfinite = "skip"
            self.layout = self._build()
            check_observable(self.layout)
        self._signature = self._shape_of_groups()
        self._looked = False
        """Whether a step was seen."""
        watch_others()
        await_step(self)
        self._others = others()
        self._partition: Partition | None = None
        self._round: set[int] = set()
        """Parameters that DeepSpeed has stepped since the step began."""
        _foreign.claim(self, self.params(), watch_only=observe)
        self.ledger = Ledger(self.layout)
        self.storage = read_storage(carry_dtype, moments_dtype, self.params())
        self.stepper = Stepper(
            OptimizerHome(optimizers) if optimizers and not observe else OwnHome(),
            self.ledger,
            1 if observe else metrics_every,
            write=not observe,
            compile=check_mode(compile),
            storage=self.storage,
        )
        self.watch = Watch(self.ledger, self.summary(), self.carry_policy, _foreign.traits(optimizers), quiet=observe)
        self.watch.one_vector = self.layout.is_one_vector

    def begin(self) -> None:
        """Go on with what the optimizers' state holds, and share the scalars with their groups."""
        for optimizer in self.optimizers if self.observer is None else []:
            self._adopt_found(optimizer)
            if has_stepped(optimizer) and not is_marked(optimizer):
                warn_user(
                    f"{self.summary()}: the optimizer has taken steps without U-Clip, so the carry starts from "
                    "zero. If it comes from a checkpoint, attach UClip before loading that: a distributed "
                    "checkpoint brings back only what is asked for."
                )
        self.warn_of_haste()
        self._link()

    def warn_of_haste(self) -> None:
        """Say at once what is known to hurt."""
        if not self.watch.quiet and self._optimizers:
            given = _foreign.warn_of_haste("UClip", self.carry_policy, self.watch.traits, self.regions.default)
            self.watch.hasty = given

    def warn_of_strangers(self) -> None:
        """Warn where no step was seen, and another optimizer steps the parameters all the same."""
        if self._looked:
            return
        before = self._others
        stepped = [optimizer for optimizer, steps in others().items() if steps >= before.get(optimizer, 0) + STRANGE]
        theirs = {id(param) for optimizer in stepped for param in params_of(optimizer)}
        mine = {id(param) for param in self.params() if param.requires_grad}
        stepped = [optimizer for optimizer in stepped if mine & {id(param) for param in params_of(optimizer)}]
        if not mine or not mine <= theirs:
            return  # parts may have optimizers of their own, whose turn comes first
        names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in stepped))
        remedy = (
            "Call clipper.clip_() before each optimizer.step(), or pass "
            "the optimizer, UClip(optimizer, region), and step() clips."
        )
        if self._optimizers:
            remedy = (
                "Is this clipper attached to the optimizer that steps? If that was made anew, attach UClip to the new "
                "one."
            )
        self.watch.warn(
            "unseen",
            f"no step was seen, so that the metrics are NaN, and yet these parameters were stepped, by an optimizer "
            f"of the class {names} to which no clipper is attached. {remedy}",
        )

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are clipped; empty in the explicit form."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    @property
    def attached(self) -> bool:
        """Whether there are optimizers; otherwise this is the explicit form."""
        return bool(self._optimizers)

    @property
    def groups(self) -> list[Group]:
        """The param groups, of all optimizers or of the explicit form."""
        if not self._optimizers:
            return self.own_groups
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def params(self) -> list[Tensor]:
        """All clipped parameters."""
        return [leaf.param for leaf in self.layout.leaves]

    # ------------------------------------------------------------------ what the hooks call

    def run(self, found_inf: Tensor | None, grad_scale: Tensor | None, stale: "frozenset[int]" = frozenset()) -> Report:
        """One step of the algorithm on the gradients as they are now.

        ``stale`` are ids of parameters whose gradients were taken in before, at the step of another optimizer.
        """
        self._look_around()
        self.refresh()
        stepper, step = self.stepper, self.ledger.steps
        every = stepper.metrics_every
        # The last of every so many steps, after which trainers log. Figures of ranks are here a step later.
        late = 1 if self.layout.spread is None else 2
        # The first step, also after a load, is measured too, so that metrics do not stay empty.
        inspect = every > 0 and ((step + late) % every == 0 or not self.watch.measured)
        gradients = None
        if stale:
            pairs = zip(self.layout.leaves, self.layout.gradients(), strict=True)
            gradients = [None if id(leaf.param) in stale else gradient for leaf, gradient in pairs]
        report = stepper.run(self.layout, found_inf, grad_scale, inspect=inspect, gradients=gradients)
        if self.observer is not None:
            self.observer.record(self.layout, report, grad_scale)
        elif self._optimizers:
            for group in self.groups:
                group[STEPS] = self.ledger.steps
        if report.measured is not None:
            self.watch.record(*report.measured)
        if stepper.planner.shut:
            self.watch.note_shut(step, stepper.planner.shut[0].region)
        return report

    def prepare(self) -> None:
        """Make the buffers, so that a checkpoint can ask for them; the optimizer is only being set up."""
        self.refresh()
        if self.observer is None:
            self.stepper.prepare(self.layout)

    def settle(self, optimizer: Optimizer) -> None:
        """The optimizer has taken its step and its own state exists."""
        home = self.stepper.home
        if isinstance(home, OptimizerHome) and home.waiting:
            home.settle(optimizer)

    def refresh(self) -> None:
        """Take in param groups that were added, regions that were changed, and states loaded behind our back."""
        for optimizer in self.optimizers if self.observer is None else ():
            # ZeroRedundancyOptimizer loads the optimizer inside it without telling it.
            if optimizer.param_groups[0].get(SKIPPED, self.ledger.skipped) is not self.ledger.skipped:
                self.adopt(optimizer, marked=True)
        signature = self._shape_of_groups()
        if len(signature) == len(self._signature) and all(map(_same, signature, self._signature)):
            return
        self._lay_out(self._build(), self.regions, self.carry_policy)

    def change(self, region: Any, carry: CarryPolicy) -> None:
        """Clip by another rule from now on, and keep the carry; an error comes before anything is changed."""
        regions, policy = RegionMap(region), check_policy(carry)
        self.refresh()
        regions.check(self.groups)
        layout = _layout.build(self.groups, regions, policy, self.nonfinite, self.process_group)
        self._lay_out(layout, regions, policy)
        self.watch.begin_anew(self.summary(), policy)
        self.warn_of_haste()

    def adopt(self, optimizer: Optimizer, *, marked: bool) -> None:
        """The optimizer has loaded a checkpoint; ``marked`` if U-Clip wrote it."""
        home = self.stepper.home
        if isinstance(home, OptimizerHome):
            home.forget(optimizer)
        self.stepper.agreement.bad_steps = None
        self.stepper.forget()
        self.watch.reset()
        if marked:
            self._adopt_found(optimizer)
        else:
            trained = self.ledger.steps > 0 or has_stepped(optimizer) or _leaves_no_trace(optimizer)
            self.ledger.reset()
            if trained:
                warn_user(
                    f"{self.summary()}: the checkpoint was written without U-Clip, so the carry starts from zero."
                )
        self._link()

    def check(self) -> None:
        """Fetch the metrics, which warns if there is something to warn of."""
        if self.watch.measured:
            vector = self.watch.vector()
            if has_values(vector):
                self.watch.check(vector.tolist())

    # ------------------------------------------------------------------ inside

    def _build(self) -> Layout:
        return _layout.build(self.groups, self.regions, self.carry_policy, self.nonfinite, self.process_group)

    def _lay_out(self, layout: Layout, regions: RegionMap, policy: CarryPolicy) -> None:
        """Go on with another layout, and with what is kept of the old one."""
        if self._partition is not None:
            check_rules(layout.rules, self._partition)
        _foreign.claim(self, [leaf.param for leaf in layout.leaves], watch_only=self.observer is not None)
        old, self.layout, self.regions, self.carry_policy = self.layout, layout, regions, policy
        self._signature = self._shape_of_groups()
        kept = {leaf.param: leaf for leaf in layout.leaves}
        _foreign.release(self, [leaf.param for leaf in old.leaves if leaf.param not in kept])
        for before in old.leaves:
            leaf = kept.get(before.param)
            if leaf is not None:
                was, rule = old.rules[before.rule], layout.rules[leaf.rule]
                drop_unused(self.stepper.home.peek(leaf.param), rule, keep_averages=_has_averages(was, rule))
        self.stepper.move(old, layout)
        self.ledger.fit(layout, old)
        if not _same_vectors(old, layout):
            self.stepper.agreement.forget()  # what ranks were still to tell of the last step is of other vectors
        self.watch.one_vector = layout.is_one_vector
        self._link()

    def _look_around(self) -> None:
        """Find out, at the first step, who steps the optimizer; and, under DeepSpeed, whether this is a new step."""
        if not self._looked:
            self._looked = True
            stop_waiting(self)
            if warn_of_clipping():
                self.watch.warned.add(CLIPPED)
            self._partition = stepping_engine(self.optimizers[0]) if len(self.optimizers) == 1 else None
            if self._partition is not None:
                self.process_group = self._partition.group
                self._signature = []  # lay the parameters out anew
        if self._partition is not None and self._partition.calls > 1:
            here = {id(param) for group in self.groups for param in group["params"]}
            if self._round and not self._round & here:
                self.ledger.steps -= 1  # another group of the same step
            else:
                self._round = set()
            self._round |= here

    def _shape_of_groups(self) -> list[tuple[tuple[int, ...], Any]]:
        """Changes when groups or parameters do, or the region a group brings along, which is held so that it stays."""
        absent = RegionMap
        return [(tuple(map(id, group["params"])), group.get(_layout.GROUP_KEY, absent)) for group in self.groups]

    def _link(self) -> None:
        """Share the scalars with the param groups, so that they are saved."""
        if self._optimizers and self.observer is None:
            self.ledger.write(self.groups, self.layout, self.description())

    def _adopt_found(self, optimizer: Optimizer) -> None:
        """Go on with what is in the optimizer's state."""
        mine = set(params_of(optimizer))
        leaves = [leaf for leaf in self.layout.leaves if leaf.param in mine]
        mend(optimizer, leaves, self.storage, self.summary())
        own = {id(group) for group in optimizer.param_groups}
        pairs = [pair for pair in zip(self.groups, self.layout.groups, strict=True) if id(pair[0]) in own]
        self.take_over(leaves, [group for group, _ in pairs], [place for _, place in pairs])

    def take_over(self, leaves: list[Leaf], groups: list[Group], places: list[Any]) -> None:
        """Read the scalars of saved groups, and drop averages that mean something else here."""
        take_over(self.layout, self.ledger, self.stepper.home, leaves, groups, places, self.description())

    def description(self) -> str:
        """Region and policy in words that stay the same from run to run."""
        own = {k: group[_layout.GROUP_KEY] for k, group in enumerate(self.groups) if _layout.GROUP_KEY in group}
        exceptions = f" but {_layout.describe(own)}" if own else ""
        return f"{_layout.describe(self.regions.default)}{exceptions}, carry={self.carry_policy!r}"

    def summary(self) -> str:
        """One line: what is clipped, and to what."""
        return f"UClip({self._names}, {self.description()})"

    def in_words(self) -> str:
        """What is clipped, and what becomes of what is cut and of bad gradients."""
        leaves = self.layout.leaves
        size = sum(leaf.param.numel() for leaf in leaves if not is_lazy(leaf.param))
        alone = sum(place is None for place in self.layout.groups)
        verb = "watches (observe=True, changes nothing)" if self.observer is not None else "clips"
        carry = {True: "what is cut is carried to the next step", False: "what is cut is lost (plain clipping)"}
        kept = f"what is cut is kept under {self.carry_policy!r}"
        if isinstance(self.carry_policy, bool):
            kept = carry[self.carry_policy]
        skips = all(getattr(o, "_step_supports_amp_scaling", False) for o in self.optimizers) and self.optimizers
        carries = policy_of(self.carry_policy).carries
        bad = {
            "skip": "skips the step" if skips else "gives the optimizer a zero gradient",
            "zero": "has its bad entries set to 0",
            "raise": "raises an error",
            "propagate": "goes through, and spoils the carry" if carries else "goes through",
        }[self.nonfinite]
        if self.observer is not None:
            kept, bad = "advise() says what clipping would do", "is left out"
        lines = [
            self.summary(),
            f"  {verb} {_count(len(leaves), 'parameter')} ({size:,} numbers) in "
            + _count(len(self.layout.groups) - alone, "group")
            + (f", leaves {_count(alone, 'group')} alone" if alone else "")
            + ("" if self._optimizers else "; explicit form, call clip_() before each step"),
            f"  {kept}; a non-finite gradient {bad}",
        ]
        return "\n".join(lines)


def check_every(every: int) -> int:
    """A number of steps between two that are measured."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ValueError(f"metrics_every must be a whole number of steps, or 0 for never; got {every!r}.")
    return every


def _same_vectors(old: Layout, new: Layout) -> bool:
    """Whether both have the same table of scopes, if under other rules."""
    names = [[(run.name, run.length) for run in layout.scopes] for layout in (old, new)]
    return names[0] == names[1] and old.norms == new.norms


def _has_averages(was: Rule, rule: Rule) -> bool:
    """Whether one rule keeps all the averages that another needs, with the same meaning."""
    return set(averages_of(rule).split()) <= set(averages_of(was).split())


def _leaves_no_trace(optimizer: Optimizer) -> bool:
    """Whether its steps leave no state, so that an empty one may come from any step."""
    return isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether a group has the parameters and the region it had; an equal region may be another object by now."""
    return one[0] == other[0] and one[1] is other[1]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
