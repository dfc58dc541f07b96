"""How long steps take on this machine, measured with as many workers at once as there will be."""

import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from pebble import ProcessPool

from carryclip_lab.engine.cost import Rates, data_of, method_of
from carryclip_lab.engine.methods import unwarned
from carryclip_lab.spec import Spec
from carryclip_lab.task import Place

BUDGET = 0.25
"""Seconds for each thing that is measured."""


def calibrate(specs: Iterable[Spec], workers: int, threads: int = 1, place: Place | None = None) -> dict[str, Rates]:
    """Rates by task."""
    by_task: dict[str, list[Spec]] = {}
    for spec in specs:
        by_task.setdefault(spec.task, []).append(spec)
    begun = time.perf_counter()
    pool = ProcessPool(workers, context=multiprocessing.get_context("spawn"))
    try:
        ready = [pool.schedule(time.perf_counter) for _ in range(workers)]
        start = statistics.fmean(future.result() - begun for future in ready)
        rates = {}
        for task, mine in by_task.items():
            given = (mine, threads, place or Place(), [*sys.path, os.getcwd()])
            futures = [pool.schedule(_measure, args=given) for _ in range(workers)]
            rates[task] = _mean([future.result() for future in futures], start)
        return rates
    finally:
        pool.stop()
        pool.join()


def _mean(measured: list[Rates], start: float) -> Rates:
    """Of what the workers saw."""

    def of(name: str) -> dict:
        tables = [getattr(one, name) for one in measured]
        return {key: statistics.fmean(table[key] for table in tables) for key in tables[0]}

    return Rates(of("step"), of("epoch"), of("method"), start + statistics.fmean(one.start for one in measured))


def _measure(specs: list[Spec], threads: int, place: Place, path: list[str]) -> Rates:
    """Steps by SGD without clipping for all data and batch sizes; what methods add, at the first data alone."""
    torch.set_num_threads(threads)
    sys.path.extend(folder for folder in path if folder not in sys.path)  # for tasks and methods of one's own
    begun = time.perf_counter()
    specs[0].recipe.timing(specs[0], place)
    loaded = time.perf_counter() - begun
    step, epoch = {}, {}
    for spec in specs:
        key = spec.batch, data_of(spec)
        if key in step:
            continue
        bare = replace(spec, optimizer="sgd", lr=1e-6, region=None, carry="none", method=None, epochs=1)
        step[key], after = _seconds(bare, place)
        epoch[spec.examples, data_of(spec)] = after
    for spec in specs:  # the same data and batches, other numbers of examples
        if (spec.examples, data_of(spec)) not in epoch:
            epoch[spec.examples, data_of(spec)] = _seconds(spec, place)[1]
    first = min(specs, key=lambda spec: spec.batch)
    bare = step[first.batch, data_of(first)]
    method = {}
    for key, spec in {method_of(spec): spec for spec in specs}.items():
        same = replace(spec, batch=first.batch, examples=first.examples, settings=first.settings, epochs=1)
        method[key] = max(0.0, _seconds(same, place)[0] - bare)
    return Rates(step, epoch, method, loaded)


def _seconds(spec: Spec, place: Place) -> tuple[float, float]:
    """Of a step on a whole batch, and of what comes with an epoch."""
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
