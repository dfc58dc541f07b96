"""Going on with what a checkpoint, or an earlier clipper, has left behind."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from carryclip.algorithm import Rule
from carryclip.diagnosis import warn_user
from carryclip.torch._layout import Group, Layout, Leaf
from carryclip.torch._state import (
    AVERAGES,
    PREFIX,
    REGION,
    Entries,
    Ledger,
    OptimizerHome,
    OwnHome,
    Storage,
    averages_of,
    wide,
)


def mend(optimizer: Optimizer, leaves: list[Leaf], storage: Storage, summary: str) -> None:
    """Undo what a load without U-Clip has done to our buffers, as far as that is possible, and warn."""
    damage: set[str] = set()
    for leaf in leaves:
        damage |= repair(optimizer.state.get(leaf.param, {}), leaf.param, storage)
    if damage:
        warn_user(
            f"{summary}: {', '.join(sorted(damage))} had been cast to the parameters' type by a load without U-Clip, "
            "and lost precision; entries that had become infinite are now 0. Attach UClip before "
            "optimizer.load_state_dict()."
        )


def repair(entries: Entries, param: Tensor, storage: Storage) -> set[str]:
    """Bring loaded buffers back to their own type; says what a load without U-Clip has done to them.

    A float32 carry that was cast to float16 may have become infinite, and would stay so: such entries become 0.
    """
    damage = set()
    for key in [key for key in entries if key.startswith(PREFIX)]:
        value, kind = entries[key], storage.kind(key.removeprefix(PREFIX), param, wide(param.dtype))
        if value.dtype in (torch.float16, torch.bfloat16, torch.complex32) and value.dtype != kind:
            damage.add(key)
            value = value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if not value.is_complex() else value
        entries[key] = value.to(kind)
    return damage


def drop_unused(entries: Entries, rule: Rule, *, keep_averages: bool) -> None:
    """Delete buffers the rule has no use for, and averages that mean something else than its own."""
    used = {PREFIX + name for name in rule.buffers if keep_averages or name == "carry"}
    for key in [key for key in entries if key.startswith(PREFIX) and key not in used]:
        del entries[key]


def take_over(
    layout: Layout,
    ledger: Ledger,
    home: OwnHome | OptimizerHome,
    leaves: list[Leaf],
    groups: list[Group],
    places: list[tuple[int, slice] | None],
    description: str,
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
    kept = ledger.read(groups, places) and kept
    if saved != description:
        warn_user(
            f"The optimizer's state was written with {saved}, but this run clips with {description}. The carry is "
            f"taken over as it is{'' if kept else '; moments and feed averages start anew'}."
        )
