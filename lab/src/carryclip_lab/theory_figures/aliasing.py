"""Figure 1: clipped SGD solves another problem; U-Clip goes where SGD goes."""

from typing import Any

import numpy as np

from carryclip.regions import Component
from carryclip.theory.problems import Aliasing
from carryclip.theory.simulate import Simulation
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.theory_figures import claims
from carryclip_lab.theory_figures.drawing import finish, mark_optimum, panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, rows_of, simulations

STEPS, RATE, RADIUS = 1500, 0.01, 2.0
LOOKS = {
    "SGD": {"color": "C0", "linestyle": "--", "zorder": 3},
    "clipped SGD": {"color": "C3", "linestyle": "-."},
    "SGD + U-Clip": {"color": "black", "linestyle": "-", "linewidth": 2.5},
}


def methods(radius: float) -> dict[str, dict[str, Any]]:
    """What is compared, as arguments of a simulation."""
    return {
        "SGD": {"region": None},
        "clipped SGD": {"region": Component(radius), "carry": False},
        "SGD + U-Clip": {"region": Component(radius)},
    }


METHODS = methods(RADIUS)


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """The three methods, on the same draws."""
    given = {"problem": Aliasing(), "lr": RATE, "steps": STEPS, "seeds": scale.seeds, "seed": scale.seed}
    given |= {"times": 300, "paths": True}
    return simulations([{**given, **method} for method in METHODS.values()], tick)


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """Objective on the left, trajectories on the right."""
    figure, left, right = panels()
    x = np.linspace(-2.2, 2.2, 441)
    left.plot(x, np.abs(4 * x - 1), color="0.6", linestyle="--", label="ℓ₁, probability 1/4")
    left.plot(x, np.abs(x + 1), color="0.6", linestyle=":", label="ℓ₂, probability 3/4")
    left.plot(x, Aliasing().value(x[:, None]), color="black", label="expected")
    left.plot(x, np.abs(4 * x - 1) / 8 + 0.75 * np.abs(x + 1), color="C3", linestyle="-.", label="what clipping sees")
    left.plot([0.25, -1.0], [15 / 16, 5 / 8], "ko", markersize=5)
    left.annotate("optimum 1/4", (0.25, 15 / 16), (-1.0, 1.75), arrowprops={"arrowstyle": "-"}, fontsize=8)
    left.annotate("its optimum −1", (-1.0, 5 / 8), (-2.1, 0.1), arrowprops={"arrowstyle": "-"}, fontsize=8)
    finish(left, ylim=(0, 4), xlabel="x", ylabel="loss", title="The objective")
    ends, rows = {}, []
    for name, one in zip(METHODS, seen, strict=True):
        assert one.path is not None
        final = one.final[:, 0]
        ends[name] = (float(final.mean()), float(final.std(ddof=1) / np.sqrt(len(final))))
        mean, (low, high) = one.mean_position[:, 0], np.quantile(one.path[..., 0], [0.05, 0.95], axis=1)
        right.plot(one.times, one.path[:, 0, 0], color=LOOKS[name]["color"], linewidth=0.5, alpha=0.6)
        right.plot(one.times, mean, label=f"{name}: {ends[name][0]:.3f}", **LOOKS[name])
        right.fill_between(one.times, low, high, color=LOOKS[name]["color"], alpha=0.12, linewidth=0)
        rows += rows_of({"method": name, "t": one.times, "mean": mean, "p05": low, "p95": high})
    mark_optimum(right, 0.25)
    mark_optimum(right, -1.0, "C3")
    title = f"Trajectories: mean of {scale.seeds} seeds, one seed, 5–95 %"
    legend = {"title": "mean at the end", "title_fontsize": 8}
    finish(right, legend=legend, xlabel="step", ylabel="x", title=title)
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
