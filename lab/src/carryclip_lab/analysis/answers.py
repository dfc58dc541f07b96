"""The questions that people ask before they turn the carry on, answered for each trial by rules that have tests."""

import math
from dataclasses import dataclass
from typing import Literal, TypeGuard

from carryclip_lab.analysis.compare import Effect
from carryclip_lab.analysis.naming import CLIP, FULL, NONE, SHRUNK
from carryclip_lab.analysis.summary import Summary, runs_of
from carryclip_lab.analysis.verdicts import too_few
from carryclip_lab.analysis.worth import Bias, Block, blocks

MOST_GONE = 0.25
"""Bias counts as removed if at most this share of it is left."""
Verdict = Literal["yes", "no", "in part", "it hurts", "no difference", "nothing to remove", "inconclusive"]

DEFAULT = SHRUNK
"""The policy that one gets without asking; a test compares it with the library's."""
SAFE = "Is the default as good as plain clipping, or better, at plain clipping's best rate?"
DROP_IN = "Is the default better than plain clipping at plain clipping's best rate?"
BETTER = "Is the default better than plain clipping, each at its best rate?"
BIAS = "Does the default remove clipping's bias?"
THAN_NONE = "Is the default better than no clipping?"
FULL_BETTER = "Is the full carry better than plain clipping at plain clipping's best rate?"
COST = "At what cost?"


@dataclass(frozen=True)
class Answer:
    """One line below a trial's table."""

    optimizer: str
    region: str
    question: str
    seen: str
    verdict: Verdict | None
    """None where the question is not one of yes or no."""


def helps(effect: Effect | None, little: float) -> Verdict:
    """Whether the interval lies above 0, below it, or so close to it that the difference does not matter."""
    if not _known(effect):
        return "inconclusive"
    if effect.low > 0.0:
        return "yes"
    if effect.high < 0.0:
        return "it hurts"
    return "no difference" if -little <= effect.low and effect.high <= little else "inconclusive"


def keeps_up(effect: Effect | None, little: float) -> Verdict:
    """Whether a method is as good as another: the whole interval says that what it may lack is next to nothing."""
    if not _known(effect):
        return "inconclusive"
    if effect.low >= -little:
        return "yes"
    return "no" if effect.high < 0.0 else "inconclusive"


def _known(effect: Effect | None) -> TypeGuard[Effect]:
    return effect is not None and not too_few([effect]) and not math.isnan(effect.value)


def removes(plain: Bias | None, carried: Bias | None, alone: Bias | None = None) -> Verdict:
    """Whether the bias that plain clipping has is gone, smaller, or still there with a carry.

    What the optimizer surely has by itself is not clipping's.
    """
    if plain is None or carried is None:
        return "inconclusive"
    own = 0.0 if alone is None else alone.low
    if plain.low <= own:
        return "nothing to remove" if carried.low <= own else "inconclusive"
    if carried.high - own <= MOST_GONE * (plain.size - own):
        return "yes"
    if carried.high < plain.low:
        return "in part"
    return "no" if carried.size >= plain.low else "inconclusive"


def answers(summary: Summary) -> list[Answer]:
    """All of them for a trial; none for an optimizer and region before all runs of it are done."""
    found = []
    for block in blocks(summary):
        done, planned = runs_of(row.cell for row in block.rows)
        if done == planned:
            found += _answers(block)
    return found


def _answers(block: Block) -> list[Answer]:
    plain, ours, alone = map(block.find, (CLIP, DEFAULT, NONE))
    if plain is None or ours is None:
        return []
    subject = block.subject
    found: list[tuple[str, str, Verdict | None]] = []
    same = block.drop_in(DEFAULT)
    if same is not None:
        found.append((SAFE, f"{subject.words} better by {same.as_gain}", keeps_up(same, subject.little)))
    asked = (
        (DROP_IN, same),
        (BETTER, block.over(DEFAULT)),
        (THAN_NONE, block.over(DEFAULT, NONE)),
        (FULL_BETTER, block.drop_in(FULL)),
    )
    for question, gain in asked:
        if gain is not None:
            found.append((question, f"{subject.words} better by {gain.as_gain}", helps(gain, subject.little)))
    if subject.bias is not None:
        told = [row for row in map(block.find, (NONE, CLIP, DEFAULT, FULL)) if row and row.bias]
        seen = ", ".join(f"{row.name} {row.bias}" for row in told)
        found.append((BIAS, seen, removes(plain.bias, ours.bias, alone.bias if alone else None)))
    found.append((COST, _cost(block), None))
    return [Answer(block.stepped_by, block.label, *line) for line in found]


def _cost(block: Block) -> str:
    """Memory, and the learning rate that suits; how much time it takes is what ``carryclip bench`` measures."""
    plain, told = block.find(CLIP), ["one buffer of the gradients' size"]
    for row in map(block.find, (DEFAULT, FULL)):
        if row and plain and row.cell.lr and plain.cell.lr:
            rate = row.cell.lr / plain.cell.lr
            told.append(f"{row.name}: best learning rate {rate:.2g} × that of plain clipping")
    return "; ".join(told)
