"""Wind-up: bias, overshoot and largest carry of every policy, over noise laws and starting points."""

import itertools
from typing import Any

import numpy as np

from carryclip.carry import Capped, CarryPolicy, Gated, Leaky
from carryclip.regions import Component
from carryclip.theory.noise import Gaussian, Noise, Pareto, Skewed, StudentT
from carryclip.theory.problems import Quadratic
from carryclip.theory.simulate import Simulation
from carryclip_lab.theory_figures.drawing import finish, mark_optimum, panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, simulations

RADIUS, RATE = 1.0, 0.1
POLICIES: dict[str, CarryPolicy] = {
    "none": False,
    "full": True,
    "Capped(10)": Capped(10),
    "Leaky(0.9)": Leaky(0.9),
    "Gated()": Gated(),
}
LAWS: dict[str, Noise] = {
    "Gaussian(1)": Gaussian(1.0),
    "Student t(3)": StudentT(1.0, degrees=3.0),
    "lognormal(1.5)": Skewed(1.0, shape=1.5),
    "Pareto(2.5)": Pareto(1.0, tail=2.5),
}
STARTS = (0.0, 10.0, 100.0)
LOOKS: dict[str, dict[str, Any]] = {
    "none": {"color": "0.5", "linestyle": "-", "hatch": ""},
    "full": {"color": "C3", "linestyle": "--", "hatch": "//"},
    "Capped(10)": {"color": "C0", "linestyle": "-.", "hatch": ".."},
    "Leaky(0.9)": {"color": "C1", "linestyle": ":", "hatch": "xx"},
    "Gated()": {"color": "black", "linestyle": "-", "hatch": ""},
}


def _steps(scale: Scale) -> int:
    return min(scale.steps, 6000)


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """Every policy under every law, from all starts at once."""
    given = {
        "problem": Quadratic(),
        "region": Component(RADIUS),
        "lr": RATE,
        "steps": _steps(scale),
        "seeds": max(scale.seeds // 5, 4),
        "seed": scale.seed,
        "start": np.array(STARTS)[:, None, None],
        "times": range(10, _steps(scale) + 1, 10),
    }
    pairs = itertools.product(LAWS.values(), POLICIES.values())
    return simulations([{**given, "noise": law, "carry": policy} for law, policy in pairs], tick)


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """Return from far away, and bias by noise law; the table has all starts."""
    figure, left, right = panels()
    rows, bars = [], {}
    for (law, policy), one in zip(itertools.product(LAWS, POLICIES), seen, strict=True):
        half = len(one.times) // 2
        for k, start in enumerate(STARTS):
            mean = one.mean_position[:, k, 0]
            bias = abs(float(mean[half:].mean()))
            rows.append(
                {
                    "noise": law,
                    "policy": policy,
                    "start": start,
                    "bias": round(bias, 3),
                    "overshoot": round(max(0.0, -float(one.mean_range[0, k, 0])), 2) if start else "",
                    "largest_carry": round(float(np.median(one.peak_carry[k])) / RADIUS, 1),
                }
            )
            if start == 0.0:
                bars[law, policy] = bias
            if start == 100.0 and law == "Gaussian(1)":
                looks = {key: value for key, value in LOOKS[policy].items() if key != "hatch"}
                left.plot(one.times, mean, label=policy, linewidth=1.6, **looks)
    mark_optimum(left)
    title, legend = "From x = 100, Gaussian(1) noise", {"loc": "lower left"}
    finish(left, legend=legend, xlim=(0, 4000), xlabel="step", ylabel="mean of x", title=title)
    zoom = left.inset_axes([0.42, 0.66, 0.56, 0.32], xlim=(950, 1250), ylim=(-4.5, 4.5))
    for line in left.get_lines():
        zoom.plot(*line.get_data(), color=line.get_color(), linestyle=line.get_linestyle(), linewidth=1.4)
    zoom.tick_params(labelsize=6)
    left.indicate_inset_zoom(zoom, edgecolor="black")
    width = 0.8 / len(POLICIES)
    for n, policy in enumerate(POLICIES):
        heights = [max(bars[law, policy], 3e-3) for law in LAWS]
        look = LOOKS[policy]
        fill = "white" if look["hatch"] else look["color"]
        places = np.arange(len(LAWS)) + (n - 2) * width
        right.bar(places, heights, width, label=policy, color=fill, edgecolor=look["color"], hatch=look["hatch"])
    right.set_xticks(range(len(LAWS)), list(LAWS), fontsize=8)
    finish(right, yscale="log", ylabel="|mean of x − optimum|", title="Bias, from x = 0")
    caption = (
        f"Wind-up and bias on x²/2, radius {RADIUS:g}, learning rate {RATE}, {seen[0].carry.shape[-1]} seeds, "
        f"{_steps(scale)} steps. Left: far from the optimum the radius is below the mean gradient; the full carry pays "
        "its debt by overshooting as far to the other side, again and again. Right: distance of the mean iterate from "
        "the optimum over the second half, from x = 0; bars at the bottom are below 0.003. Full carry has no bias and "
        "Gated little; plain clipping, Capped and Leaky are biased wherever the noise is skewed."
    )
    return Result(figure, caption, rows)


STUDY = Study("Wind-up: bias, overshoot and largest carry of every policy", compute, present, in_paper=False)
