"""From runs to cells: one setting at one batch size, its learning rates and seeds, and the epochs they needed.

The paper's protocol: epochs to the target are infinite for a run that did not reach it, whatever the reason; the
learning rate is chosen per setting and batch size by the smallest median; a point is drawn only if all seeds reached.
Trials have no target: there what they are judged by takes the place of epochs.
"""

import functools
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from carryclip_lab import grid
from carryclip_lab.analysis.naming import NONE, Method, RegionName, method_of, radius_rule, region_name, region_order
from carryclip_lab.spec import OPTIMIZERS
from carryclip_lab.store.records import Epoch, Record
from carryclip_lab.store.store import Store
from carryclip_lab.task import Judged

UNKNOWN = "FILE.toml"
"""Stands for the file of a study of one's own in a store from before such names were kept."""


@dataclass(frozen=True)
class Setting:
    """What a line of a figure stands for.

    A radius that follows the gradients belongs to the method: it is one of those that a trial compares.
    """

    optimizer: str
    region: str | None
    method: Method

    @property
    def name(self) -> RegionName:
        """The region in words."""
        return region_name(self.region)


def epochs_of(record: Record) -> float:
    """Epochs to the target: infinite for every way to end but one."""
    return float(record.reached) if record.outcome == "reached" and record.reached is not None else math.inf


@dataclass(frozen=True, eq=False)
class Cell:
    """A setting at one batch size: runs for every learning rate and seed, done or not."""

    setting: Setting
    batch: int
    records: tuple[Record, ...]
    score: Callable[[Record], float] = epochs_of
    """Of a run that is done: the smaller the better, infinite if it came to nothing."""

    @cached_property
    def runs(self) -> dict[float, dict[int, Record]]:
        """By learning rate and seed; of two that differ only in the epochs allowed, the one that was allowed more."""
        found: dict[float, dict[int, Record]] = {}
        for record in sorted(self.records, key=lambda each: (each.spec.lr, each.spec.seed, each.spec.epochs)):
            found.setdefault(record.spec.lr, {})[record.spec.seed] = record
        return found

    @cached_property
    def planned(self) -> int:
        """How many runs there should be."""
        return sum(len(seeds) for seeds in self.runs.values())

    @cached_property
    def done(self) -> int:
        """How many have ended."""
        return sum(record.state == "done" for seeds in self.runs.values() for record in seeds.values())

    @property
    def partial(self) -> bool:
        """Whether runs are missing, so that everything said of the cell may change."""
        return self.done < self.planned

    @cached_property
    def limit(self) -> int:
        """The most epochs a run had."""
        return max(record.spec.epochs for record in self.records)

    def epochs_at(self, lr: float) -> dict[int, float]:
        """Seed → epochs to the target, for the seeds that are done; infinite if it was not reached."""
        return {seed: self.score(record) for seed, record in self.runs[lr].items() if record.state == "done"}

    @cached_property
    def lr(self) -> float | None:
        """The learning rate with the smallest median; None before the first run is done.

        Seeds that are not done, but are at another rate, count as not reached, so that one early seed cannot win
        against five. Ties go to the rate that more seeds reached with, then to the smaller maximum and mean, then to
        the larger rate.
        """
        return min(self.runs, key=self._rank) if self.done else None

    def _rank(self, lr: float) -> tuple[float, ...]:
        seen = list(self.epochs_at(lr).values())
        most = max(len(self.epochs_at(each)) for each in self.runs)
        whole = seen + [math.inf] * (min(len(self.runs[lr]), most) - len(seen))
        finite = [epochs for epochs in seen if epochs < math.inf]
        mean = sum(finite) / len(finite) if finite else math.inf
        return (statistics.median(whole or [math.inf]), -len(finite), max(whole, default=math.inf), mean, -lr)

    @cached_property
    def chosen(self) -> dict[int, float]:
        """Seed → epochs at the chosen learning rate."""
        return {} if self.lr is None else self.epochs_at(self.lr)

    @property
    def seeds(self) -> int:
        """How many seeds there should be at the chosen learning rate."""
        return max(len(seeds) for seeds in self.runs.values()) if self.lr is None else len(self.runs[self.lr])

    @property
    def missed(self) -> int:
        """How many seeds are done at the chosen learning rate and did not reach the target."""
        return sum(epochs == math.inf for epochs in self.chosen.values())

    @property
    def drawn(self) -> bool:
        """The paper's rule: all seeds reached."""
        return len(self.chosen) == self.seeds > 0 == self.missed

    @cached_property
    def median(self) -> float:
        """Over the seeds done; infinite if half of them did not reach the target, NaN if there are none."""
        return float(statistics.median(self.chosen.values())) if self.chosen else math.nan

    @cached_property
    def table(self) -> tuple[tuple[int, ...], np.ndarray]:
        """Seeds and their epochs, (learning rates, seeds), over the rates that are done for all seeds.

        Only the chosen rate, and the seeds done there, as long as no rate is complete.
        """
        whole = {lr: self.epochs_at(lr) for lr, seeds in self.runs.items() if len(self.epochs_at(lr)) == len(seeds)}
        alike = {lr: seen for lr, seen in whole.items() if seen.keys() == self.chosen.keys()}
        alike = alike if self.lr in alike else {0.0: self.chosen}
        return tuple(sorted(self.chosen)), np.array([[seen[seed] for seed in sorted(seen)] for seen in alike.values()])


@dataclass(frozen=True, eq=False)
class Summary:
    """The cells of a study on one data set.

    Attributes:
        study: its name.
        title: what it is.
        tier: ``"smoke"``, ``"small"`` or ``"paper"``.
        task, examples, target, settings: the data, how much of it, the train accuracy at which a run is over, and what
            else the task lets one choose, but for the steps of an epoch (a larger batch has fewer of them) and the
            loss, which is a method as well.
        cells: in the study's order.
        epochs: the epochs of a run, by its id.
        subject: what a trial is about.
        source: what ``carryclip reproduce`` is given for these runs: the study's name, or its file.
    """

    study: str
    title: str
    tier: str
    task: str
    examples: int | None
    target: float
    settings: tuple[Any, ...]
    cells: tuple[Cell, ...]
    epochs: Callable[[str], Sequence[Epoch]]
    subject: Judged | None = None
    source: str | None = None

    @cached_property
    def _by_key(self) -> dict[tuple[Setting, int], Cell]:
        return {(cell.setting, cell.batch): cell for cell in self.cells}

    def find(self, optimizer: str, region: str | None, method: Method, batch: int) -> Cell | None:
        """One cell, if the study has it."""
        return self._by_key.get((Setting(optimizer, region, method), batch))

    def base(self, cell: Cell) -> Cell | None:
        """The optimizer alone, at the cell's batch size."""
        return self.find(cell.setting.optimizer, None, NONE, cell.batch)

    @cached_property
    def optimizers(self) -> list[str]:
        """Those of the study, in the usual order."""
        found = {cell.setting.optimizer for cell in self.cells}
        return [name for name in OPTIMIZERS if name in found]

    @cached_property
    def batches(self) -> list[int]:
        """All batch sizes."""
        return sorted({cell.batch for cell in self.cells})

    @cached_property
    def methods(self) -> list[Method]:
        """All methods, those of the paper first."""
        return sorted({cell.setting.method for cell in self.cells}, key=lambda method: method.order)

    @cached_property
    def regions(self) -> list[str]:
        """All regions, by kind and size."""
        return sorted({cell.setting.region for cell in self.cells if cell.setting.region}, key=region_order)

    @cached_property
    def main_region(self) -> str | None:
        """The paper's norm 0.5, or else the first there is."""
        norms = [region for region in self.regions if region_name(region) == RegionName("norm", (0.5,))]
        return next(iter(norms + self.regions), None)

    @cached_property
    def recipe(self) -> Any:
        """The task, with the settings of the first run."""
        return self.cells[0].records[0].spec.recipe

    @property
    def command(self) -> str:
        """What makes these runs."""
        return f"carryclip reproduce {shlex.quote(self.source or self.study)} {self.recipe.needs}".strip()

    @property
    def data(self) -> str:
        """The data in words."""
        return self.recipe.data_name(self.examples)

    @property
    def described(self) -> str:
        """The same, and when a run is over."""
        told = self.recipe.described([record.spec for record in self.cells[0].records])
        return told if self.target == math.inf else f"{told}, target {100 * self.target:g} % train accuracy"

    @cached_property
    def outcomes(self) -> Counter[str]:
        """How many runs wait, run, and ended in which way."""
        return Counter(record.outcome or record.state for cell in self.cells for record in cell.records)


def runs_of(cells: Iterable[Cell]) -> tuple[int, int]:
    """(done, planned)."""
    chosen = list(cells)
    return sum(cell.done for cell in chosen), sum(cell.planned for cell in chosen)


def summaries(store: Store, study: str) -> list[Summary]:
    """A study of the store, one summary for each data set in it."""
    title, tier = store.title(study)
    shipped = study if study in grid.names() else UNKNOWN
    source = store.files().get(study, shipped)
    return summarise(study, title, tier, store.records(study), store.epochs, source)


def summarise(
    study: str,
    title: str,
    tier: str,
    records: Iterable[Record],
    epochs: Callable[[str], Sequence[Epoch]],
    source: str | None = None,
) -> list[Summary]:
    """The same from records at hand."""
    groups: dict[tuple[str, int | None, float, tuple[Any, ...]], dict[tuple[Setting, int], list[Record]]] = {}
    for record in records:
        spec = record.spec
        region = None if radius_rule(spec.region) else spec.region
        setting = Setting(spec.optimizer, region, method_of(spec))
        settings = tuple(pair for pair in spec.settings if pair[0] not in ("steps", "loss"))
        data = groups.setdefault((spec.task, spec.examples, spec.goal, settings), {})
        data.setdefault((setting, spec.batch), []).append(record)
    known = functools.cache(epochs)
    made = []
    for key, data in groups.items():
        subject = next(iter(data.values()))[0].spec.recipe.judged()
        score = epochs_of if subject is None else subject.score(known)
        cells = tuple(Cell(*place, tuple(found), score) for place, found in data.items())
        made.append(Summary(study, title, tier, *key, cells, epochs if subject is None else known, subject, source))
    return made
