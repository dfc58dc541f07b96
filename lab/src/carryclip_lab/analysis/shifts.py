"""A faster method, or only another learning rate: epochs to the target at the same rate, and at each one's best.

A method whose steps are longer than they look is ahead of its optimizer alone at low rates and behind it at high ones.
That is no speed-up: the optimizer alone has the same at a higher rate.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from carryclip_lab.analysis.naming import CLIP, FULL, SHRUNK, Method
from carryclip_lab.analysis.summary import Cell, Summary
from carryclip_lab.analysis.tables import Table
from carryclip_lab.analysis.verdicts import LITTLE
from carryclip_lab.spec import OPTIMIZERS

Answer = Literal["a speed-up", "a shift of the learning rate, not a speed-up", "neither a speed-up nor a shift", "open"]
Epochs = Mapping[float, float]
"""By learning rate; infinite where the target was not reached."""


@dataclass(frozen=True)
class Shift:
    """A cell against its optimizer alone, rate by rate.

    Attributes:
        cell: the method's.
        base: of the optimizer alone.
    """

    cell: Cell
    base: Cell

    @property
    def answer(self) -> Answer:
        """By what is done."""
        return answer(medians(self.cell), medians(self.base))

    @property
    def so_far(self) -> bool:
        """Whether rates or seeds are missing."""
        return self.cell.partial or self.base.partial

    def __str__(self) -> str:
        ours, theirs = medians(self.cell), medians(self.base)
        optimizer = OPTIMIZERS[self.cell.setting.optimizer]
        method, alone = self.cell.setting.method.label, f"{optimizer} alone"
        where = f"{optimizer}, batch {self.cell.batch:,}"
        if not ours or not theirs:
            return f"{where}: {method if not ours else alone} has not run yet"
        same = [f"at {lr:g} {method} {_epochs(ours[lr])}, alone {_epochs(theirs[lr])}" for lr in ours if lr in theirs]
        told = ["epochs " + "; ".join(same)] if same else []
        told.append(f"best: {method} {_best(ours)}, alone {_best(theirs)}")
        least = min(len(each.chosen) for each in (self.cell, self.base))
        seeds = "one seed" if least == 1 else f"{least} seeds"
        missing = _missing(self.cell, method) + _missing(self.base, "alone")
        so_far = f", so far (not run yet: {', '.join(missing)})" if missing else ", so far" if self.so_far else ""
        return f"{where}: {'; '.join(told)}. By this {self.answer}{so_far}, with {seeds}"


def answer(ours: Epochs, theirs: Epochs) -> Answer:
    """What epochs by rate say of a method and its optimizer alone; open as long as neither arrived at any rate."""
    best = [min(each.values(), default=math.inf) for each in (ours, theirs)]
    if not ours or not theirs or best == [math.inf, math.inf]:
        return "open"
    if fewer(*best):
        return "a speed-up"
    if any(fewer(ours[lr], theirs[lr]) for lr in ours.keys() & theirs.keys()):
        return "a shift of the learning rate, not a speed-up"
    return "neither a speed-up nor a shift"


def fewer(ours: float, theirs: float) -> bool:
    """By more than a twentieth, and by more than the one epoch that chance alone may make."""
    return ours < LITTLE * theirs and ours < theirs - 1.0


def medians(cell: Cell) -> dict[float, float]:
    """Of the seeds that are done, for the rates that have any, from the smallest rate on."""
    seen = {lr: list(cell.epochs_at(lr).values()) for lr in sorted(cell.runs)}
    return {lr: float(statistics.median(epochs)) for lr, epochs in seen.items() if epochs}


def shifts(summary: Summary, method: Method = FULL) -> list[Shift]:
    """For every optimizer and batch size that the study has with the method in its main region and alone."""
    found = []
    for optimizer in summary.optimizers:
        for batch in summary.batches:
            cell = summary.find(optimizer, summary.main_region, method, batch)
            base = None if cell is None else summary.base(cell)
            if cell is not None and base is not None:
                found.append(Shift(cell, base))
    return found


def drop_in(summary: Summary) -> list[str]:
    """What the default needs in plain clipping's place, for every rate at which both have run with the same seeds."""
    told = []
    for optimizer in summary.optimizers:
        for batch in summary.batches:
            ours, plain = (summary.find(optimizer, summary.main_region, each, batch) for each in (SHRUNK, CLIP))
            if ours is None or plain is None:
                continue
            for lr in sorted(ours.runs.keys() & plain.runs.keys()):
                pairs = _pairs(ours.epochs_at(lr), plain.epochs_at(lr))
                if pairs:
                    mine, theirs = (_spread(each) for each in zip(*pairs, strict=True))
                    seeds = "one seed" if len(pairs) == 1 else f"{len(pairs)} seeds"
                    where = f"{OPTIMIZERS[optimizer]}, batch {batch:,}, rate {lr:g}"
                    told.append(f"{where}: the default {mine}, plain clipping {theirs} ({seeds})")
    return told


def _pairs(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[tuple[float, float]]:
    """Of the seeds that both have."""
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def _spread(epochs: Sequence[float]) -> str:
    return ", ".join(map(_epochs, epochs))


def of_rates(summary: Summary) -> Table:
    """A line for every setting and batch size that has begun: epochs at every rate, and which rates are left."""
    lines = []
    for cell in sorted(summary.cells, key=lambda cell: (summary.optimizers.index(cell.setting.optimizer), cell.batch)):
        seen = medians(cell)
        if seen:
            region = "" if cell.setting.region is None else f", {cell.setting.name.label}"
            told = ", ".join(f"{lr:g}: {_epochs(epochs)}" for lr, epochs in seen.items())
            left = ", ".join(_missing(cell)) or "none"
            optimizer = OPTIMIZERS[cell.setting.optimizer]
            lines.append([optimizer, f"{cell.batch:,}", f"{cell.setting.method.label}{region}", told, left])
    return Table(["optimizer", "batch", "clipping", "learning rate: epochs", "runs left"], lines)


def _epochs(epochs: float) -> str:
    return "does not arrive" if epochs == math.inf else f"{epochs:g}"


def _best(seen: Epochs) -> str:
    lr = min(seen, key=lambda lr: (seen[lr], lr))
    if seen[lr] == math.inf:
        return "nowhere"
    edge = ", the edge of what has run" if lr in (min(seen), max(seen)) else ""
    return f"{seen[lr]:g} (at {lr:g}{edge})"


def _missing(cell: Cell, name: str = "") -> list[str]:
    """Rates whose runs are not all done, with how many seeds are left where there are several."""
    told = []
    for lr in sorted(cell.runs):
        planned, left = len(cell.runs[lr]), len(cell.runs[lr]) - len(cell.epochs_at(lr))
        if left:
            seeds = "" if planned == 1 else f" ({left} of {planned} seeds)"
            told.append(f"{name} {lr:g}{seeds}".strip())
    return told
