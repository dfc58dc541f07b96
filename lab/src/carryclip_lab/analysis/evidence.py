"""What a study has to say on each of the paper's claims about CIFAR-10: the cells it rests on, numbers and verdict."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from carryclip_lab.analysis import verdicts
from carryclip_lab.analysis.claims import Verdict
from carryclip_lab.analysis.compare import Comparison, Effect, compare, pooled
from carryclip_lab.analysis.naming import CLIP, FULL, Kind, Method, RegionName
from carryclip_lab.analysis.shifts import shifts
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.spec import OPTIMIZERS

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


def _cells(
    summary: Summary,
    method: Method,
    *,
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    kinds: Sequence[Kind] = ("norm", "component", *ADAPTIVE),
    least: int = 1,
    most: float = math.inf,
) -> list[Cell]:
    """The study's cells of a method in the paper's regions, with batch sizes from ``least`` to ``most``."""
    return [
        cell
        for cell in summary.cells
        if cell.setting.method == method
        and cell.setting.optimizer in optimizers
        and cell.setting.name.kind in kinds
        and not cell.setting.name.note
        and least <= cell.batch <= most
    ]


def _against(summary: Summary, cells: Iterable[Cell]) -> list[Comparison]:
    """Each cell against its optimizer alone, where both have runs."""
    return [found for cell in cells if (found := compare(cell, summary.base(cell)))]


def _effects(summary: Summary, groups: dict[str, list[Cell]]) -> dict[str, Effect]:
    """The median ratio of each group that has runs."""
    found = {label: pooled(_against(summary, cells)) for label, cells in groups.items()}
    return {label: effect for label, effect in found.items() if effect is not None}


def _evidence(
    summary: Summary, cells: Sequence[Cell], ours: str = NOTHING, verdict: Verdict = "inconclusive"
) -> Evidence | None:
    """From these cells and their optimizers alone; None if there are none."""
    bases = [base for cell in cells if (base := summary.base(cell))]
    return Evidence(ours, verdict, list(dict.fromkeys([*cells, *bases]))) if cells else None


def _batches(cells: Iterable[Cell]) -> str:
    return ", ".join(str(batch) for batch in sorted({cell.batch for cell in cells}))


def speed(summary: Summary, optimizers: Sequence[str], methods: Sequence[Method]) -> Evidence | None:
    """C1 and C2: norm 0.5 at small batches."""
    groups: dict[str, list[Cell]] = {}
    for optimizer in optimizers:
        for method in methods:
            norms = _cells(summary, method, optimizers=[optimizer], kinds=["norm"], most=SMALL_BATCH)
            half = [cell for cell in norms if cell.setting.name.sizes == (SMALL_RADIUS,)]
            groups[f"{OPTIMIZERS[optimizer]} {method.label}"] = half
    cells = [cell for group in groups.values() for cell in group]
    if not all(groups.values()) or any(summary.base(cell) is None for cell in cells):
        return None
    effects = _effects(summary, groups)
    if not effects:
        return _evidence(summary, cells)
    told = "; ".join(f"{label} {effect.as_ratio}" for label, effect in effects.items())
    ours = f"epochs against the optimizer alone, median over batch {_batches(cells)}: {told}"
    ours += " (95 % intervals)" if any(effect.seeds > 1 for effect in effects.values()) else ""
    if len(groups) == 1:  # the claim of one method is worth the question whether it only wants another rate
        ours += "".join(f"; {shift}" for shift in shifts(summary, methods[0]) if shift.cell in cells)
    if len(effects) < len(groups):
        return _evidence(summary, cells, ours)
    values = list(effects.values())
    verdict = verdicts.clearly_speeds_up(values[0]) if len(groups) == 1 else verdicts.speeds_up(values)
    return _evidence(summary, cells, ours, verdict)


def rarely_slows(summary: Summary) -> Evidence | None:
    """C3."""
    cells = _cells(summary, FULL, most=SMALL_BATCH)
    seen = [each for each in _against(summary, cells) if not math.isnan(each.effect.value)]
    if not seen:
        return _evidence(summary, cells)
    slowed = [each for each in seen if each.effect.value > verdicts.SLOWED]
    sure = sum(each.effect.low > 1.0 for each in slowed)
    ours = f"ratio above 1.05 in {len(slowed)} of {len(seen)} cells with batch ≤ 100 (interval above 1 in {sure})"
    return _evidence(summary, cells, ours, verdicts.rarely_slows(len(slowed), len(seen), _seeds(seen)))


def harms_large(summary: Summary) -> Evidence | None:
    """C4."""
    cells = _cells(summary, FULL, least=LARGE_BATCH)
    all_seen = _against(summary, cells)
    seen = [each for each in all_seen if not math.isnan(each.effect.value) or each.more_missed]
    if not seen:
        return _evidence(summary, cells)
    slowed = [each for each in seen if each.effect.value > verdicts.SLOWED]
    unstable = [each for each in seen if each.more_missed > 0]
    harmed = len({id(each) for each in slowed + unstable})
    missed = [_share_missed([getattr(each, side) for each in all_seen]) for side in ("cell", "base")]
    ours = (
        f"slower (ratio above 1.05) in {len(slowed)} of {len(seen)} cells with batch ≥ 500, missing the target with "
        f"more seeds in {len(unstable)}; seeds that missed it: U-Clip {missed[0]}, alone {missed[1]}"
    )
    return _evidence(summary, cells, ours, verdicts.often_harms(harmed, len(seen), _seeds(seen)))


def _share_missed(cells: Sequence[Cell]) -> str:
    total = sum(len(cell.chosen) for cell in cells)
    return f"{100 * sum(cell.missed for cell in cells) / total:.0f} %"


def _seeds(comparisons: Sequence[Comparison]) -> int:
    return min(each.effect.seeds for each in comparisons)


def small_radii(summary: Summary) -> Evidence | None:
    """C5."""
    cells = _cells(summary, FULL, kinds=["norm"], most=SMALL_BATCH)
    groups: dict[float, list[Cell]] = {}
    for cell in sorted(cells, key=lambda each: each.setting.name.sizes):
        groups.setdefault(cell.setting.name.sizes[0], []).append(cell)
    if not groups or not min(groups) <= SMALL_RADIUS < max(groups):
        return None
    effects = _effects(summary, {f"{radius:g}": group for radius, group in groups.items()})
    told = "; ".join(f"radius {radius}: {effect.as_ratio}" for radius, effect in effects.items())
    ours = f"epochs against the optimizer alone, median over optimizers and batch {_batches(cells)}: {told}"
    small = [effect for radius, effect in effects.items() if float(radius) <= SMALL_RADIUS]
    return _evidence(summary, cells, ours, verdicts.speeds_up(small))


def adaptive_sgd(summary: Summary) -> Evidence | None:
    """C6."""
    clip, carried = (_cells(summary, method, optimizers=["sgd"], kinds=ADAPTIVE) for method in (CLIP, FULL))
    odd = [cell for cell in carried if cell.setting.name == RegionName("Welford", (2.0, 0.0))]
    rest = [cell for cell in carried if cell not in odd]
    if not (clip and rest and odd):
        return None
    gain = pooled(_against(summary, clip + carried))
    plain = [(cell, summary.find("sgd", cell.setting.region, CLIP, cell.batch)) for cell in rest]
    carry = pooled([found for pair in plain if (found := compare(*pair))])
    if gain is None or carry is None:
        return _evidence(summary, clip + carried)
    reached = sum(len(cell.chosen) - cell.missed for cell in odd)
    runs = sum(len(cell.chosen) for cell in odd)
    ours = (
        f"median ratio to SGD alone {gain.as_ratio}; with carry to without {carry.as_ratio}; "
        f"Welford (2, 0) with carry reached the target in {reached} of {runs} runs"
    )
    return _evidence(summary, clip + carried, ours, verdicts.adds_little(gain, carry, reached))


def adaptive(summary: Summary, optimizer: str) -> Evidence | None:
    """C7 and C8."""
    cells = _cells(summary, FULL, optimizers=[optimizer], kinds=ADAPTIVE)
    seen = _against(summary, cells)
    effect = pooled(seen)
    if effect is None:
        return _evidence(summary, cells)
    faster = sum(each.effect.high < 1.0 for each in seen)
    told = f"median ratio to {OPTIMIZERS[optimizer]} alone {effect.as_ratio}"
    ours = f"{told}; clearly faster in {faster} of {len(seen)} cells"
    return _evidence(summary, cells, ours, verdicts.no_benefit(effect, faster, len(seen)))
