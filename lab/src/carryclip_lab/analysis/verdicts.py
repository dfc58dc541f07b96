"""The rules by which the paper's claims about training are judged: pure functions of a few numbers.

Ratios are of epochs to the target, below 1 if the method is faster than what it is compared with. With fewer than
three seeds nothing is judged. "Slowed" is the list of claims' own word: a ratio above 1.05. Where the paper says
"clearly", "rarely" or "little" the number that stands for the word is a constant below.
"""

from collections.abc import Sequence

from carryclip_lab.analysis.claims import Verdict
from carryclip_lab.analysis.compare import Effect

SEEDS = 3
"""The fewest seeds that are judged."""
SLOWED = 1.05
"""From this ratio on a method slows the optimizer."""
LITTLE = 0.95
"""Saving less than this is no benefit."""
CLEARLY = 0.8
"""A clear speed-up saves a fifth of the epochs."""
RARELY, SOMETIMES = 0.1, 1 / 3
OFTEN, AT_TIMES = 1 / 2, 1 / 4
AGREES = 0.5
"""Percent of accuracy that two numbers may differ by."""


def speeds_up(effects: Sequence[Effect]) -> Verdict:
    """C1 and C5: every one of several ratios is below 1.

    Holds if all intervals lie below 1, in part if some do; contradicted if none does and one lies above. Otherwise the
    intervals cross 1: inconclusive.
    """
    if too_few(effects):
        return "inconclusive"
    faster = [effect.high < 1.0 for effect in effects]
    if all(faster):
        return "holds"
    if any(faster):
        return "holds in part"
    return "contradicted" if any(effect.low > 1.0 for effect in effects) else "inconclusive"


def clearly_speeds_up(effect: Effect) -> Verdict:
    """C2: the interval lies below 1 and a fifth of the epochs is saved; in part if less is saved."""
    verdict = speeds_up([effect])
    return "holds in part" if verdict == "holds" and effect.value > CLEARLY else verdict


def rarely_slows(slowed: int, cells: int, seeds: int) -> Verdict:
    """C3, from the number of cells whose ratio is above 1.05: at most a tenth; in part up to a third."""
    if cells == 0 or seeds < SEEDS:
        return "inconclusive"
    share = slowed / cells
    return "holds" if share <= RARELY else "holds in part" if share <= SOMETIMES else "contradicted"


def often_harms(harmed: int, cells: int, seeds: int) -> Verdict:
    """C4, from the number of cells that are slower or miss the target more often: half of them; in part a quarter."""
    if cells == 0 or seeds < SEEDS:
        return "inconclusive"
    share = harmed / cells
    return "holds" if share >= OFTEN else "holds in part" if share >= AT_TIMES else "contradicted"


def adds_little(gain: Effect, carry: Effect, reached: int) -> Verdict:
    """C6: adaptive regions add little to SGD, the carry improves them, and Welford (2, 0) with carry never arrives.

    Args:
        gain: adaptive regions, with and without carry, against SGD alone.
        carry: adaptive regions with carry against those without, but for Welford (2, 0).
        reached: seeds that reached the target with Welford (2, 0) and carry, over all batch sizes.

    Holds if all three parts do, in part if some do; contradicted if none does and one is shown to be wrong.
    """
    if too_few([gain, carry]):
        return "inconclusive"
    true = (gain.low > LITTLE, carry.high < 1.0, reached == 0)
    false = (gain.high < LITTLE, carry.low > 1.0, reached > 0)
    if all(true):
        return "holds"
    if any(true):
        return "holds in part"
    return "contradicted" if any(false) else "inconclusive"


def no_benefit(effect: Effect, faster: int, cells: int) -> Verdict:
    """C7 and C8: over all cells together no twentieth of the epochs is saved.

    Holds if the whole interval says so, in part if it does but more than a quarter of the cells are faster with
    intervals of their own below 1; contradicted if the whole interval says that more is saved.
    """
    if too_few([effect]) or effect.low <= LITTLE <= effect.high:
        return "inconclusive"
    if effect.high < LITTLE:
        return "contradicted"
    return "holds in part" if faster > cells / 4 else "holds"


def same_table(rows: Sequence[tuple[float, float, float]], expected: int) -> Verdict:
    """I1, from (ours, the paper's median, its range) of each row, in percent.

    A row agrees if ours is within half a percent, or twice the paper's range if that is more. Holds if all rows agree,
    in part if three quarters do.
    """
    if len(rows) < expected:
        return "inconclusive"
    agree = sum(abs(ours - median) <= max(AGREES, 2 * spread) for ours, median, spread in rows)
    return "holds" if agree == expected else "holds in part" if agree >= 3 * expected / 4 else "contradicted"


def too_few(effects: Sequence[Effect]) -> bool:
    """Whether fewer seeds stand behind one of them than are judged."""
    return not effects or min(effect.seeds for effect in effects) < SEEDS
