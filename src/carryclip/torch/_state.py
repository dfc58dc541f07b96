"""Where the clipper's memory lives: buffers beside the optimizer's own state, scalars in the param groups.

``optimizer.state[p]["uclip_..."]`` is saved by everything that saves optimizers. Scalars that belong to no parameter
are kept in the param groups, which load without a cast.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from carryclip import _checks
from carryclip.algorithm import Buffers, Feed, Rule, find_rule
from carryclip.torch._layout import Group, Layout
from carryclip.torch._shards import local

PREFIX = "uclip_"
REGION = PREFIX + "region"
AVERAGES = PREFIX + "averages"
STEPS = PREFIX + "steps"
SKIPPED = PREFIX + "skipped"
DROPPED = PREFIX + "dropped"
FEED = PREFIX + "feed"
FEED_COUNT = PREFIX + "feed_count"

Entries = dict[str, Any]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The real type of the buffers for gradients of ``dtype``: float64 for float64, otherwise float32."""
    if dtype == torch.float32:
        return dtype
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def averages_of(rule: Rule) -> str:
    """What the running averages of a rule mean; those of another meaning cannot be gone on with."""
    kinds = [type(rule.region.estimator).__name__] if rule.region.estimator is not None else []
    return " ".join([*kinds, "feed"] if rule.gates_coordinates else kinds) or "none"


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
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._waiting: dict[Tensor, Entries] = {}
        self._owner: dict[Tensor, weakref.ref[Optimizer]] = {}

    def _state(self, param: Tensor) -> Entries | None:
        """What the optimizer keeps for a parameter; None if nothing yet."""
        if param not in self._owner:
            live = [(ref, ref()) for ref in self._optimizers]
            self._owner = {p: ref for ref, optimizer in live if optimizer is not None for p in params_of(optimizer)}
        optimizer = self._owner[param]()
        return None if optimizer is None else optimizer.state.get(param) or None

    def entries(self, param: Tensor) -> Entries:
        """The entries of one parameter, wherever they are now."""
        state = self._state(param)
        if state is None:
            return self._waiting.setdefault(param, {})
        if self._waiting and param in self._waiting:  # a step that raised has left them behind
            state.update(self._waiting.pop(param))
        return state

    def peek(self, param: Tensor) -> Entries:
        """The entries of one parameter, to read only."""
        return self._waiting.get(param) or self._state(param) or {}

    def settle(self, optimizer: Optimizer) -> None:
        """Move waiting entries in, now that the optimizer has its own.

        A parameter without a gradient took no part in the step: if it has no state yet, it still has to be set up.
        """
        for param in [p for p in self._waiting if self._owner[p]() is optimizer]:
            if param.grad is None and not optimizer.state.get(param):
                continue
            entries = self._waiting.pop(param)
            if entries:
                optimizer.state[param].update(entries)

    def forget(self, optimizer: Optimizer) -> None:
        """Drop waiting entries, because a checkpoint replaces them."""
        for param in params_of(optimizer):
            self._waiting.pop(param, None)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters in order, as often as they occur."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether there is a state that steps have left; Adagrad sets its own up before the first."""
    return any(float(entries.get("step", 1)) > 0 for entries in optimizer.state.values() if entries)


KEYS = {name: PREFIX + name for name in Buffers._fields}


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


AS_COMPUTED = Storage()


def read_storage(carry: Any, moments: Any, params: list[Tensor]) -> Storage:
    """The types the user asks for, or an error that says which there are."""
    asked = {"carry_dtype": carry, "moments_dtype": moments}
    found = [None if _checks.storage(name, kind) is None else torch.bfloat16 for name, kind in asked.items()]
    if any(found) and any(param.is_complex() for param in params):
        raise ValueError(
            "There is no complex bfloat16: leave carry_dtype and moments_dtype out for complex parameters."
        )
    return Storage(*found) if any(found) else AS_COMPUTED


def buffers_of(entries: Entries, names: Iterable[str], param: Tensor, dtype: torch.dtype, storage: Storage) -> Buffers:
    """The buffers of one parameter, created as zeros where missing. Complex parameters are seen as pairs of reals."""
    found = {}
    for name in names:
        key = KEYS[name]
        value = entries.get(key)
        if value is not None and value.dtype == dtype and storage is AS_COMPUTED and not param.is_complex():
            found[name] = value  # nearly always
            continue
        kind = storage.kind(name, param, dtype)
        if value is None:
            like = local(param).new_empty(()) if name == "count" else param
            value = entries[key] = torch.zeros_like(like, dtype=kind, requires_grad=False)
        elif value.dtype != kind:  # the model was converted, for example by model.double()
            value = entries[key] = value.to(kind)
        found[name] = torch.view_as_real(local(value)) if value.is_complex() else value
    return Buffers(**found)


class Ledger:
    """Scalars that belong to no single parameter: steps, skips, dropped mass, and the feed of each norm.

    The tensors are shared with the param groups, so that saving the optimizer saves them.
    """

    def __init__(self, layout: Layout) -> None:
        device = layout.leaves[0].param.device
        double = any(wide(leaf.param.dtype) == torch.float64 for leaf in layout.leaves)
        self.steps = 0
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.dropped = torch.zeros((), dtype=torch.float64 if double else torch.float32, device=device)
        self.streak = torch.zeros((), dtype=torch.int64, device=device)
        """Skipped steps in a row, for the warning; not saved."""
        self.feeds: dict[int, Feed] = {}
        """For each rule that gates norms, one entry per scope."""
        self.fit(layout)

    def reset(self) -> None:
        """Start anew, in place."""
        self.steps = 0
        for tensor in (self.skipped, self.dropped, self.streak, *(x for feed in self.feeds.values() for x in feed)):
            tensor.zero_()

    def follow(self, other: "Ledger", *, counts: bool = True, unless: Tensor | None = None) -> None:
        """Take over what ``other`` has, unless this is true; with ``counts`` also its steps and skips."""
        pairs = [(self.dropped, other.dropped)]
        pairs += [pair for n, feed in self.feeds.items() for pair in zip(feed, other.feeds[n], strict=True)]
        if counts:
            self.steps = other.steps
            pairs += [(self.skipped, other.skipped), (self.streak, other.streak)]
        for mine, theirs in pairs:
            mine.copy_(theirs if unless is None else torch.where(unless, mine, theirs))

    def fit(self, layout: Layout, old: Layout | None = None) -> None:
        """Make room for the scopes of ``layout``, taking over those that ``old`` had already."""
        before, self.feeds = self.feeds, {}
        for number, rule in enumerate(layout.rules):
            if not rule.gates_scopes:
                continue
            types = {wide(leaf.param.dtype) for leaf in layout.leaves if leaf.rule == number}
            size, device = len(layout.scopes[number]), self.skipped.device
            feed = Feed(
                torch.zeros(size, dtype=torch.float64 if torch.float64 in types else torch.float32, device=device),
                torch.zeros(size, dtype=torch.int64, device=device),
            )
            was = None if old is None else find_rule(old.rules, rule)
            if old is not None and was in before:
                places = {scope: place for place, scope in enumerate(old.scopes[was])}
                for place, scope in enumerate(layout.scopes[number]):
                    if scope in places:
                        feed.average[place] = before[was].average[places[scope]]
                        feed.count[place] = before[was].count[places[scope]]
            self.feeds[number] = feed

    def write(self, groups: list[Group], layout: Layout, region: str) -> None:
        """Put the scalars into the param groups, where checkpoints find them."""
        for group, place in zip(groups, layout.groups, strict=True):
            for key in [key for key in group if key.startswith(PREFIX)]:
                del group[key]
            group.update({REGION: region, STEPS: self.steps, SKIPPED: self.skipped, DROPPED: self.dropped})
            if place is not None:
                group[AVERAGES] = averages_of(layout.rules[place[0]])
                if place[0] in self.feeds:
                    feed = self.feeds[place[0]]
                    group.update({FEED: feed.average[place[1]], FEED_COUNT: feed.count[place[1]]})

    def read(self, groups: list[Group], places: list[tuple[int, slice] | None]) -> bool:
        """Take the scalars over from param groups; False if a gate's memory did not fit and starts anew."""
        fits = True
        for group, place in zip(groups, places, strict=True):
            if STEPS not in group:
                continue
            self.steps = int(group[STEPS])
            self.skipped.copy_(group[SKIPPED])
            self.dropped.copy_(group[DROPPED])
            feed = None if place is None else self.feeds.get(place[0])
            if feed is None or place is None:
                continue
            saved = group.get(FEED)
            if saved is None or saved.shape != feed.average[place[1]].shape:
                feed.average[place[1]], feed.count[place[1]] = 0.0, 0
                fits = fits and saved is None
            else:
                feed.average[place[1]] = saved.to(feed.average)
                feed.count[place[1]] = group[FEED_COUNT].to(feed.count)
        return fits
