"""Figures 2 and 3: the carry's 99th percentile along a sweep, below the printed, the corrected and the sharp bound."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from carryclip.theory import bounds
from carryclip.theory.noise import Uniform
from carryclip.theory.problems import Absolute
from carryclip.theory.simulate import Above, Simulation
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.theory_figures import claims
from carryclip_lab.theory_figures.drawing import LINES, finish, mark_no_op, panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, rows_of, simulations

DELTA, RATE = 0.01, 0.1


@dataclass(frozen=True)
class Sweep:
    """One panel: what is varied, and the noise and margin that follow from it."""

    name: str
    low: float
    high: float
    fixed: str
    noise: Callable[[Scale, np.ndarray], np.ndarray]
    """Half width of the uniform noise."""
    margin: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """Radius less |gbar|, from the varied value and the noise."""
    adaptive: bool = False

    def values(self, scale: Scale) -> np.ndarray:
        """The points of the sweep."""
        low = 1.0 + self.low if self.name == "G" and scale.reading == "gradient" else self.low
        return np.linspace(low, self.high, scale.points)


def _g_noise(scale: Scale, values: np.ndarray) -> np.ndarray:
    return values if scale.reading == "noise" else values - 1.0


CARRY = (
    Sweep("α", 0.1, 1.0, "σ² = 0.1", lambda s, x: np.full_like(x, math.sqrt(0.1)), lambda x, noise: x),
    Sweep("G", 0.1, 15.0, "α = 0.1", _g_noise, lambda x, noise: np.full_like(x, 0.1)),
)
ADAPTIVE = (
    Sweep("β", 0.5, 3.0, "σ² = 0.1", lambda s, x: np.full_like(x, math.sqrt(0.1)), lambda x, noise: x * noise**2, True),
    Sweep("σ²", 0.1, 15.0, "β = 0.25", lambda s, x: np.sqrt(x), lambda x, noise: 0.25 * noise**2, True),
)


def compute(sweeps: tuple[Sweep, ...], scale: Scale, tick: Tick) -> list[Simulation]:
    """Both sweeps."""
    given = {"problem": Absolute(), "lr": RATE, "steps": scale.steps, "seeds": scale.seeds, "seed": scale.seed}
    settings = []
    for sweep in sweeps:
        values = sweep.values(scale)
        noise = sweep.noise(scale, values)
        settings.append({**given, "region": Above(sweep.margin(values, noise)), "noise": Uniform(noise)})
    return simulations(settings, tick)


def levels(sweep: Sweep, scale: Scale) -> dict[str, np.ndarray]:
    """The bounds at each point, for probability 1 - DELTA at every t."""
    values = sweep.values(scale)
    noise = sweep.noise(scale, values)
    margin, bound = sweep.margin(values, noise), scale.bound(noise)
    sharp = bounds.lundberg_quantile(DELTA, rate=bounds.lundberg_rate(alpha=margin, noise=Uniform(noise)))
    if not sweep.adaptive:
        given: dict[str, Any] = {"alpha": margin, "gradient_bound": bound}
        printed = bounds.corollary_quantile(DELTA, form="printed", **given)
        return {
            "printed": printed,
            "corrected": bounds.corollary_quantile(DELTA, largest_radius=1.0 + margin, **given),
            "sharp": sharp,
        }
    given = {"beta": margin / noise**2, "min_variance": noise**2, "gradient_bound": bound}
    return {
        "printed": bounds.adaptive_carry_quantile(DELTA, form="printed", **given),
        "corrected": bounds.adaptive_carry_quantile(DELTA, **given),
        "sharp": sharp,
    }


def present(sweeps: tuple[Sweep, ...], claim_id: str, scale: Scale, seen: list[Simulation]) -> Result:
    """One panel for each sweep."""
    figure, *axes = panels()
    rows, ratios, notes = [], [], []
    for axis, sweep, one in zip(axes, sweeps, seen, strict=True):
        values = sweep.values(scale)
        noise = sweep.noise(scale, values)
        margin = sweep.margin(values, noise)
        idle = margin >= noise * (1.0 - 1e-9)
        percentile, pooled = one.quantile(1 - DELTA), one.quantile(1 - DELTA, pooled=True)
        at = levels(sweep, scale)
        shown = np.where(percentile > 0, percentile, np.nan)
        axis.plot(values, shown, label=f"seen at t = {scale.steps}", **LINES["seen"])
        if scale.pooled:
            shown = np.where(pooled > 0, pooled, np.nan)
            axis.plot(values, shown, label=f"seen, pooled over {len(one.times)} times", **LINES["pooled"])
        for kind, level in at.items():
            axis.plot(values, np.where((kind == "sharp") & idle, np.nan, level), label=f"{kind} bound", **LINES[kind])
        if idle.any():
            start = values[idle].min() if idle[-1] else values[0]
            end = values[-1] if idle[-1] else values[idle].max()
            width = (values[1] - values[0]) / 2
            mark_no_op(axis, start - width, end + width, "no-op: carry 0" if idle.sum() > 2 else "")
        title = f"{sweep.name}, at {sweep.fixed}"
        finish(axis, yscale="log", xlabel=sweep.name, ylabel="|carry|, 99th percentile", title=title)
        clips = percentile > 0
        ratios.append((at["printed"][clips] / percentile[clips]).tolist())
        spread = f"{min(ratios[-1]):.3g} to {max(ratios[-1]):.3g}" if ratios[-1] else "none"
        notes.append(f"{sweep.name} {spread} ({int(idle.sum())} of {len(values)} points are no-ops)")
        told = {"varied": sweep.name, "value": values, "noise": noise, "margin": margin}
        rows += rows_of({**told, "seen": percentile, "pooled": pooled, **at, "no_op": idle})
    what = "γ = |ḡ| + βσ²" if sweeps[0].adaptive else "γ = |ḡ| + α"
    ours = f"printed bound / percentile along {'; along '.join(notes)}"
    claim = Claim(
        claim_id,
        f"The high-probability carry bound tracks the 99th percentile up to a constant, for {what}",
        "good agreement up to a constant scaling",
        ours,
        claims.tracks(*ratios),
    )
    caption = (
        f"Carry bounds at δ = {DELTA} for f(x) = |x| with noise uniform on [−l, l], σ² = l², {what}, from x = 100, "
        f"learning rate {RATE}. Left: {sweeps[0].name} varies at {sweeps[0].fixed}; right: {sweeps[1].name} at "
        f"{sweeps[1].fixed}. Here {scale.said}. Seen: 99th percentile of |carry| over {scale.seeds} seeds after "
        f"{scale.steps} steps. Sharp: log(2/δ)/θ with the exact θ of uniform noise. Shaded: the margin exceeds the "
        f"noise, nothing is ever clipped. {ours[0].upper()}{ours[1:]}."
    )
    return Result(figure, caption, rows, [claim])


CARRY_STUDY = Study(
    "Carry bounds against alpha and G (figure 2)",
    functools.partial(compute, CARRY),
    functools.partial(present, CARRY, "T4"),
)
ADAPTIVE_STUDY = Study(
    "Adaptive carry bounds against beta and sigma² (figure 3)",
    functools.partial(compute, ADAPTIVE),
    functools.partial(present, ADAPTIVE, "T5"),
)
