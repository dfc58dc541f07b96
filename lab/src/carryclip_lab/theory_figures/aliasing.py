"""Figure 1: clipped SGD solves another problem; U-Clip goes where SGD goes."""

import functools
from typing import Any

import numpy as np

from carryclip.regions import Component
from carryclip.theory.problems import Aliasing
from carryclip.theory.simulate import Simulation, run
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.theory_figures import claims
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, panels, side_by_side

STEPS, RATE, RADIUS = 1500, 0.01, 2.0
METHODS: dict[str, dict[str, Any]] = {
    "SGD": {"region": None},
    "clipped SGD": {"region": Component(RADIUS), "carry": False},
    "SGD + U-Clip": {"region": Component(RADIUS)},
}
LOOKS = {
    "SGD": {"color": "C0", "linestyle": "--", "zorder": 3},
    "clipped SGD": {"color": "C3", "linestyle": "-."},
    "SGD + U-Clip": {"color": "black", "linestyle": "-", "linewidth": 2.5},
}


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """The three methods, on the same draws."""
    given = {"lr": RATE, "steps": STEPS, "seeds": scale.seeds, "seed": scale.seed, "times": 300, "paths": True}
    parts = [functools.partial(_run, method, given) for method in METHODS.values()]
    return side_by_side(parts, tick)


def _run(method: dict[str, Any], given: dict[str, Any], tick: Tick) -> Simulation:
    return run(Aliasing(), **method, **given, progress=tick)


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """Objective on the left, trajectories on the right."""
    figure, axes = panels(2)
    left, right = axes[0]
    x = np.linspace(-2.2, 2.2, 441)
    left.plot(x, np.abs(4 * x - 1), color="0.6", linestyle="--", label="ℓ₁, probability 1/4")
    left.plot(x, np.abs(x + 1), color="0.6", linestyle=":", label="ℓ₂, probability 3/4")
    left.plot(x, Aliasing().value(x[:, None]), color="black", label="expected")
    left.plot(x, np.abs(4 * x - 1) / 8 + 0.75 * np.abs(x + 1), color="C3", linestyle="-.", label="what clipping sees")
    left.plot([0.25, -1.0], [15 / 16, 5 / 8], "ko", markersize=5)
    left.annotate("optimum 1/4", (0.25, 15 / 16), (-1.0, 1.75), arrowprops={"arrowstyle": "-"}, fontsize=8)
    left.annotate("its optimum −1", (-1.0, 5 / 8), (-2.1, 0.1), arrowprops={"arrowstyle": "-"}, fontsize=8)
    left.set(ylim=(0, 4), xlabel="x", ylabel="loss", title="The objective")
    left.legend(frameon=False, fontsize=8)
    ends, rows = {}, []
    for name, one in zip(METHODS, seen, strict=True):
        assert one.path is not None
        final = one.final[:, 0]
        ends[name] = (float(final.mean()), float(final.std(ddof=1) / np.sqrt(len(final))))
        mean, (low, high) = one.mean_position[:, 0], np.quantile(one.path[..., 0], [0.05, 0.95], axis=1)
        right.plot(one.times, one.path[:, 0, 0], color=LOOKS[name]["color"], linewidth=0.5, alpha=0.6)
        right.plot(one.times, mean, label=f"{name}: {ends[name][0]:.3f}", **LOOKS[name])
        right.fill_between(one.times, low, high, color=LOOKS[name]["color"], alpha=0.12, linewidth=0)
        rows += [
            {"method": name, "t": int(t), "mean": m, "p05": lo, "p95": hi}
            for t, m, lo, hi in zip(one.times, mean, low, high, strict=True)
        ]
    right.axhline(0.25, color="black", linewidth=0.6, linestyle=(0, (1, 4)))
    right.axhline(-1.0, color="C3", linewidth=0.6, linestyle=(0, (1, 4)))
    right.set(xlabel="step", ylabel="x", title=f"Trajectories: mean of {scale.seeds} seeds, one seed, 5–95 %")
    right.legend(frameon=False, fontsize=8, title="mean at the end", title_fontsize=8)
    words = ", ".join(f"{name} {mean:.3f} ± {error:.3f}" for name, (mean, error) in ends.items())
    claim = Claim(
        "T1",
        "SGD and U-Clip reach the optimum, clipped SGD goes to another point",
        "1/4 and -1",
        f"{words} (mean ± standard error, {scale.seeds} seeds); constant steps leave SGD itself short of 1/4",
        claims.reaches_optimum(0.25, ends["SGD"], ends["SGD + U-Clip"], ends["clipped SGD"], -1.0),
    )
    caption = (
        "Aliasing. Left: the algorithm receives a subgradient of ℓ₁ = |4x − 1| with probability 1/4 and of ℓ₂ = |x + "
        "1| with probability 3/4; clipped to 2 they are those of another objective, with its optimum at −1. Right: "
        f"from x = 2, learning rate {RATE}, {STEPS} steps. Mean final iterates over {scale.seeds} seeds: {words}. "
        "Constant steps leave plain SGD itself short of the optimum 1/4, and U-Clip ends where SGD does."
    )
    return Result(figure, caption, rows, [claim])


STUDY = Study("Aliasing: the objective and the trajectories (figure 1)", compute, present)
