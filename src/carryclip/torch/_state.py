"""Where the clipper's memory lives, and how it goes on with what a checkpoint or an earlier clipper has left.

``optimizer.state[p]["uclip_..."]`` is saved by everything that saves optimizers. Scalars that belong to no parameter
are kept in the param groups, which load without a cast.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from carryclip import _checks
from carryclip.algorithm import Buffers, Rule, find_rule
from carryclip.diagnosis import warn_user
from carryclip.policy import Memory
from carryclip.radius import Past
from carryclip.torch._layout import Group, Layout, Leaf, Places
from carryclip.torch._shards import local

PREFIX = "uclip_"
REGION = PREFIX + "region"
AVERAGES = PREFIX + "averages"
STEPS = PREFIX + "steps"
SKIPPED = PREFIX + "skipped"
DROPPED = PREFIX + "dropped"
PAST = {name: f"{PREFIX}radius_{name}" for name in Past._fields}
"""Under which the columns are saved that radii learn from."""

KEYS = {name: PREFIX + name for name in Buffers._fields}

Entries = dict[str, Any]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The real type of the buffers for gradients of ``dtype``: float64 for float64, otherwise float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def widest(device: torch.device) -> torch.dtype:
    """The type in which a device can hold sums that go on for long, or over many."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def averages_of(rule: Rule) -> str:
    """What the running averages of a rule mean; those of another meaning cannot be gone on with."""
    kinds = []
    if rule.region.estimator is not None:
        kinds.append(type(rule.region.estimator).__name__)
    if rule.gates_coordinates:
        kinds.append("feed")
    if rule.region.rule is not None and rule.region.rule.follows:
        kinds.append(type(rule.region.rule).__name__)
    return " ".join(kinds) or "none"


class OwnHome:
    """Keeps buffers by itself, for the explicit form and for observing."""

    def __init__(self) -> None:
        self.state: dict[Tensor, Entries] = {}

    def entries(self, param: Tensor) -> Entries:
        """The entries of one parameter, to read and to extend."""
        return self.state.setdefault(param, {})

    def peek(self, param: Tensor) -> Entries:
        """The entries of one parameter, to read only."""
        return self.state.get(param, {})


class OptimizerHome:
    """Keeps buffers in ``optimizer.state``.

    Adam and many others set up their state when it is empty, so ours must not be there first: new entries wait aside
    until the optimizer has taken its step. Optimizers are held weakly, because they hold the clipper.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.waiting: dict[Tensor, Entries] = {}
        """New entries of optimizers that have not taken their step."""
        self._owner: dict[Tensor, weakref.ref[Optimizer]] = {}

    def _state(self, param: Tensor) -> Entries:
        """What the optimizer keeps for a parameter; empty if nothing yet."""
        if param not in self._owner:
            live = [(ref, ref()) for ref in self.optimizers]
            self._owner = {p: ref for ref, optimizer in live if optimizer is not None for p in params_of(optimizer)}
        optimizer = self._owner[param]()
        return {} if optimizer is None else optimizer.state.get(param, {})

    def entries(self, param: Tensor) -> Entries:
        """The entries of one parameter, wherever they are now."""
        state = self._state(param)
        if not state:
            return self.waiting.setdefault(param, {})
        if param in self.waiting:  # a step that raised has left them behind
            state.update(self.waiting.pop(param))
        return state

    def peek(self, param: Tensor) -> Entries:
        """The entries of one parameter, to read only."""
        return self.waiting.get(param) or self._state(param)

    def settle(self, optimizer: Optimizer) -> None:
        """Move waiting entries in, now that the optimizer has its own.

        A parameter without a gradient took no part in the step: if it has no state yet, it still has to be set up.
        """
        for param in [param for param in self.waiting if self._owner[param]() is optimizer]:
            if param.grad is not None or optimizer.state.get(param):
                entries = self.waiting.pop(param)
                if entries:
                    optimizer.state[param].update(entries)

    def forget(self, optimizer: Optimizer) -> None:
        """Drop waiting entries, because a checkpoint replaces them."""
        for param in params_of(optimizer):
            self.waiting.pop(param, None)


Home = OwnHome | OptimizerHome


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters in order, as often as they occur."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def is_marked(optimizer: Optimizer) -> bool:
    """Whether U-Clip has written into an optimizer's param groups."""
    return any(REGION in group for group in optimizer.param_groups)


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether there is a state that steps have left; Adagrad sets its own up before the first."""
    counts = [entries.get("step", 1) for entries in optimizer.state.values() if entries]
    # On the meta device there are no values, and no step can have been taken.
    return any(float(count) > 0 for count in counts if not (isinstance(count, Tensor) and count.is_meta))


class Storage(NamedTuple):
    """Narrower types in which buffers are stored; None for the type the steps compute in."""

    carry: torch.dtype | None = None
    moments: torch.dtype | None = None
    """Of the feed average as well."""

    def kind(self, name: str, param: Tensor, dtype: torch.dtype) -> torch.dtype:
        """The type of one buffer of a parameter whose steps compute in ``dtype``."""
        if name == "count":
            return torch.int64
        if param.is_complex():
            return dtype.to_complex()
        return (self.carry if name == "carry" else self.moments) or dtype

    def rounds(self, rule: Rule) -> bool:
        """Whether some buffer of a rule is stored in fewer bits."""
        averages = any(name not in ("carry", "count") for name in rule.buffers)
        return (self.carry is not None and rule.policy.carries) or (self.moments is not None and averages)


AS_COMPUTED = Storage()


def carry_of(home: Home, param: Tensor, storage: Storage) -> Tensor:
    """The carry of a parameter; zeros before its first step."""
    found = home.peek(param).get(KEYS["carry"])
    if found is not None:
        return found
    kind = storage.kind("carry", param, wide(param.dtype))
    return torch.zeros_like(param, dtype=kind, requires_grad=False)


def refill(home: OwnHome, leaves: list[Leaf], state: dict[int, dict[str, Tensor]]) -> None:
    """Replace all that a home holds by saved entries, by number of the parameter; an error comes before that."""
    for number, entries in state.items():
        leaf = leaves[number] if number < len(leaves) else None
        carry = entries.get(KEYS["carry"])
        if leaf is None or (carry is not None and carry.shape != leaf.param.shape):
            where = f"parameter {number}" if leaf is None else leaf.name
            raise ValueError(f"The state does not fit these parameters: {where} is missing or has another shape.")
    home.state.clear()
    for number, entries in state.items():
        param = leaves[number].param
        home.entries(param).update({key: value.to(param.device, copy=True) for key, value in entries.items()})


def read_storage(carry: Any, moments: Any, params: list[Tensor]) -> Storage:
    """The types the user asks for, or an error that says which there are."""
    asked = {"carry_dtype": carry, "moments_dtype": moments}
    found = [None if _checks.storage(name, kind) is None else torch.bfloat16 for name, kind in asked.items()]
    if any(found) and any(param.is_complex() for param in params):
        raise ValueError("There is no complex bfloat16: leave carry_dtype and moments_dtype out.")
    return Storage(*found) if any(found) else AS_COMPUTED


def buffers_of(entries: Entries, names: Iterable[str], param: Tensor, dtype: torch.dtype, storage: Storage) -> Buffers:
    """The buffers of one parameter, created as zeros where missing. Complex parameters are seen as pairs of reals."""
    found = {}
    for name in names:
        key, kind = KEYS[name], storage.kind(name, param, dtype)
        value = entries.get(key)
        if value is None:
            like = local(param).new_empty(()) if name == "count" else param
            value = entries[key] = torch.zeros_like(like, dtype=kind, requires_grad=False)
        elif value.dtype != kind:  # the model was converted, for example by model.double()
            value = entries[key] = value.to(kind)
        found[name] = torch.view_as_real(local(value)) if value.is_complex() else value
    return Buffers(**found)


class Ledger:
    """Scalars that belong to no single parameter: steps, skips, dropped mass, and the policy's memory of each scope.

    The tensors are shared with the param groups, so that saving the optimizer saves them.
    """

    def __init__(self, layout: Layout) -> None:
        device = layout.leaves[0].param.device
        self.steps = 0
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        # A sum over a long run, to which each step adds little: in float32 it would stand still some day.
        self.dropped = torch.zeros((), dtype=widest(device), device=device)
        self.streak = torch.zeros((), dtype=torch.int64, device=device)
        """Skipped steps in a row, for the warning; not saved."""
        self.memory: Memory | None = None
        """What the policy remembers, one entry per scope; None if it remembers nothing."""
        self.past: Past | None = None
        """What radii have learned of each scope; None if they are numbers."""
        self.fit(layout)

    def reset(self) -> None:
        """Start anew, in place."""
        self.steps = 0
        for tensor in (self.skipped, self.dropped, self.streak, *self._columns()):
            tensor.zero_()

    def _columns(self) -> list[Tensor]:
        """All columns that have an entry for each scope."""
        return [x for table in (self.memory, self.past) if table is not None for x in table.known()]

    def follow(self, other: "Ledger", *, counts: bool = True, unless: Tensor | None = None) -> None:
        """Take over what ``other`` has, unless this is true; with ``counts`` also its steps and skips."""
        pairs = [(self.dropped, other.dropped)]
        pairs += list(zip(self._columns(), other._columns(), strict=True))
        if counts:
            self.steps = other.steps
            pairs += [(self.skipped, other.skipped), (self.streak, other.streak)]
        for mine, theirs in pairs:
            mine.copy_(theirs if unless is None else torch.where(unless, mine, theirs))

    def count(self, skip: Tensor) -> None:
        """Count a skipped step, if this is true."""
        self.skipped += skip
        self.streak.copy_(torch.where(skip, self.streak + 1, 0))

    def fit(self, layout: Layout, old: Layout | None = None) -> None:
        """Make room for the scopes of ``layout``, taking over those that ``old`` had already.

        A table is taken over where the same vector is clipped by an equal rule, or by the one that stands in its place
        now, if its numbers have the same meaning.
        """
        before: dict[Any, tuple[slice, dict[Any, dict[str, Tensor]]]] = {}
        if old is not None:
            tables = [self._tables(rule) for rule in old.rules]
            before = {(run.rule, run.name): (place, tables[run.rule]) for run, place in old.runs}
        self.memory, self.past = self._new_memory(layout), self._new_past(layout)
        if old is None:
            return
        for run, place in layout.runs:
            rule = layout.rules[run.rule]
            number = find_rule(old.rules, rule)
            was, known = before.get((run.rule if number is None else number, run.name), (place, {}))
            for meaning, columns in self._tables(rule).items():
                kept = {key: column[was] for key, column in known.get(meaning, {}).items()}
                _take({key: column[place] for key, column in columns.items()}, kept)

    def _new_memory(self, layout: Layout) -> Memory | None:
        """What the policy remembers before the first step."""
        if not any(rule.remembers for rule in layout.rules):
            return None
        double = any(wide(leaf.param.dtype) == torch.float64 for leaf in layout.leaves if leaf.scope >= 0)
        count = self.skipped.new_zeros(layout.table.width)
        average = count.to(torch.float64 if double else torch.float32)
        return Memory(average, count, average.clone() if layout.rules[0].policy.noisy else None)

    def _new_past(self, layout: Layout) -> Past | None:
        """What radii have learned before the first step."""
        rules = [rule.region.rule for rule in layout.rules if rule.region.rule is not None]
        keeps = {name for rule in rules for name in rule.keeps}
        if not keeps:
            return None
        count = self.skipped.new_zeros(layout.table.width)
        first, second = (count.to(self.dropped.dtype) if name in keeps else None for name in ("first", "second"))
        length = max(rule.length for rule in rules)
        return Past(count, first, second, self.dropped.new_zeros(layout.table.width, length) if length else None)

    def _tables(self, rule: Rule) -> dict[Any, dict[str, Tensor]]:
        """The columns in which a rule's scopes have entries: by what they mean, and the keys they are saved under."""
        found: dict[Any, dict[str, Tensor]] = {}
        if self.memory is not None and rule.remembers:
            name = f"{PREFIX}{rule.policy.follows}"
            names = (name, f"{name}_count", f"{name}_noise")
            found[rule.policy.follows, rule.region.joint] = dict(zip(names, self.memory.known(), strict=False))
        if self.past is not None and _kind_of(rule):
            columns = {PAST[name]: column for name, column in self.past._asdict().items() if column is not None}
            found[_kind_of(rule)] = columns
        return found

    def write(self, groups: list[Group], layout: Layout, region: str) -> None:
        """Put the scalars into the param groups, where checkpoints find them."""
        for group, place in zip(groups, layout.groups, strict=True):
            for key in [key for key in group if key.startswith(PREFIX)]:
                del group[key]
            group.update({REGION: region, STEPS: self.steps, SKIPPED: self.skipped, DROPPED: self.dropped})
            if place is None:
                continue
            rule, scopes = layout.rules[place[0]], place[1]
            group[AVERAGES] = averages_of(rule)
            for columns in self._tables(rule).values():
                group.update({key: column[scopes] for key, column in columns.items()})

    def read(self, groups: list[Group], places: Places, layout: Layout) -> bool:
        """Take the scalars over from param groups; False if something remembered did not fit and starts anew."""
        fits = True
        for group, place in zip(groups, places, strict=True):
            if STEPS not in group:
                continue
            self.steps = int(group[STEPS])
            self.skipped.copy_(group[SKIPPED])
            self.dropped.copy_(group[DROPPED])
            if place is None:
                continue
            rule, scopes = layout.rules[place[0]], place[1]
            for meaning, columns in self._tables(rule).items():
                # Radii of another kind keep their numbers under the same names.
                known = meaning != _kind_of(rule) or meaning in str(group.get(AVERAGES, "")).split()
                taken = _take({key: column[scopes] for key, column in columns.items()}, group if known else {})
                fits = fits and (taken or not any(key in group for key in columns))
        return fits


def _take(columns: dict[str, Tensor], saved: Mapping[str, Any]) -> bool:
    """Copy what was saved, if it is all there and of the same shape; otherwise start anew, and say so by False."""
    fits = all(key in saved and saved[key].shape == column.shape for key, column in columns.items())
    for key, column in columns.items():
        if fits:
            column.copy_(saved[key])
        else:
            column.zero_()
    return fits


def _kind_of(rule: Rule) -> str:
    """What the past of a rule's radius means; empty if there is none."""
    found = rule.region.rule
    return type(found).__name__ if found is not None and found.follows else ""


def mend(optimizer: Optimizer, leaves: list[Leaf], storage: Storage, summary: str) -> None:
    """Bring loaded buffers back to their own type, and warn of what a load without U-Clip has done to them.

    Such a load casts to the parameter's type (https://github.com/pytorch/pytorch/issues/43706). A float32 carry that
    was cast to float16 may have become infinite, and would stay so: such entries become 0.
    """
    damage: set[str] = set()
    for leaf in leaves:
        entries = optimizer.state.get(leaf.param, {})
        for key in [key for key in entries if key.startswith(PREFIX)]:
            value = entries[key]
            kind = storage.kind(key.removeprefix(PREFIX), leaf.param, wide(leaf.param.dtype))
            narrow = value.dtype in (torch.float16, torch.bfloat16, torch.complex32) and value.dtype != kind
            # Another narrow type than the parameter's was asked for by an earlier run.
            if narrow and value.dtype == leaf.param.dtype:
                damage.add(key)
                if not value.is_complex():
                    value = value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            entries[key] = value.to(kind)
    if damage:
        warn_user(
            f"{summary}: {', '.join(sorted(damage))} had been cast to the parameters' type by a load without U-Clip, "
            "and lost precision; entries that had become infinite are now 0. Attach UClip before "
            "optimizer.load_state_dict()."
        )


def drop_unused(entries: Entries, rule: Rule, *, keep_averages: bool) -> None:
    """Delete buffers the rule has no use for, and averages that mean something else than its own."""
    used = {PREFIX + name for name in rule.buffers if keep_averages or name == "carry"}
    for key in [key for key in entries if key.startswith(PREFIX) and key not in used]:
        del entries[key]


def take_over(
    layout: Layout, ledger: Ledger, home: Home, leaves: list[Leaf], groups: list[Group], places: Places, now: str
) -> None:
    """Read the scalars of ``groups``, and drop averages that mean something else under this clipper's rules."""
    saved = next((group[REGION] for group in groups if REGION in group), None)
    if saved is None:
        return
    kept = True
    for group, place in zip(groups, places, strict=True):
        if place is None:
            continue
        rule = layout.rules[place[0]]
        same = group.get(AVERAGES) == averages_of(rule)
        kept = kept and (same or averages_of(rule) == "none")
        members = {id(param) for param in group.get("params", [])}
        for leaf in leaves:
            if leaf.rule == place[0] and (not members or id(leaf.param) in members):
                drop_unused(home.peek(leaf.param), rule, keep_averages=same)
    kept = ledger.read(groups, places, layout) and kept
    if saved != now:
        warn_user(
            f"The optimizer's state was written with {saved}, but this run clips with {now}. The carry is "
            f"taken over as it is{'' if kept else '; moments, averages and what radii have learned start anew'}."
        )
