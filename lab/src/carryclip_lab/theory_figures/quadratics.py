"""Two quadratics (Chen et al.): clipping leaves no pull inside [-2, 2], the carry brings it back."""

import numpy as np

from carryclip.theory.problems import TwoQuadratics
from carryclip.theory.simulate import Simulation, log_times
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.theory_figures import claims
from carryclip_lab.theory_figures.aliasing import LOOKS, methods
from carryclip_lab.theory_figures.drawing import finish, mark_optimum, panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, rows_of, simulations

RADIUS, START, RATE = 1.0, 1.5, 0.01
DRIFT_STEPS, DRIFT_RATE = 400, 0.0005
METHODS = methods(RADIUS)


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """Long runs from one start; short ones with tiny steps from many, for the drift."""
    times = log_times(scale.steps, 80)
    given = {"problem": TwoQuadratics(), "seeds": scale.seeds, "seed": scale.seed}
    starts = np.linspace(-2.0, 2.0, 2 * scale.points + 1)[:, None, None]
    parts = []
    for method in METHODS.values():
        long = {**given, "start": START, "lr": RATE, "steps": scale.steps, "times": times}
        short = {**given, "start": starts, "lr": DRIFT_RATE, "steps": DRIFT_STEPS, "times": 1}
        parts += [{**method, **setting} for setting in (long, short)]
    return simulations(parts, tick)


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """Mean and spread on the left, drift on the right."""
    figure, left, right = panels()
    starts = np.linspace(-2.0, 2.0, 2 * scale.points + 1)
    inside = (np.abs(starts) >= 0.2) & (np.abs(starts) <= 1.0)
    pulls, rows = {}, []
    for name, long, short in zip(METHODS, seen[::2], seen[1::2], strict=True):
        mean, spread = long.mean_position[:, 0], long.spread[:, 0]
        left.plot(long.times, mean, label=name, **LOOKS[name])
        left.fill_between(long.times, mean - spread, mean + spread, color=LOOKS[name]["color"], alpha=0.15, linewidth=0)
        drift = (short.mean_position[-1, :, 0] - starts) / (DRIFT_RATE * DRIFT_STEPS)
        right.plot(starts, drift, label=name, **LOOKS[name])
        pulls[name] = float(-np.sum(drift[inside] * starts[inside]) / np.sum(starts[inside] ** 2))
        rows += rows_of({"panel": "path", "method": name, "at": long.times, "value": mean, "spread": spread})
        rows += rows_of({"panel": "drift", "method": name, "at": starts, "value": drift, "spread": ""})
    mark_optimum(left)
    title, legend = f"From x = {START}, {scale.seeds} seeds", {"loc": "lower left"}
    finish(left, legend=legend, xscale="log", xlabel="step", ylabel="x: mean ± deviation", title=title)
    mark_optimum(right)
    finish(right, xlabel="x", ylabel="mean change of x / learning rate", title="The pull inside [−2, 2]")
    shares = {name: pull / pulls["SGD"] for name, pull in pulls.items()}
    ends = {name: (one.mean_position[-1, 0], one.spread[-1, 0]) for name, one in zip(METHODS, seen[::2], strict=True)}
    words = "; ".join(f"{name} {mean:.2f} ± {spread:.2f}" for name, (mean, spread) in ends.items())
    ours = (
        f"pull for 0.2 ≤ |x| ≤ 1 against SGD's: clipped {shares['clipped SGD']:.2f}, U-Clip "
        f"{shares['SGD + U-Clip']:.2f}; after {scale.steps} steps from {START}: {words} (mean ± deviation)"
    )
    claim = Claim(
        "T2",
        "Inside [-2, 2] clipped SGD has no pull to the optimum; U-Clip has",
        "every point is stationary for clipped SGD",
        ours,
        claims.pulls_inside(shares["clipped SGD"], shares["SGD + U-Clip"]),
    )
    caption = (
        "Two quadratics, (x − 3)²/2 or (x + 3)²/2 with equal chance, clipped to 1. Left: mean and standard deviation "
        f"over {scale.seeds} seeds from x = {START}, learning rate {RATE}. Clipped SGD wanders until it meets the ends "
        "of the interval; U-Clip returns to the optimum 0 as SGD does, with smaller steps. Right: mean change of x per "
        f"step and learning rate ({DRIFT_STEPS} steps of {DRIFT_RATE}): none for clipped SGD, SGD's own for U-Clip up "
        f"to the radius. {ours[0].upper()}{ours[1:]}."
    )
    return Result(figure, caption, rows, [claim])


STUDY = Study("Two quadratics: drift and spread inside [-2, 2]", compute, present, in_paper=False)
