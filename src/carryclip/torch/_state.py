"""Where the clipper's memory lives: buffers beside the optimizer's own state, scalars in the param groups.

``optimizer.state[p]["uclip_..."]`` is saved by everything that saves optimizers. Scalars that belong to no parameter
are kept in the param groups, which load without a cast.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from carryclip.algorithm import Buffers, Feed
from carryclip.torch._layout import Group, Layout

PREFIX = "uclip_"
REGION = PREFIX + "region"
STEPS = PREFIX + "steps"
SKIPPED = PREFIX + "skipped"
DROPPED = PREFIX + "dropped"
FEED = PREFIX + "feed"
FEED_COUNT = PREFIX + "feed_count"


def wide(dtype: torch.dtype) -> torch.dtype:
    """The real type of the buffers for gradients of ``dtype``: float64 for float64, otherwise float32."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


class OwnHome:
    """Keeps buffers by itself, for the explicit form."""

    def __init__(self) -> None:
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def entries(self, param: Tensor) -> dict[str, Any]:
        """The entries of one parameter, to read and to extend."""
        return self.state.setdefault(param, {})


class OptimizerHome:
    """Keeps buffers in ``optimizer.state``.

    Adam and many others set up their state when it is empty, so ours must not be there first: new entries wait aside
    until the optimizer has taken its step.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        self.waiting: dict[Tensor, dict[str, Tensor]] = {}
        self._owner: dict[Tensor, Optimizer] = {}

    def entries(self, param: Tensor) -> dict[str, Any]:
        """The entries of one parameter, wherever they are now."""
        optimizer = self._owner.get(param)
        if optimizer is None:
            self._owner = {p: o for o in self.optimizers for p in params_of(o)}
            optimizer = self._owner[param]
        found = optimizer.state.get(param)
        return found if found else self.waiting.setdefault(param, {})

    def settle(self, optimizer: Optimizer) -> None:
        """Move waiting entries in, now that the optimizer has its own."""
        for param in [p for p in self.waiting if self._owner.get(p) is optimizer]:
            optimizer.state[param].update(self.waiting.pop(param))

    def forget(self, optimizer: Optimizer) -> None:
        """Drop waiting entries, because a checkpoint replaces them."""
        for param in params_of(optimizer):
            self.waiting.pop(param, None)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters in order, as often as they occur."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def buffers_of(entries: dict[str, Any], names: Iterable[str], param: Tensor, dtype: torch.dtype) -> Buffers:
    """The buffers of one parameter, created as zeros where missing. Complex parameters are seen as pairs of reals."""
    found = {}
    for name in names:
        key = PREFIX + name
        if key not in entries:
            if name == "count":
                entries[key] = torch.zeros((), dtype=torch.int64, device=param.device)
            else:
                kind = dtype.to_complex() if param.is_complex() else dtype
                entries[key] = torch.zeros_like(param, dtype=kind, requires_grad=False)
        value = entries[key]
        found[name] = torch.view_as_real(value) if value.is_complex() else value
    return Buffers(**found)


class Ledger:
    """Scalars that belong to no single parameter: steps, skips, dropped mass, and the feed of each norm.

    The tensors are shared with the param groups, so that saving the optimizer saves them.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps = 0
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.dropped = torch.zeros((), dtype=torch.float32, device=device)
        self.streak = torch.zeros((), dtype=torch.int64, device=device)
        """Skipped steps in a row, for the warning; not saved."""
        self.feeds: dict[int, Feed] = {}

    def reset(self) -> None:
        """Start anew, in place."""
        self.steps = 0
        for tensor in (self.skipped, self.dropped, self.streak, *(x for feed in self.feeds.values() for x in feed)):
            tensor.zero_()

    def feed(self, layout: Layout, rule: int, dtype: torch.dtype) -> Feed:
        """The feed of a rule's scopes, longer than before if groups were added."""
        size = layout.scopes[rule]
        found = self.feeds.get(rule)
        if found is None or found.average.numel() < size:
            device = self.skipped.device
            feed = Feed(
                torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=torch.int64, device=device)
            )
            if found is not None:
                feed.average[: found.average.numel()] = found.average
                feed.count[: found.count.numel()] = found.count
            self.feeds[rule] = found = feed
        return found

    def write(self, groups: list[Group], layout: Layout, region: str) -> None:
        """Put the scalars into the param groups, where checkpoints find them."""
        for group, place in zip(groups, layout.groups, strict=True):
            group.update({REGION: region, STEPS: self.steps, SKIPPED: self.skipped, DROPPED: self.dropped})
            if place is not None and place[0] in self.feeds:
                feed = self.feeds[place[0]]
                group.update({FEED: feed.average[place[1]], FEED_COUNT: feed.count[place[1]]})

    def read(self, groups: list[Group], layout: Layout) -> None:
        """Take the scalars over from param groups that have them."""
        for group, place in zip(groups, layout.groups, strict=True):
            if STEPS not in group:
                continue
            self.steps = int(group[STEPS])
            self.skipped.copy_(group[SKIPPED])
            self.dropped.copy_(group[DROPPED])
            if place is not None and FEED in group and layout.rules[place[0]].gates_scopes:
                feed = self.feed(layout, place[0], group[FEED].dtype)
                feed.average[place[1]] = group[FEED].to(feed.average.device)
                feed.count[place[1]] = group[FEED_COUNT].to(feed.count.device)
