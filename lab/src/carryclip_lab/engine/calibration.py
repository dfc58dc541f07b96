"""How long steps take on this machine, measured with as many workers at once as there will be."""

import dataclasses
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from pebble import ProcessPool

from carryclip_lab.engine import training
from carryclip_lab.engine.cost import Kind, Method, Rates, Steps, Throughput, examples_of, method_of
from carryclip_lab.spec import Spec
from carryclip_lab.tasks import old as tasks
from carryclip_lab.tasks.recipes import TRIALS

BUDGET = 0.25
"""Seconds for each thing that is measured."""
SHORT = (5, 30)
"""Steps of the epochs that are timed."""


def calibrate(
    specs: Iterable[Spec], workers: int, threads: int = 1, device: str = "cpu", data: str | None = None
) -> dict[str, Rates | Throughput | Steps]:
    """Rates by task; ``data`` is a text of one's own."""
    by_task: dict[str, list[Spec]] = {}
    for spec in specs:
        by_task.setdefault(spec.task, []).append(spec)
    begun = time.perf_counter()
    pool = ProcessPool(workers, context=multiprocessing.get_context("spawn"))
    try:
        ready = [pool.schedule(_ready) for _ in range(workers)]
        start = statistics.fmean(future.result() - begun for future in ready)
        rates: dict[str, Rates | Throughput | Steps] = {}
        for task, mine in by_task.items():
            if task in TRIALS:
                kinds = list({Steps.key(spec): spec for spec in mine}.values())
                seen = [pool.schedule(_steps, args=(kinds, threads, os.getcwd(), data)) for _ in range(workers)]
                found = [future.result() for future in seen]
                step, epoch = (
                    {key: statistics.fmean(one[key][part] for one in found) for key in found[0]} for part in (0, 1)
                )
                rates[task] = Steps(step, epoch, start)
                continue
            if task == "imagenet":
                kinds = list({Throughput.key(spec): spec for spec in mine}.values())
                seen = [pool.schedule(_images, args=(kinds, threads, device, os.getcwd())) for _ in range(workers)]
                found = [future.result() for future in seen]
                means = {key: statistics.fmean(one[key] for one in found) for key in found[0]}
                rates[task] = Throughput(means, start)
                continue
            futures = [pool.schedule(_measure, args=(mine, threads, device, os.getcwd())) for _ in range(workers)]
            rates[task] = _together([future.result() for future in futures], start)
        return rates
    finally:
        pool.stop()
        pool.join()


def _ready() -> float:
    return time.perf_counter()


def _together(measured: list[Rates], start: float) -> Rates:
    """The mean of what the workers saw."""
    return Rates(
        step={batch: statistics.fmean(one.step[batch] for one in measured) for batch in measured[0].step},
        method={method: statistics.fmean(one.method[method] for one in measured) for method in measured[0].method},
        example=statistics.fmean(one.example for one in measured),
        start=start + statistics.fmean(one.start for one in measured),
    )


def _measure(specs: list[Spec], threads: int, device: str, folder: str) -> Rates:
    torch.set_num_threads(threads)
    sys.path.append(folder)  # for methods of one's own
    begun = time.perf_counter()
    task = tasks.load(specs[0].task, min(specs, key=examples_of).examples, device)
    loaded = time.perf_counter() - begun
    bare = Spec(task=specs[0].task, optimizer="sgd", lr=1e-6, batch=1, epochs=1, seed=0)
    batches = sorted({spec.batch for spec in specs})
    step = {
        batch: _step(task, bare, min(batch, task.chunk), device) * max(1.0, batch / task.chunk) for batch in batches
    }
    least = min(batches[0], task.chunk)
    methods = {method_of(spec): spec for spec in specs}
    method = {key: max(0.0, _step(task, spec, least, device) - step[batches[0]]) for key, spec in methods.items()}
    net = training.start(bare, task, device).net
    part = slice(0, 5 * task.chunk)
    images, labels = task.images[part], task.labels[part]
    evaluate = _timed(lambda: training.accuracy_of(net, images, labels, task.chunk))
    return Rates(step=step, method=method, example=evaluate / len(labels), start=loaded)


def _steps(specs: list[Spec], threads: int, folder: str, data: str | None) -> dict[Kind, tuple[float, float]]:
    """Seconds of a step of a trial and of what comes with an epoch, from epochs of two lengths."""
    from carryclip_lab.trials.trial import train

    torch.set_num_threads(threads)
    sys.path.append(folder)  # for methods of one's own
    found = {}
    for spec in specs:
        few, many = (
            dataclasses.replace(spec, epochs=1, settings=(*spec.settings, ("steps", steps))) for steps in SHORT
        )
        short, long = (_timed(lambda each=each: list(train(each, data=data))) for each in (few, many))
        step = max(long - short, 0.0) / (SHORT[1] - SHORT[0])
        found[Steps.key(spec)] = (step, max(short - SHORT[0] * step, 0.0))
    return found


def _images(specs: list[Spec], threads: int, device: str, folder: str) -> dict[Method, float]:
    """Images per second, by kind, from steps on pixels that cost nothing to read."""
    from carryclip_lab.engine.team import Team
    from carryclip_lab.imagenet.train import Run

    torch.set_num_threads(threads)
    sys.path.append(folder)  # for methods of one's own
    found = {}
    for spec in specs:
        count = spec.recipe.micro if device != "cpu" else min(spec.recipe.micro, 8)
        pixels = np.random.default_rng(0).integers(256, size=(count, spec.recipe.image, spec.recipe.image, 3))
        labels = np.zeros(count, dtype=np.int64)
        batch = {"image": pixels.astype(np.uint8), "label": labels, "broken": labels - 1}
        run = Run(spec, device, Team())

        def step(run: Run = run, batch: dict[str, np.ndarray] = batch) -> None:
            run.train([batch], pause=False)
            if device != "cpu":
                torch.cuda.synchronize()

        found[Throughput.key(spec)] = count / _timed(step)
    return found


def _step(task: tasks.Task, spec: Spec, batch: int, device: str) -> float:
    """Seconds of a step by a spec's method at another batch size."""
    run = training.start(spec, task, device)
    rows = torch.randperm(len(task.labels))[: 10 * batch].split(batch)
    return _timed(lambda: training.steps(task, run, rows)) / len(rows)


def _timed(function: Callable[[], object]) -> float:
    """The median over as many calls as the budget allows, after one that does not count."""
    function()
    times: list[float] = []
    for _ in itertools.takewhile(lambda _: sum(times) < BUDGET, itertools.count()):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
