"""Runs the contests and collects one flat list of results."""

import gc
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carryclip import CarryClipWarning, __version__
from carryclip_lab.bench import contestants, jax_side, meters, models, theory_side, training
from carryclip_lab.bench.contestants import COMPONENT_RADIUS, Entry, Make
from carryclip_lab.bench.meters import Times
from carryclip_lab.bench.models import Shape
from carryclip_lab.theory_figures.study import Scale

BASELINE = "clip_grad_norm_"
SIZES = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
SCALING = ("eager Component", "eager Norm", "compiled Component", "compiled Norm")


@dataclass
class Row:
    """One contestant on one model. Ratios are to the baseline of the same contest, timed by turns with it."""

    part: str
    model: str
    name: str
    parameters: int
    milliseconds: float
    low: float
    high: float
    ratio: float | None = None
    """To the baseline's median."""
    floor: float | None = None
    """To the median of a bare pass over the same arrays."""
    peak_bytes: int | None = None
    held_per_parameter: float | None = None
    kernels: int | None = None
    first_seconds: float | None = None
    bytes_moved: float | None = None
    """In model sizes, by XLA's own count."""


Say = Callable[[str], None]


def setting(command: str) -> dict[str, Any]:
    """Where and with what the figures were made."""
    return {
        "command": command,
        "carryclip": __version__,
        "torch": torch.__version__,
        "jax": _version("jax"),
        "optax": _version("optax"),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class Arena:
    """Parameters of one model, and gradients that are the same for every contestant and every step."""

    def __init__(self, shapes: list[Shape]) -> None:
        torch.manual_seed(0)
        self.data = [torch.randn(shape) for shape in shapes]
        self.source = [COMPONENT_RADIUS * torch.randn(shape) for shape in shapes]
        self.gradients = [torch.empty(shape) for shape in shapes]
        self.count = sum(x.numel() for x in self.data)
        self.restore()

    def restore(self) -> None:
        """The gradients as they were before anyone clipped them."""
        torch._foreach_copy_(self.gradients, self.source)

    def enter(self, make: Make) -> Entry:
        """A contestant with parameter objects of its own on the same memory."""
        params: list[Tensor] = [nn.Parameter(x) for x in self.data]
        for param, gradient in zip(params, self.gradients, strict=True):
            param.grad = gradient
        return make(params)


def contest(part: str, model: str, shapes: list[Shape], makers: dict[str, Make], repeats: int, say: Say) -> list[Row]:
    """Time all of ``makers`` by turns on one model; then memory and kernels, one by one."""
    arena = Arena(shapes)
    entries: dict[str, Entry] = {}
    first: dict[str, float] = {}
    for name, make in makers.items():
        say(f"{model}: {name}, first step")
        entries[name] = arena.enter(make)
        arena.restore()
        start = time.perf_counter()
        entries[name].step()
        first[name] = time.perf_counter() - start
    arena.restore()
    loops = meters.loops_for(entries[BASELINE].step)
    say(f"{model}: timing {len(entries)} by turns")
    steps = {name: entry.step for name, entry in entries.items()}
    samples = meters.by_turns(steps, repeats, arena.restore, lambda: None, loops)
    middle = {name: meters.quartiles(times) for name, times in samples.items()}
    rows = []
    for name, entry in entries.items():
        say(f"{model}: {name}, memory and kernels")
        arena.restore()
        most = meters.peak(entry.step)
        arena.restore()
        launches = meters.kernels(entry.step)
        floor = middle.get("floor " + _bare(name))
        row = _timed(part, model, name, arena.count, middle[name], middle[BASELINE])
        row.floor = None if floor is None else middle[name].median / floor.median
        row.peak_bytes, row.kernels, row.first_seconds = most, launches, first[name]
        row.held_per_parameter = entry.held() / arena.count
        rows.append(row)
    del entries, steps
    gc.collect()
    return rows


def _timed(part: str, model: str, name: str, count: int, mine: Times, rival: Times) -> Row:
    """A row with its times in milliseconds."""
    milliseconds = (1e3 * mine.median, 1e3 * mine.low, 1e3 * mine.high)
    return Row(part, model, name, count, *milliseconds, ratio=mine.median / rival.median)


def _bare(name: str) -> str:
    return name.removeprefix("compiled ")


def baseline() -> dict[str, Make]:
    """The contestant all others are compared with."""
    return {BASELINE: contestants.baselines()[BASELINE]}


def clipping(model: str, repeats: int, compile: bool, say: Say) -> list[Row]:
    """All clipping of one model, in contests small enough for the memory."""
    shapes = models.MODELS[model]()
    rows = contest("clipping", model, shapes, contestants.baselines() | contestants.optimizers(), repeats, say)
    rows += _without(contest("clipping", model, shapes, baseline() | contestants.modes(False), repeats, say))
    if compile:
        makers = baseline() | contestants.modes(True) | contestants.floors()
        rows += _without(contest("clipping", model, shapes, makers, repeats, say))
    return rows


def _without(rows: list[Row]) -> list[Row]:
    """The baseline is listed once."""
    return [row for row in rows if row.name != BASELINE]


def scaling(sizes: tuple[int, ...], repeats: int, compile: bool, say: Say) -> list[Row]:
    """How the cost grows with the model."""
    known = contestants.modes(False) | (contestants.modes(True) if compile else {})
    makers = baseline() | {name: known[name] for name in SCALING if name in known}
    rows = []
    for size in sizes:
        rows += contest("scaling", f"{size:.0e} parameters", models.of_size(size), makers, repeats, say)
    return rows


def overhead(repeats: int, say: Say) -> list[Row]:
    """What is left when there is nearly nothing to compute: the time Python needs per step."""
    makers = baseline() | {name: contestants.modes(False)[name] for name in ("eager Component", "eager Norm")}
    rows = []
    for number in (10, 100, 600):
        rows += contest("overhead", f"{number} tensors of 16", [(16,)] * number, makers, repeats, say)
    return rows


def optax_contest(model: str, repeats: int, say: Say) -> list[Row]:
    """The same in JAX, each against optax's own clipping of that kind."""
    shapes = models.MODELS[model]()
    say(f"{model}: optax")
    found = jax_side.measure(shapes, repeats, lambda: None)
    middle = {name: meters.quartiles(times) for name, (times, _) in found.items()}
    count = sum(torch.Size(shape).numel() for shape in shapes)
    rows = []
    for name, (_, moved) in found.items():
        rival = "optax.clip_by_global_norm" if "orm" in name else "optax.clip"
        row = _timed("optax", model, name, count, middle[name], middle[rival])
        row.bytes_moved = moved
        rows.append(row)
    return rows


def end_to_end(repeats: int, compile: bool, say: Say) -> list[Row]:
    """Whole training steps."""
    rows = []
    for model in training.LOOPS:
        names = [name for name in training.CLIPPING if compile or "compiled" not in name]
        steps = {name: training.loop(model, name) for name in names}
        say(f"{model}: whole steps")
        for step in steps.values():
            for _ in range(12):  # the first compiles, and so does the first that measures
                step()
        with warnings.catch_warnings():  # one batch over and over winds every carry up
            warnings.simplefilter("ignore", CarryClipWarning)
            samples = meters.by_turns(steps, repeats, lambda: None, lambda: None)
        middle = {name: meters.quartiles(times) for name, times in samples.items()}
        count = sum(p.numel() for p in training.LOOPS[model]()[0].parameters())
        rows += [_timed("end to end", model, name, count, middle[name], middle[BASELINE]) for name in names]
    return rows


def theory(repeats: int, whole: bool, say: Say) -> list[Row]:
    """The simulator against a loop over seeds and, if ``whole``, the paper's figures at their size."""
    scale = Scale()
    runs = scale.points * scale.seeds
    say("theory: simulator against a loop over seeds")
    samples = theory_side.contest(scale.points, scale.seeds, min(repeats, 11))
    middle = {name: meters.quartiles(times) for name, times in samples.items()}
    model = f"absolute value, {scale.points} margins, {scale.seeds:,} seeds"
    rows = [_timed("theory", model, name, runs, middle[name], middle[theory_side.LOOP]) for name in middle]
    if whole:
        times = theory_side.figures(scale, say)
        times["all four"] = sum(times.values())
        model = f"figures 1 to 4, {scale.steps:,} steps, {scale.seeds:,} seeds, {scale.points} points"
        rows += [Row("theory", model, name, runs, 1e3 * s, 1e3 * s, 1e3 * s) for name, s in times.items()]
    return rows


def as_json(rows: list[Row], command: str) -> dict[str, Any]:
    """Everything, to be read by machines and drawn again later."""
    return {"setting": setting(command), "rows": [asdict(row) for row in rows]}
