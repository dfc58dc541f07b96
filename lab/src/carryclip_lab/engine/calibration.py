"""How long steps take on this machine, measured with as many workers at once as there will be."""

import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
from pebble import ProcessPool

from carryclip_lab.engine.cost import Rates, data_of, method_of
from carryclip_lab.engine.methods import unwarned
from carryclip_lab.spec import Spec
from carryclip_lab.task import Place

BUDGET = 0.25
"""Seconds for each thing that is measured."""
Tell = Callable[[int, int, str], None]
"""Called every second with what is timed: its number, how many there are, and its name."""
_started: Any = None
"""In a worker: how many timings all of them have started together."""


@dataclass(frozen=True)
class _Timings:
    """What is timed of a task."""

    steps: Sequence[Spec]
    """A run for each batch size and data."""
    epochs: Sequence[Spec]
    """The same data and batches, other numbers of examples."""
    methods: Sequence[Spec]

    @property
    def names(self) -> list[str]:
        """In their order."""
        sizes = [f"{spec.task}, batch {spec.batch:,}" for spec in self.steps]
        epochs = [f"{spec.task}, {spec.examples} examples" for spec in self.epochs]
        return sizes + epochs + [f"{spec.task}, {spec.optimizer}, {spec.label}" for spec in self.methods]


def _timings(specs: Iterable[Spec]) -> _Timings:
    """SGD without clipping with all data and batch sizes; methods only once."""
    steps: dict[Any, Spec] = {}
    epochs: dict[Any, Spec] = {}
    methods: dict[Any, Spec] = {}
    for spec in specs:
        steps.setdefault((spec.batch, data_of(spec)), spec)
        epochs.setdefault((spec.examples, data_of(spec)), spec)
        methods[method_of(spec)] = spec
    known = {(spec.examples, data_of(spec)) for spec in steps.values()}
    more = [spec for key, spec in epochs.items() if key not in known]
    return _Timings(list(steps.values()), more, list(methods.values()))


def calibrate(
    specs: Iterable[Spec], workers: int, threads: int = 1, place: Place | None = None, tell: Tell | None = None
) -> dict[str, Rates]:
    """Rates by task; ``tell`` hears how far it is."""
    by_task: dict[str, list[Spec]] = {}
    for spec in specs:
        by_task.setdefault(spec.task, []).append(spec)
    names = [name for mine in by_task.values() for name in _timings(mine).names]
    context = multiprocessing.get_context("spawn")
    started = context.Value("i", 0)

    def look() -> None:
        if tell is not None:
            number = min(max(1, math.ceil(started.value / workers)), len(names))
            tell(number, len(names), names[number - 1])

    begun = time.perf_counter()
    pool = ProcessPool(workers, context=context, initializer=_begin, initargs=(started,))
    try:
        ready = [pool.schedule(time.perf_counter) for _ in range(workers)]
        start = statistics.fmean(seen - begun for seen in _results(ready, look))
        rates = {}
        for task, mine in by_task.items():
            given = (mine, threads, place or Place(), [*sys.path, os.getcwd()])
            futures = [pool.schedule(_measure, args=given) for _ in range(workers)]
            rates[task] = _mean(_results(futures, look), start)
        return rates
    finally:
        pool.stop()
        pool.join()


def _begin(started: Any) -> None:
    """What each worker does first."""
    global _started
    _started = started


def _results(futures: Sequence[Future], look: Callable[[], None]) -> list[Any]:
    """What the workers return; meanwhile a look every second."""
    look()
    while wait(futures, timeout=1.0).not_done:
        look()
    return [future.result() for future in futures]


def _mean(measured: list[Rates], start: float) -> Rates:
    """Of what the workers saw."""

    def of(name: str) -> dict:
        tables = [getattr(one, name) for one in measured]
        return {key: statistics.fmean(table[key] for table in tables) for key in tables[0]}

    return Rates(of("step"), of("epoch"), of("method"), start + statistics.fmean(one.start for one in measured))


def _measure(specs: list[Spec], threads: int, place: Place, path: list[str]) -> Rates:
    """Steps by SGD without clipping for all data and batch sizes; what methods add, at the first data alone."""
    chosen = _timings(specs)
    torch.set_num_threads(threads)
    sys.path.extend(folder for folder in path if folder not in sys.path)  # for tasks and methods of one's own
    begun = time.perf_counter()
    specs[0].recipe.timing(specs[0], place)
    loaded = time.perf_counter() - begun
    step, epoch = {}, {}
    for spec in chosen.steps:
        bare = replace(spec, optimizer="sgd", lr=1e-6, region=None, carry="none", method=None, epochs=1)
        step[spec.batch, data_of(spec)], after = _seconds(bare, place)
        epoch[spec.examples, data_of(spec)] = after
    for spec in chosen.epochs:
        epoch[spec.examples, data_of(spec)] = _seconds(spec, place)[1]
    first = min(specs, key=lambda spec: spec.batch)
    bare = step[first.batch, data_of(first)]
    method = {}
    for spec in chosen.methods:
        same = replace(spec, batch=first.batch, examples=first.examples, settings=first.settings, epochs=1)
        method[method_of(spec)] = max(0.0, _seconds(same, place)[0] - bare)
    return Rates(step, epoch, method, loaded)


def _seconds(spec: Spec, place: Place) -> tuple[float, float]:
    """Of a step on a whole batch, and of what comes with an epoch."""
    if _started is not None:
        with _started.get_lock():
            _started.value += 1
    timing = spec.recipe.timing(spec, place)
    with unwarned():
        step = _timed(timing.step)
        whole = step * max(1.0, spec.batch / timing.examples)
        if timing.evaluate is None:
            return whole, timing.share * step / timing.examples / 3
        return whole, timing.share * _timed(timing.evaluate)


def _timed(function: Callable[[], object]) -> float:
    """The median over as many calls as the budget allows, after one that does not count."""
    function()
    times: list[float] = []
    for _ in itertools.takewhile(lambda _: sum(times) < BUDGET, itertools.count()):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
