"""What a study has to say on each of the paper's claims about CIFAR-10: the cells it rests on, numbers and verdict."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from carryclip_lab.analysis import verdicts
from carryclip_lab.analysis.claims import Verdict
from carryclip_lab.analysis.compare import Comparison, Effect, compare, pooled
from carryclip_lab.analysis.naming import CLIP, FULL, OPTIMIZERS, Kind, Method
from carryclip_lab.analysis.summary import Cell, Summary

SMALL_BATCH, LARGE_BATCH = 100, 500
"""The paper's small batches go up to the first, its large ones begin at the second."""
SMALL_RADIUS = 0.5
ADAPTIVE: tuple[Kind, ...] = ("Welford", "EWMA")
NOTHING = "nothing to compare yet"


@dataclass(frozen=True)
class Evidence:
    """What a study has to say on a claim."""

    ours: str
    verdict: Verdict
    cells: list[Cell]
    """All that the claim rests on."""


# ---------------------------------------------------------------------- cells and their comparisons


def _cells(
    summary: Summary,
    method: Method,
    *,
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    kinds: Sequence[Kind] = ("norm", "component", *ADAPTIVE),
    sizes: Sequence[tuple[float, ...]] = (),
    batches: Callable[[int], bool] = lambda batch: True,
) -> list[Cell]:
    """The study's cells of a method in the paper's regions."""
    return [
        cell
        for cell in summary.cells
        if cell.setting.method == method
        and cell.setting.optimizer in optimizers
        and cell.setting.name.kind in kinds
        and not cell.setting.name.note
        and (not sizes or cell.setting.name.sizes in sizes)
        and batches(cell.batch)
    ]


def _against(summary: Summary, cells: Iterable[Cell]) -> list[Comparison]:
    """Each cell against its optimizer alone, where both have runs."""
    return [found for cell in cells if (found := compare(cell, summary.base(cell)))]


def _with_bases(summary: Summary, cells: Iterable[Cell]) -> list[Cell]:
    chosen = list(cells)
    return list(dict.fromkeys([*chosen, *(base for cell in chosen if (base := summary.base(cell)))]))


def _small(batch: int) -> bool:
    return batch <= SMALL_BATCH


def _large(batch: int) -> bool:
    return batch >= LARGE_BATCH


def _batches(cells: Iterable[Cell]) -> str:
    return ", ".join(str(batch) for batch in sorted({cell.batch for cell in cells}))


def _effects(summary: Summary, groups: dict[str, list[Cell]]) -> dict[str, Effect]:
    """The median ratio of each group that has runs."""
    found = {label: pooled(_against(summary, cells)) for label, cells in groups.items()}
    return {label: effect for label, effect in found.items() if effect is not None}


# ---------------------------------------------------------------------- the claims


def speed(summary: Summary, optimizers: Sequence[str], methods: Sequence[Method]) -> Evidence | None:
    """C1 and C2: norm 0.5 at small batches."""
    groups = {
        f"{OPTIMIZERS[optimizer]} {method.label}": _cells(
            summary, method, optimizers=[optimizer], kinds=["norm"], sizes=[(0.5,)], batches=_small
        )
        for optimizer in optimizers
        for method in methods
    }
    cells = _with_bases(summary, [cell for group in groups.values() for cell in group])
    if not all(groups.values()) or any(summary.base(cell) is None for cell in cells):
        return None
    effects = _effects(summary, groups)
    if not effects:
        return Evidence(NOTHING, "inconclusive", cells)
    enough = len(effects) == len(groups)
    told = "; ".join(f"{label} {effect.as_ratio}" for label, effect in effects.items())
    ours = f"epochs against the optimizer alone, median over batch {_batches(cells)}: {told} (95 % intervals)"
    values = list(effects.values())
    rule = verdicts.clearly_speeds_up(values[0]) if len(groups) == 1 and enough else verdicts.speeds_up(values)
    return Evidence(ours, rule if enough else "inconclusive", cells)


def rarely_slows(summary: Summary) -> Evidence | None:
    """C3."""
    cells = _cells(summary, FULL, batches=_small)
    if not cells:
        return None
    seen = [each for each in _against(summary, cells) if not math.isnan(each.effect.value)]
    if not seen:
        return Evidence(NOTHING, "inconclusive", _with_bases(summary, cells))
    slowed = [each for each in seen if each.effect.value > verdicts.SLOWED]
    sure = sum(each.effect.low > 1.0 for each in slowed)
    ours = f"ratio above 1.05 in {len(slowed)} of {len(seen)} cells with batch ≤ 100 (interval above 1 in {sure})"
    return Evidence(ours, verdicts.rarely_slows(len(slowed), len(seen), _seeds(seen)), _with_bases(summary, cells))


def harms_large(summary: Summary) -> Evidence | None:
    """C4."""
    cells = _cells(summary, FULL, batches=_large)
    if not cells:
        return None
    all_seen = _against(summary, cells)
    seen = [each for each in all_seen if not math.isnan(each.effect.value) or each.more_missed]
    if not seen:
        return Evidence(NOTHING, "inconclusive", _with_bases(summary, cells))
    slowed = [each for each in seen if each.effect.value > verdicts.SLOWED]
    unstable = [each for each in seen if each.more_missed > 0]
    harmed = len({id(each) for each in slowed + unstable})
    missed = [_share_missed([getattr(each, side) for each in all_seen]) for side in ("cell", "base")]
    ours = (
        f"slower (ratio above 1.05) in {len(slowed)} of {len(seen)} cells with batch ≥ 500, missing the target with "
        f"more seeds in {len(unstable)}; seeds that missed it: U-Clip {missed[0]}, alone {missed[1]}"
    )
    return Evidence(ours, verdicts.often_harms(harmed, len(seen), _seeds(seen)), _with_bases(summary, cells))


def _share_missed(cells: Iterable[Cell]) -> str:
    chosen = list(cells)
    total = sum(len(cell.chosen) for cell in chosen)
    return f"{100 * sum(cell.missed for cell in chosen) / total:.0f} %" if total else "none run"


def _seeds(comparisons: Sequence[Comparison]) -> int:
    return min((each.effect.seeds for each in comparisons), default=0)


def small_radii(summary: Summary) -> Evidence | None:
    """C5."""
    cells = _cells(summary, FULL, kinds=["norm"], batches=_small)
    groups: dict[float, list[Cell]] = {}
    for cell in sorted(cells, key=lambda each: each.setting.name.sizes):
        groups.setdefault(cell.setting.name.sizes[0], []).append(cell)
    if not any(radius <= SMALL_RADIUS for radius in groups) or not any(radius > SMALL_RADIUS for radius in groups):
        return None
    effects = _effects(summary, {f"{radius:g}": group for radius, group in groups.items()})
    told = "; ".join(f"radius {radius}: {effect.as_ratio}" for radius, effect in effects.items())
    ours = f"epochs against the optimizer alone, median over optimizers and batch {_batches(cells)}: {told}"
    small = [effect for radius, effect in effects.items() if float(radius) <= SMALL_RADIUS]
    return Evidence(ours, verdicts.speeds_up(small), _with_bases(summary, cells))


def adaptive_sgd(summary: Summary) -> Evidence | None:
    """C6."""
    clip, carried = (_cells(summary, method, optimizers=["sgd"], kinds=ADAPTIVE) for method in (CLIP, FULL))
    odd = [cell for cell in carried if cell.setting.name.kind == "Welford" and cell.setting.name.sizes == (2.0, 0.0)]
    rest = [cell for cell in carried if cell not in odd]
    if not (clip and rest and odd):
        return None
    gain = pooled(_against(summary, clip + carried))
    plain = [(cell, summary.find("sgd", cell.setting.region, CLIP, cell.batch)) for cell in rest]
    carry = pooled([found for pair in plain if (found := compare(*pair))])
    cells = _with_bases(summary, clip + carried)
    if gain is None or carry is None:
        return Evidence(NOTHING, "inconclusive", cells)
    reached = sum(len(cell.chosen) - cell.missed for cell in odd)
    runs = sum(len(cell.chosen) for cell in odd)
    ours = (
        f"median ratio to SGD alone {gain.as_ratio}; with carry to without {carry.as_ratio}; "
        f"Welford (2, 0) with carry reached the target in {reached} of {runs} runs"
    )
    return Evidence(ours, verdicts.adds_little(gain, carry, reached), cells)


def adaptive(summary: Summary, optimizer: str) -> Evidence | None:
    """C7 and C8."""
    cells = _cells(summary, FULL, optimizers=[optimizer], kinds=ADAPTIVE)
    if not cells:
        return None
    seen = _against(summary, cells)
    effect = pooled(seen)
    if effect is None:
        return Evidence(NOTHING, "inconclusive", _with_bases(summary, cells))
    faster = sum(each.effect.high < 1.0 for each in seen)
    told = f"median ratio to {OPTIMIZERS[optimizer]} alone {effect.as_ratio}"
    ours = f"{told}; clearly faster in {faster} of {len(seen)} cells"
    return Evidence(ours, verdicts.no_benefit(effect, faster, len(seen)), _with_bases(summary, cells))
