"""Clocks and scales: time by turns, memory that a step allocates, and the kernels it launches."""

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Step = Callable[[], Any]

_FREE = ("view", "reshape", "expand", "slice", "select", "split", "permute", "detach", "empty", "unbind", "as_strided")
_FREE += ("transpose", "narrow", "unsqueeze", "squeeze", "is_", "item", "_local_scalar", "resolve", "to", "alias")


@dataclass(frozen=True)
class Times:
    """Seconds per step: median and quartiles."""

    median: float
    low: float
    high: float


def quartiles(samples: list[float]) -> Times:
    """Median and spread of repeated measurements."""
    if len(samples) < 2:
        return Times(samples[0], samples[0], samples[0])
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Times(middle, low, high)


def by_turns(steps: dict[str, Step], repeats: int, before: Step = int, loops: int = 1) -> dict[str, Times]:
    """Time each step once per round, so that a slow moment of the machine meets all of them.

    ``before`` restores the gradients and is not timed; with several ``loops`` it runs once for all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, step in steps.items():
                before()
                start = time.perf_counter()
                for _ in range(loops):
                    step()
                times[name].append((time.perf_counter() - start) / loops)
    finally:
        gc.enable()
    return {name: quartiles(samples) for name, samples in times.items()}


def loops_for(step: Step, least: float = 2e-3) -> int:
    """How often to repeat a step so that the clock's own error does not count."""
    step()
    start = time.perf_counter()
    step()
    return max(1, math.ceil(least / max(time.perf_counter() - start, 1e-7)))


def peak(step: Step) -> int:
    """Most bytes that a step has allocated at a time, by what the allocator reports."""
    inner: Any = _profiled(step, memory=True).profiler
    running = most = 0
    for event in sorted(inner.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            running += event.nbytes()
            most = max(most, running)
    return most


def _profiled(step: Step, *, memory: bool = False) -> torch.profiler.profile:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=memory) as profiler:
        step()
    return profiler


def kernels(step: Step) -> int:
    """Operations a step dispatches: on a device a launch each, or a few for a list; a compiled function counts once."""
    count = 0
    for event in _profiled(step).events() or []:
        if event.cpu_parent is not None and not _is_wrapper(event.cpu_parent):
            continue
        name = event.name.removeprefix("aten::")
        count += event.name.startswith("Torch-Compiled Region") or (
            event.name.startswith("aten::") and not name.startswith(_FREE)
        )
    return count


def _is_wrapper(event: Any) -> bool:
    return event.name.startswith(("Optimizer.", "ProfilerStep", "clip")) and event.cpu_parent is None
