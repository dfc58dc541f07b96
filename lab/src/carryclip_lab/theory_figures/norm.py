"""Norm clipping, which the paper leaves open: bounded without the dimension; sqrt(t) at margin 0, linear below."""

import functools
from typing import Any

import numpy as np

from carryclip.theory import bounds
from carryclip.theory.noise import Sphere, TwoPoint
from carryclip.theory.problems import Linear
from carryclip.theory.simulate import Above, Simulation, log_times, run
from carryclip_lab.theory_figures.study import LINES, Result, Scale, Study, Tick, panels, side_by_side

DIMENSIONS = {1: 1.0, 10: 1.0, 100: 0.2, 1000: 0.04}
"""Dimension, and the share of the seeds it gets: in many dimensions all runs look alike."""
GROWTH = {"margin +0.2": 0.2, "margin 0": 0.0, "margin −0.2": -0.2}
MARKS = {1: "o", 10: "s", 100: "^", 1000: "D"}


def _margins(scale: Scale) -> np.ndarray:
    return np.geomspace(0.1, 0.9, min(scale.points, 8))


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """Steady state by margin and dimension, and growth by time in dimension 100."""
    steps = min(scale.steps, 1500)
    parts = []
    for dimension, share in DIMENSIONS.items():
        setting = {"dimension": dimension, "steps": steps, "times": 4, "seeds": max(int(share * scale.seeds), 4)}
        noise = TwoPoint(1.0) if dimension == 1 else Sphere(1.0)
        parts.append(functools.partial(_run, 0.0, _margins(scale), noise, scale, setting))
    late = {
        "dimension": 100,
        "steps": scale.steps,
        "times": log_times(scale.steps, 30),
        "seeds": max(scale.seeds // 20, 4),
    }
    parts.append(functools.partial(_run, 0.1, list(GROWTH.values()), Sphere(1.0), scale, late))
    return side_by_side(parts, tick)


def _run(tilt: float, margins: Any, noise: Any, scale: Scale, setting: dict, tick: Tick) -> Simulation:
    return run(Linear(tilt), Above(margins, over="norm"), noise=noise, seed=scale.seed, **setting, progress=tick)


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """Steady state on the left, growth on the right."""
    figure, axes = panels(2)
    left, right = axes[0]
    margins, rows = _margins(scale), []
    fine = np.geomspace(margins[0], margins[-1], 100)
    for (dimension, _), one in zip(DIMENSIONS.items(), seen, strict=False):
        mean = one.carry[-1].mean(-1)
        left.plot(
            margins,
            mean,
            color="black",
            linestyle="none",
            marker=MARKS[dimension],
            markersize=5,
            fillstyle="none",
            label=f"d = {dimension}, {one.carry.shape[-1]} seeds",
        )
        rows += [
            {"panel": "margin", "dimension": dimension, "margin": float(a), "t": int(one.times[-1]), "mean_carry": m}
            for a, m in zip(margins, mean, strict=True)
        ]
    left.plot(
        fine,
        bounds.norm_carry_mean(alpha=fine, noise_bound=1.0),
        label="bound on E‖carry‖ at each t",
        **LINES["corrected"],
    )
    left.plot(
        fine,
        bounds.second_moment_average(alpha=fine, variance=1.0),
        label="bound on its average over t",
        **LINES["sharp"],
    )
    left.set(
        xscale="log",
        yscale="log",
        xlabel="margin α (noise of length 1)",
        ylabel="E‖carry‖",
        title="No dimension enters",
    )
    left.legend(frameon=False, fontsize=8)
    late = seen[-1]
    slopes = {}
    for place, (name, margin) in enumerate(GROWTH.items()):
        mean = late.carry[:, place].mean(-1)
        good = (late.times >= scale.steps / 30) & (mean > 0)
        slopes[name] = float(np.polyfit(np.log(late.times[good]), np.log(mean[good]), 1)[0])
        look = [("black", "-", "o"), ("C0", "-.", "s"), ("C3", "--", "^")][place]
        right.plot(
            late.times,
            mean,
            color=look[0],
            linestyle=look[1],
            marker=look[2],
            markersize=3,
            label=f"{name}: slope {slopes[name]:+.2f}",
        )
        rows += [
            {"panel": "growth", "dimension": 100, "margin": margin, "t": int(t), "mean_carry": m}
            for t, m in zip(late.times, mean, strict=True)
        ]
    right.set(xscale="log", yscale="log", xlabel="step t", ylabel="E‖carry‖", title="d = 100: what the margin decides")
    right.legend(frameon=False, fontsize=8)
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
