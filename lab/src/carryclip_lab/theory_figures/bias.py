"""Carry and average bias against time: bounded and vanishing like 1/t above the mean gradient, not below."""

import numpy as np

from carryclip.regions import Component
from carryclip.theory import bounds
from carryclip.theory.noise import Rare
from carryclip.theory.problems import Linear
from carryclip.theory.simulate import Simulation, log_times
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.theory_figures import claims
from carryclip_lab.theory_figures.drawing import LINES, REGIMES, finish, panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, rows_of, simulations, slope

TILT, NOISE = 0.5, Rare(4.0, p=0.1)
MARGINS = {"above": 0.5, "at": 0.0, "below": -0.1}
PLAIN = {"color": "0.5", "linestyle": ":", "linewidth": 2}


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """Three radii around the mean gradient, and plain clipping at the first."""
    given = {
        "problem": Linear(TILT),
        "noise": NOISE,
        "lr": 1.0,
        "steps": scale.steps,
        "seeds": scale.seeds,
        "seed": scale.seed,
        "times": log_times(scale.steps, 40),
    }
    radii = [TILT + margin for margin in MARGINS.values()]
    plain = {"region": Component(radii[0]), "carry": False}
    return simulations([{**given, "region": Component(radii)}, {**given, **plain}], tick)


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """The carry on the left, the average bias on the right."""
    figure, left, right = panels()
    carried, plain = seen
    start = min(100, scale.steps / 10)
    slopes, rows = {}, []
    for place, (name, margin) in enumerate(MARGINS.items()):
        size = carried.carry[:, place].mean(-1)
        bias = np.abs(carried.mean_carry[:, place, 0]) / carried.times
        slopes[name] = slope(carried.times, size, start), slope(carried.times, bias, start)
        label = f"radius {TILT + margin:.1f}, {name} the mean gradient"
        left.plot(carried.times, size, label=f"{label}: slope {slopes[name][0]:+.2f}", **REGIMES[name])
        right.plot(carried.times, bias, label=f"{label}: slope {slopes[name][1]:+.2f}", **REGIMES[name])
        told = {"t": carried.times, "mean_carry": size, "average_bias": bias}
        rows += rows_of({"radius": TILT + margin, "carry": "full", **told})
    lost = np.abs(TILT + plain.mean_position[:, 0] / plain.times)
    radius = TILT + MARGINS["above"]
    right.plot(plain.times, lost, label=f"plain clipping, radius {radius:.1f}", **PLAIN)
    told = {"t": plain.times, "mean_carry": 0.0, "average_bias": lost}
    rows += rows_of({"radius": radius, "carry": "none", **told})
    rate = bounds.lundberg_rate(alpha=MARGINS["above"], noise=NOISE)
    limit = float(bounds.lundberg_mean(rate=rate))
    left.axhline(limit, label=f"sharp bound for the first: {limit:.1f}", **LINES["sharp"])
    logarithmic = {"legend": {"fontsize": 7.5}, "xscale": "log", "yscale": "log", "xlabel": "step t"}
    finish(left, ylabel="E|carry|", title="The carry", **logarithmic)
    finish(right, ylabel="|average bias|", title="The average bias", **logarithmic)
    right.set_ylim(bottom=1e-5)
    size, bias = slopes["above"]
    ours = f"slope of E|carry| {size:+.2f}, of the average bias {bias:+.2f}, from t = {start:g} on"
    claim = Claim(
        "T3",
        "With the radius above the mean gradient the carry stays bounded, and the average bias vanishes like 1/t",
        "slopes 0 and -1",
        ours,
        claims.vanishes(*slopes["above"]),
    )
    caption = (
        f"Carry and average bias, (E g₁ + … + E g_t − E u₁ − … − E u_t)/t, against t. Mean gradient {TILT}, rare large "
        f"gradients (+{NOISE.bound + TILT:.1f} with probability {NOISE.p}), {scale.seeds} seeds. Above the mean "
        f"gradient: {ours}. At it the carry grows like √t, below it in proportion to t, and the bias stays. Plain "
        f"clipping loses {lost[-1]:.2f} of every gradient for good."
    )
    return Result(figure, caption, rows, [claim])


STUDY = Study("Carry and average bias against t", compute, present, in_paper=False)
