"""How far a study is, or timing it: a bar on a terminal, lines elsewhere; the time left is weighed by cost."""

import math
import time
from collections import Counter
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from carryclip_lab.engine.cost import weight
from carryclip_lab.grid import Study
from carryclip_lab.store.records import FAULTS, OUTCOMES, duration
from carryclip_lab.store.store import Store

REFRESH, PLAIN = 1.0, 30.0
"""Seconds between two looks at the store, and between two lines off a terminal."""
OFTEN = 5.0
"""Between the first lines, when little is known yet, and between lines that say something new."""


class _Bar:
    """A bar that is there only on a terminal; elsewhere it would leave an empty line."""

    console: Console
    _bar: Progress

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._bar.stop()


class Timings(_Bar):
    """How far measuring is: a bar on a terminal, elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("Timing"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f}: {task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, start=True, visible=False)
        self._said, self._text = -math.inf, ""

    def __call__(self, number: int, among: int, name: str) -> None:
        """This one of so many is timed."""
        if self.console.is_terminal:
            self._bar.update(self._task, completed=number, total=among, description=name, visible=True)
            return
        now, text = time.monotonic(), f"Timing {number} of {among}: {name}"
        if now - self._said >= (PLAIN if text == self._text else OFTEN):
            self._said, self._text = now, text
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Display(_Bar):
    """Looks at the store now and then, and says what it sees."""

    def __init__(self, console: Console, store: Store, study: Study, wanted: set[str]) -> None:
        self.console, self.store, self.study = console, store, study
        pairs = zip(study.specs, study.typical, strict=True)
        self._typical = {spec.id: typical for spec, typical in pairs if spec.id in wanted}
        self._weights = {spec.id: weight(spec, self._typical[spec.id]) for spec in study.specs if spec.id in wanted}
        self._total = sum(self._weights.values())
        told = {run: len(store.epochs(run)) for run in self._weights.keys() - store.done()}
        self._before = {run: epochs for run, epochs in told.items() if epochs}
        """Epochs of half-done runs: those before a checkpoint are told again, which is no work."""
        self._begun = time.monotonic()
        self._at_start = self._done()
        self._looked = self._said = 0.0
        whole = Column(no_wrap=True, overflow="ignore")  # the bar gives way, numbers do not
        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=20)),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TaskProgressColumn(table_column=whole),
            TimeElapsedColumn(table_column=whole),
            TextColumn("{task.fields[left]}", table_column=whole),
        )
        self._bar = Progress(*columns, console=console, transient=True, expand=True)
        self._task = self._bar.add_task(study.name, total=self._total, left="")

    def tick(self) -> None:
        """Look, if it is time to."""
        now = time.monotonic()
        if now - self._looked < REFRESH:
            return
        self._looked = now
        if self.console.is_terminal:
            text = f"{self._left()}, {brief(self._progress())}"
            self._bar.update(self._task, completed=self._done(), left=text)
        elif now - self._said >= min(PLAIN, max(OFTEN, 0.5 * (now - self._begun))):
            self._said = now
            share = self._done() / self._total if self._total else 1.0
            counts = tally(self._progress())
            said = f"{self.study.name}: {share:.0%} of the work; {counts}; {self._left()}"
            self.console.print(said, highlight=False, markup=False, soft_wrap=True)

    def _progress(self) -> Counter[str]:
        """Of the runs that are wanted."""
        return self.store.progress_of_chosen(self.study.name)

    def _done(self) -> float:
        """Weight of what is done, half-done runs by their epochs."""
        done, under_way = self.store.done(), self.store.under_way()
        finished = sum(self._weights[run] for run in done & self._weights.keys())
        for run in (self._before.keys() | under_way.keys()) & (self._weights.keys() - done):
            epochs = max(self._before.get(run, 0), under_way.get(run, (0, ""))[0])
            finished += self._weights[run] * min(1.0, epochs / self._typical[run])
        return finished

    def _left(self) -> str:
        done = self._done()
        gained, spent = done - self._at_start, time.monotonic() - self._begun
        if (gained <= 0.01 * self._total and spent < 60.0) or gained <= 0.0:
            return "time left not known yet"
        return f"about {duration(spent * max(0.0, self._total - done) / gained)} left"


def brief(progress: Counter[str]) -> str:
    """Counts for one line of a terminal; what went wrong is named, what went well only counted."""
    finished = sum(progress[outcome] for outcome in OUTCOMES)
    faults = [f"{progress[fault]} {fault}" for fault in FAULTS if progress[fault]]
    return ", ".join([f"{finished} of {sum(progress.values())} runs", *faults])


def tally(progress: Counter[str]) -> str:
    """Counts in words: what is done, what runs, what waits."""
    done = [f"{progress[outcome]} {outcome.replace('_', ' ')}" for outcome in OUTCOMES if progress[outcome]]
    finished = sum(progress[outcome] for outcome in OUTCOMES)
    parts = [f"{finished} of {sum(progress.values())} runs", *done]
    return ", ".join([*parts, f"{progress['running']} running"] if progress["running"] else parts)
