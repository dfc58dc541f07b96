"""Many seeds at once, through the shipped algorithm: what bounds are checked against and figures drawn from.

Runs lie side by side in one array of shape (sweep..., seeds, dimension), and ``carryclip.algorithm`` takes them
through a step together. Any number among the arguments (a radius, a margin, a noise scale, a learning rate) may be an
array: a sweep, whose points all see the same noise.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np

from carryclip import __version__
from carryclip._numpy import LanesNamespace
from carryclip.algorithm import Buffers, Rule, apply, decide, decide_coordinates, measure
from carryclip.carry import CarryPolicy
from carryclip.policy import Memory
from carryclip.regions import Component, Norm, Region, check_region
from carryclip.theory._progress import Progress, Ticker
from carryclip.theory.noise import Noise
from carryclip.theory.problems import Problem


@dataclass(frozen=True)
class Above:
    """A radius that stays a margin above the true mean gradient, as the theory has it; only a simulation knows that.

    Args:
        margin: what is added to |gbar_t|, coordinate by coordinate, or to ||gbar_t||. Below 0 the signal is clipped.
        over: ``"component"`` or ``"norm"``.

    >>> Above(0.1)
    Above(margin=0.1, over='component')
    """

    margin: Any
    over: Literal["component", "norm"] = "component"

    def __post_init__(self) -> None:
        if self.over not in ("component", "norm"):
            raise ValueError(f"Above: over must be 'component' or 'norm', got {self.over!r}.")
        if not np.all(np.isfinite(np.asarray(self.margin, float))):
            raise ValueError(f"Above: margin must be finite, got {self.margin!r}.")

    @property
    def region(self) -> Region:
        """The region whose radius is set anew at every step."""
        return Component(math.inf) if self.over == "component" else Norm(math.inf)

    def radius(self, slope: np.ndarray, margin: np.ndarray) -> np.ndarray:
        """The radius where the mean gradient is ``slope``."""
        size = np.abs(slope) if self.over == "component" else np.sqrt(LanesNamespace.inner(slope, slope))
        return np.maximum(size + margin, 0.0)


@dataclass(frozen=True)
class Simulation:
    """What was seen. An entry of ``times`` is a number n of steps done, so its carry is the paper's Delta_{n+1}.

    Arrays have axes (time, sweep..., seeds) unless they say otherwise. They hold NaN or infinity where a run diverged.
    """

    setting: dict[str, Any]
    """How it was made, in words and numbers; ``seeds``, ``steps``, ``lr``, ``seed``, ``version``."""
    times: np.ndarray
    carry: np.ndarray
    """Norm of the carry."""
    average_carry: np.ndarray
    """Mean over the steps so far of the norm of the carry each step began with."""
    regret: np.ndarray
    """Mean over the steps so far of f(x_t) - f*."""
    mean_carry: np.ndarray
    """Mean over seeds of the carry itself; axes (time, sweep..., dimension)."""
    mean_position: np.ndarray
    """Mean over seeds of x; axes (time, sweep..., dimension)."""
    spread: np.ndarray
    """Standard deviation over seeds of x; axes (time, sweep..., dimension)."""
    peak_carry: np.ndarray
    """Largest norm of the carry at any step; axes (sweep..., seeds)."""
    mean_range: np.ndarray
    """Smallest and largest mean over seeds of x after any step; axes (2, sweep..., dimension)."""
    final: np.ndarray
    """Last x; axes (sweep..., seeds, dimension)."""
    path: np.ndarray | None = None
    """x at ``times``, if it was asked for; axes (time, sweep..., seeds, dimension)."""

    def quantile(self, level: float, *, pooled: bool = False) -> np.ndarray:
        """A quantile of the carry over seeds at the last step; pooled: over seeds and all recorded times."""
        return np.quantile(self.carry, level, axis=(0, -1)) if pooled else np.quantile(self.carry[-1], level, axis=-1)

    def save(self, path: str | Path) -> Path:
        """Write to one ``.npz`` file; ``load`` reads it back without unpickling anything."""
        path = Path(path)
        if path.suffix != ".npz":
            raise ValueError(f"A simulation is saved as .npz; got {path}.")
        arrays = {name: array for name in _ARRAYS if (array := getattr(self, name)) is not None}
        np.savez_compressed(path, setting=np.array(json.dumps(self.setting)), **arrays)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Simulation":
        """Read what ``save`` wrote."""
        try:
            stored = np.load(path, allow_pickle=False)
        except ValueError:
            raise ValueError(f"{path} is no saved simulation.") from None
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} is no saved simulation: it holds one array.")
        with stored:
            missing = {"setting", *_ARRAYS} - {"path"} - set(stored.files)
            if missing:
                raise ValueError(f"{path} is no saved simulation: it lacks {', '.join(sorted(missing))}.")
            arrays = {name: stored[name] for name in _ARRAYS if name in stored.files}
            return cls(setting=json.loads(str(stored["setting"])), **arrays)


_ARRAYS = [field.name for field in fields(Simulation) if field.name != "setting"]


def run(
    problem: Problem,
    region: Region | Above | None,
    *,
    noise: Noise | None = None,
    carry: CarryPolicy = True,
    lr: Any = 0.1,
    steps: int = 10_000,
    seeds: int = 1000,
    dimension: int = 1,
    start: Any = None,
    times: int | Sequence[int] = 100,
    seed: int = 0,
    paths: bool = False,
    progress: Progress = False,
) -> Simulation:
    """Simulate SGD with U-Clip, many seeds at once.

    Args:
        problem: the objective, from ``carryclip.theory.problems``.
        region: where to clip; ``Above(margin)`` for a radius that follows the true mean gradient; None for plain SGD.
        noise: added to every coordinate, from ``carryclip.theory.noise``.
        carry: True (the paper), False (plain clipping) or a policy.
        lr: learning rate.
        steps: number of steps.
        seeds: number of runs at each point of the sweep.
        dimension: of x.
        start: where runs begin; the problem's own start by default.
        times: when to record: a number of evenly spaced times, or the numbers of steps themselves.
        seed: of everything drawn; the same seed gives the same bits.
        paths: also keep every x at ``times``.
        progress: True for a bar, or a function (done, total).

    >>> from carryclip.theory.noise import Uniform
    >>> from carryclip.theory.problems import Absolute
    >>> seen = run(Absolute(), Above([0.1, 0.4]), noise=Uniform(0.5), steps=2000, seeds=100)
    >>> seen.carry.shape, [bool(x) for x in seen.quantile(0.99) < [4.0, 0.5]]
    ((100, 2, 100), [True, True])
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"run: problem must be one of carryclip.theory.problems, e.g. Absolute(); got {problem!r}.")
    if noise is not None and not isinstance(noise, Noise):
        raise TypeError(f"run: noise must be a law of carryclip.theory.noise, e.g. Uniform(1.0); got {noise!r}.")
    steps, seeds, dimension = (
        _whole(name, value) for name, value in (("steps", steps), ("seeds", seeds), ("dimension", dimension))
    )
    seed = _whole("seed", seed, least=0)
    moments = _recorded(times, steps)
    where = problem.start if start is None else start
    lanes = _Lanes(region, carry)
    scale = None if noise is None else _swept(noise.scale)
    rates, begin = _swept(lr), np.asarray(where, float)
    parts = {"problem": problem.sweep, "region": lanes.sweep, "lr": rates.shape[:-2], "start": begin.shape[:-2]}
    sweep = _sweep(parts | ({} if scale is None else {"noise": scale.shape[:-2]}))
    shape = (*sweep, seeds, dimension)
    try:
        x = np.broadcast_to(begin, shape).astype(float)
    except ValueError:
        raise ValueError(f"run: start has shape {begin.shape}, which does not go with {shape}.") from None
    lanes.begin(shape)
    tick = Ticker(progress, steps, "simulating")
    rng = np.random.default_rng(seed)
    records = _Records(moments, shape, problem, paths)
    with np.errstate(over="ignore", invalid="ignore"), tick:
        for n in range(steps):
            slope = problem.slope(x)
            gradient = problem.gradient(x, slope, rng)
            if noise is not None:
                gradient = gradient + scale * noise.draw(rng, shape[-2:])
            records.before(x, lanes)
            x = x - rates * lanes.step(np.broadcast_to(gradient, shape), slope, n)
            records.after(n + 1, x, lanes)
            tick(n + 1)
    setting = {
        "problem": _words(problem),
        "region": _words(region),
        "noise": _words(noise),
        "carry": _words(carry),
        "lr": _words(lr),
        "steps": steps,
        "seeds": seeds,
        "dimension": dimension,
        "start": _words(where),
        "seed": seed,
        "version": __version__,
    }
    return records.finish(setting, x)


class _Lanes:
    """The shipped algorithm's state for all runs."""

    def __init__(self, region: Region | Above | None, carry: CarryPolicy):
        self.above = region if isinstance(region, Above) else None
        self.margin = None if self.above is None else _swept(self.above.margin)
        self.rule, self.sweep = None, () if self.margin is None else self.margin.shape[:-2]
        self.norms = np.zeros(())
        self.buffers, self.memory = Buffers(), None
        if region is None:
            return
        self.region = self.above.region if self.above else check_region(region)
        if isinstance(self.region, Norm) and self.region.over != "all":
            raise ValueError("There are no groups or tensors here: use Norm(radius).")
        if self.region.rule is not None:
            raise TypeError(
                f"run: {self.region.rule!r} learns from single runs, and here many lie side by side. Give a number or "
                "a schedule, or take carryclip.reference.UClip through one run."
            )
        # Diverged runs stay infinite or NaN, and so can be seen.
        self.rule = Rule(self.region, carry, nonfinite="propagate")
        if self.above is None:
            sizes = self.region.sizes(0)
            if any(isinstance(size, Mapping) for size in sizes):
                raise TypeError(
                    "run: there is one parameter here; an array of radii is a sweep, a mapping has no meaning."
                )
            arrays = [_swept(size) for size in sizes if not isinstance(size, float)]
            self.sweep = _sweep({f"size {k}": array.shape[:-2] for k, array in enumerate(arrays)})

    def begin(self, shape: tuple[int, ...]) -> None:
        """Buffers for runs of this shape."""
        self.norms = np.zeros(shape[:-1])
        if self.rule is None:
            return
        zeros = {name: np.zeros(shape) for name in self.rule.buffers if name != "count"}
        count = {"count": np.zeros((), np.int64)} if "count" in self.rule.buffers else {}
        self.buffers = Buffers(**zeros, **count)
        if self.rule.remembers:
            noise = np.zeros((*shape[:-1], 1)) if self.rule.policy.noisy else None
            self.memory = Memory(np.zeros((*shape[:-1], 1)), np.zeros((), np.int64), noise)

    def step(self, gradient: np.ndarray, slope: np.ndarray, n: int) -> np.ndarray:
        """The updates of all runs."""
        if self.rule is None:
            return gradient
        xp: Any = LanesNamespace
        if self.above is not None:
            sizes: tuple[Any, ...] = (self.above.radius(slope, self.margin),)  # pyright: ignore[reportArgumentType]
        else:
            sizes = tuple(s if isinstance(s, float) else _swept(s) for s in self.region.sizes(n))
        scaling = None
        if self.rule.has_scope:
            sums = measure(xp, self.rule, gradient, self.buffers, gradient.dtype, sizes=sizes)
            if self.rule.region.joint:
                scaling, self.memory = decide(xp, self.rule.policy, sums, sizes[0], self.memory)
            else:
                scaling, self.memory = decide_coordinates(xp, self.rule.policy, sums, self.memory)
        outcome = apply(xp, self.rule, gradient, self.buffers, sizes, scaling, None, gradient.dtype)
        self.buffers = outcome.buffers
        if self.buffers.carry is not None:
            self.norms = _norms(self.buffers.carry)
        return outcome.update


class _Records:
    """Running sums, and copies at the times to record."""

    def __init__(self, times: np.ndarray, shape: tuple[int, ...], problem: Problem, paths: bool):
        self.times, self.problem, self.paths = times, problem, paths
        self.wanted = frozenset(times.tolist())
        self.shape = shape
        self.sums = np.zeros((2, *shape[:-1]))
        self.peak = np.zeros(shape[:-1])
        outside = np.full((*shape[:-2], shape[-1]), np.inf)
        self.range = np.stack([outside, -outside])
        self.rows: list[dict[str, np.ndarray]] = []

    def before(self, x: np.ndarray, lanes: _Lanes) -> None:
        self.sums[0] += lanes.norms
        self.sums[1] += self.problem.value(x)

    def after(self, n: int, x: np.ndarray, lanes: _Lanes) -> None:
        np.maximum(self.peak, lanes.norms, out=self.peak)
        mean = x.mean(-2)
        np.minimum(self.range[0], mean, out=self.range[0])
        np.maximum(self.range[1], mean, out=self.range[1])
        if n not in self.wanted:
            return
        carry = np.zeros(self.shape) if lanes.buffers.carry is None else lanes.buffers.carry
        row = {
            "carry": lanes.norms,
            "average_carry": self.sums[0] / n,
            "regret": self.sums[1] / n - self.problem.best,
            "mean_carry": carry.mean(-2),
            "mean_position": mean,
            "spread": x.std(-2),
        }
        self.rows.append(row | ({"path": x} if self.paths else {}))

    def finish(self, setting: dict[str, Any], x: np.ndarray) -> Simulation:
        columns = {name: np.stack([row[name] for row in self.rows]) for name in self.rows[0]}
        return Simulation(setting, self.times, peak_carry=self.peak, mean_range=self.range, final=x, **columns)


def _sweep(parts: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the sweep."""
    try:
        return np.broadcast_shapes(*parts.values())
    except ValueError:
        shown = ", ".join(f"{name} {shape}" for name, shape in parts.items() if shape)
        raise ValueError(f"run: these do not make one sweep, their shapes differ: {shown}.") from None


def even_times(steps: int, count: int) -> np.ndarray:
    """Evenly spaced numbers of steps that end at ``steps``.

    >>> even_times(1000, 4).tolist()
    [250, 500, 750, 1000]
    """
    return np.unique(np.ceil(np.arange(1, count + 1) * steps / count).astype(int))


def log_times(steps: int, count: int) -> np.ndarray:
    """Numbers of steps from 1 to ``steps``, evenly spaced on a logarithmic axis.

    >>> log_times(1000, 4).tolist()
    [1, 10, 100, 1000]
    """
    return np.unique(np.rint(np.geomspace(1, steps, count)).astype(int))


def _whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number, from NumPy too."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"run: {name} must be a whole number, got {value!r}.")
    if value < least:
        raise ValueError(f"run: {name} must be at least {least}, got {value}.")
    return int(value)


def _recorded(times: int | Sequence[int], steps: int) -> np.ndarray:
    if np.ndim(times) == 0:
        return even_times(steps, min(_whole("times", times), steps))
    moments = np.unique(np.asarray(times))
    if not moments.size or moments.dtype.kind not in "iu" or moments[0] < 1 or moments[-1] > steps:
        raise ValueError(f"run: times must be whole numbers from 1 to steps = {steps}, got {times!r}.")
    return moments


def _swept(value: Any) -> np.ndarray:
    """A number, or one for each point of a sweep, ready to broadcast against (sweep..., seeds, dimension)."""
    return np.asarray(value, float)[..., None, None]


def _norms(vectors: np.ndarray) -> np.ndarray:
    if vectors.shape[-1] == 1:
        return np.abs(vectors[..., 0])
    return np.sqrt(np.einsum("...i,...i->...", vectors, vectors))


def _words(value: Any) -> Any:
    """A setting as JSON can hold it."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: _words(getattr(value, field.name)) for field in fields(value)}
        return {"kind": type(value).__name__, **inside}
    if isinstance(value, (list, tuple, range)):
        return [_words(entry) for entry in value]
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    return getattr(value, "__qualname__", None) or type(value).__name__
