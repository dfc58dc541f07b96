"""Runs the contests and collects one flat list of results."""

import gc
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carryclip import CarryClipWarning, __version__
from carryclip.doctor import version_of
from carryclip_lab.bench import contestants, jax_side, meters, models, theory_side, training
from carryclip_lab.bench.contestants import COMPONENT_RADIUS, Entry, Make
from carryclip_lab.bench.meters import Times
from carryclip_lab.bench.models import Shape
from carryclip_lab.engine.work import processor
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


@dataclass(frozen=True)
class Options:
    """What to run: on which models, how many rounds, with compiled steps or not, and whom to tell how far it is."""

    models: list[str]
    repeats: int
    compile: bool = False
    whole: bool = True
    """Whether to draw the theory's figures too."""
    say: Callable[[str], None] = lambda text: None


def as_json(rows: Iterable[Row], command: str) -> dict[str, Any]:
    """Everything, to be read by machines and drawn again later: the rows, where and with what they were made."""
    where = {
        "command": command,
        "carryclip": __version__,
        "torch": torch.__version__,
        "jax": version_of("jax"),
        "optax": version_of("optax"),
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    return {"setting": where, "rows": [asdict(row) for row in rows]}


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


def contest(part: str, model: str, shapes: list[Shape], makers: dict[str, Make], options: Options) -> list[Row]:
    """Time all of ``makers`` by turns on one model; then memory and kernels, one by one."""
    arena = Arena(shapes)
    entries: dict[str, Entry] = {}
    first: dict[str, float] = {}
    for name, make in makers.items():
        options.say(f"{model}: {name}, first step")
        entries[name] = arena.enter(make)
        arena.restore()
        start = time.perf_counter()
        entries[name].step()
        first[name] = time.perf_counter() - start
    arena.restore()
    loops = meters.loops_for(entries[BASELINE].step)
    options.say(f"{model}: timing {len(entries)} by turns")
    steps = {name: entry.step for name, entry in entries.items()}
    times = meters.by_turns(steps, options.repeats, arena.restore, loops)
    rows = []
    for name, entry in entries.items():
        options.say(f"{model}: {name}, memory and kernels")
        row = _timed(part, model, name, arena.count, times[name], times[BASELINE])
        arena.restore()
        row.peak_bytes = meters.peak(entry.step)
        arena.restore()
        row.kernels = meters.kernels(entry.step)
        floor = times.get("floor " + name.removeprefix("compiled "))
        row.floor = None if floor is None else times[name].median / floor.median
        row.first_seconds, row.held_per_parameter = first[name], entry.held() / arena.count
        rows.append(row)
    del entries, steps
    gc.collect()
    return rows


def _timed(part: str, model: str, name: str, count: int, mine: Times, rival: Times) -> Row:
    """A row with its times in milliseconds."""
    milliseconds = (1e3 * mine.median, 1e3 * mine.low, 1e3 * mine.high)
    return Row(part, model, name, count, *milliseconds, ratio=mine.median / rival.median)


def baseline() -> dict[str, Make]:
    """The contestant all others are compared with."""
    return {BASELINE: contestants.baselines()[BASELINE]}


def clipping(options: Options) -> Iterator[list[Row]]:
    """All clipping of each model, in contests small enough for the memory."""
    rivals = contestants.baselines() | contestants.optimizers()
    rounds = [rivals, baseline() | contestants.modes(False)]
    if options.compile:
        rounds.append(baseline() | contestants.modes(True) | contestants.floors())
    for model in options.models:
        for makers in rounds:
            rows = contest("clipping", model, models.MODELS[model](), makers, options)
            yield [row for row in rows if makers is rivals or row.name != BASELINE]  # which is listed once


def overhead(options: Options) -> Iterator[list[Row]]:
    """What is left when there is nearly nothing to compute: the time Python needs per step."""
    makers = baseline() | {name: contestants.modes(False)[name] for name in ("eager Component", "eager Norm")}
    for number in (10, 100, 600):
        yield contest("overhead", f"{number} tensors of 16", [(16,)] * number, makers, options)


def scaling(options: Options) -> Iterator[list[Row]]:
    """How the cost grows with the model."""
    known = contestants.modes(False) | (contestants.modes(True) if options.compile else {})
    makers = baseline() | {name: known[name] for name in SCALING if name in known}
    for size in SIZES:
        yield contest("scaling", f"{size:.0e} parameters", models.of_size(size), makers, options)


def end_to_end(options: Options) -> Iterator[list[Row]]:
    """Whole training steps."""
    names = [name for name in training.CLIPPING if options.compile or "compiled" not in name]
    for model, make in training.LOOPS.items():
        steps = {name: training.loop(model, name) for name in names}
        options.say(f"{model}: whole steps")
        for step in steps.values():
            for _ in range(12):  # the first compiles, and so does the first that measures
                step()
        with warnings.catch_warnings():  # one batch over and over winds every carry up
            warnings.simplefilter("ignore", CarryClipWarning)
            times = meters.by_turns(steps, 10 * options.repeats)
        count = sum(p.numel() for p in make()[0].parameters())
        yield [_timed("end to end", model, name, count, times[name], times[BASELINE]) for name in names]


def optax_contest(options: Options) -> Iterator[list[Row]]:
    """The largest model in JAX, each against optax's own clipping of that kind."""
    counts = {model: sum(map(math.prod, models.MODELS[model]())) for model in options.models}
    model = max(counts, key=lambda name: counts[name])
    options.say(f"{model}: optax")
    found = jax_side.measure(models.MODELS[model](), options.repeats)
    rows = []
    for name, (times, moved) in found.items():
        rival, _ = found["optax.clip_by_global_norm" if "orm" in name else "optax.clip"]
        rows.append(_timed("optax", model, name, counts[model], times, rival))
        rows[-1].bytes_moved = moved
    yield rows


def theory(options: Options) -> Iterator[list[Row]]:
    """The simulator against a loop over seeds and, if ``whole``, the paper's figures at their size."""
    scale = Scale()
    runs = scale.points * scale.seeds
    options.say("theory: simulator against a loop over seeds")
    times = theory_side.contest(scale.points, scale.seeds, min(options.repeats, 11))
    model = f"absolute value, {scale.points} margins, {scale.seeds:,} seeds"
    yield [_timed("theory", model, name, runs, times[name], times[theory_side.LOOP]) for name in times]
    if options.whole:
        seconds = theory_side.figures(scale, options.say)
        seconds["all four"] = sum(seconds.values())
        model = f"figures 1 to 4, {scale.steps:,} steps, {scale.seeds:,} seeds, {scale.points} points"
        yield [Row("theory", model, name, runs, 1e3 * s, 1e3 * s, 1e3 * s) for name, s in seconds.items()]


PARTS: dict[str, Callable[[Options], Iterator[list[Row]]]] = {
    "clipping": clipping,
    "overhead": overhead,
    "scaling": scaling,
    "end-to-end": end_to_end,
    "optax": optax_contest,
    "theory": theory,
}
"""Every part gives rows after each of its contests."""
