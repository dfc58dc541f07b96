"""Norm clipping, which the paper leaves open: bounded without the dimension; sqrt(t) at margin 0, linear below."""

from typing import Any

import numpy as np

from carryclip.theory import bounds
from carryclip.theory.noise import Sphere, TwoPoint
from carryclip.theory.problems import Linear
from carryclip.theory.simulate import Above, Simulation, log_times
from carryclip_lab.theory_figures.drawing import LINES, REGIMES, finish, panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, rows_of, simulations, slope

DIMENSIONS = {1: 1.0, 10: 1.0, 100: 0.2, 1000: 0.04}
"""Dimension, and the share of the seeds it gets: in many dimensions all runs look alike."""
GROWTH = {"margin +0.2": 0.2, "margin 0": 0.0, "margin −0.2": -0.2}
MARKS = {1: "o", 10: "s", 100: "^", 1000: "D"}
HOLLOW: dict[str, Any] = {"color": "black", "linestyle": "none", "markersize": 5, "fillstyle": "none"}


def _margins(scale: Scale) -> np.ndarray:
    return np.geomspace(0.1, 0.9, min(scale.points, 8))


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """Steady state by margin and dimension, and growth by time in dimension 100."""
    steps = min(scale.steps, 1500)
    parts = []
    for dimension, share in DIMENSIONS.items():
        size = {"dimension": dimension, "steps": steps, "times": 4, "seeds": max(int(share * scale.seeds), 4)}
        noise = TwoPoint(1.0) if dimension == 1 else Sphere(1.0)
        parts.append({**_setting(0.0, _margins(scale), noise, scale), **size})
    late = {"dimension": 100, "steps": scale.steps, "times": log_times(scale.steps, 30)}
    late |= {"seeds": max(scale.seeds // 20, 4)}
    parts.append({**_setting(0.1, list(GROWTH.values()), Sphere(1.0), scale), **late})
    return simulations(parts, tick)


def _setting(tilt: float, margins: Any, noise: Any, scale: Scale) -> dict[str, Any]:
    return {"problem": Linear(tilt), "region": Above(margins, over="norm"), "noise": noise, "seed": scale.seed}


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """Steady state on the left, growth on the right."""
    figure, left, right = panels()
    margins, rows = _margins(scale), []
    fine = np.geomspace(margins[0], margins[-1], 100)
    for (dimension, _), one in zip(DIMENSIONS.items(), seen, strict=False):
        mean = one.carry[-1].mean(-1)
        label = f"d = {dimension}, {one.carry.shape[-1]} seeds"
        left.plot(margins, mean, marker=MARKS[dimension], label=label, **HOLLOW)
        told = {"margin": margins, "t": one.times[-1], "mean_carry": mean}
        rows += rows_of({"panel": "margin", "dimension": dimension, **told})
    each = bounds.norm_carry_mean(alpha=fine, noise_bound=1.0)
    average = bounds.second_moment_average(alpha=fine, variance=1.0)
    left.plot(fine, each, label="bound on E‖carry‖ at each t", **LINES["corrected"])
    left.plot(fine, average, label="bound on its average over t", **LINES["sharp"])
    logarithmic: dict[str, Any] = {"xscale": "log", "yscale": "log", "ylabel": "E‖carry‖"}
    finish(left, xlabel="margin α (noise of length 1)", title="No dimension enters", **logarithmic)
    late = seen[-1]
    slopes = {}
    for place, ((name, margin), look) in enumerate(zip(GROWTH.items(), REGIMES.values(), strict=True)):
        mean = late.carry[:, place].mean(-1)
        slopes[name] = slope(late.times, mean, scale.steps / 30)
        right.plot(late.times, mean, label=f"{name}: slope {slopes[name]:+.2f}", **look)
        told = {"margin": margin, "t": late.times, "mean_carry": mean}
        rows += rows_of({"panel": "growth", "dimension": 100, **told})
    finish(right, xlabel="step t", title="d = 100: what the margin decides", **logarithmic)
    words = ", ".join(f"{name} {value:+.2f}" for name, value in slopes.items())
    caption = (
        "Norm clipping. Left: mean norm of the carry in dimensions 1 to 1000 with noise of length 1 (a fair coin for "
        "d = 1, even on the sphere otherwise), radius ‖ḡ‖ + α, below the bound that holds at each t and close to the "
        "one that holds on average over time; neither knows the dimension. Right: in dimension 100 the carry stays "
        f"bounded above the mean gradient, grows like √t at it and in proportion to t below; slopes on "
        f"logarithmic axes: {words}."
    )
    return Result(figure, caption, rows)


STUDY = Study("Norm clipping: the carry by dimension, margin and time", compute, present, in_paper=False)
