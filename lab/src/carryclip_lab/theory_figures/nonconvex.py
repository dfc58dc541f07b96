"""Objectives that are not convex: how the gradient vanishes for any radius, and the law of wind-up."""

from typing import Any

import numpy as np

from carryclip.carry import Capped, CarryPolicy
from carryclip.regions import Component
from carryclip.theory import nonconvex
from carryclip.theory.noise import Rare
from carryclip.theory.problems import Custom
from carryclip.theory.simulate import Simulation
from carryclip_lab.theory_figures.drawing import LINES, finish, mark_optimum, panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, rows_of, simulations

RADIUS, DIMENSION, START, SMOOTHNESS = 0.5, 3, 4.0, 4.0
NOISE = Rare(2.0 / 0.9, p=0.1)
LOOKS: dict[str, dict[str, Any]] = {
    "plain clipping": {"color": "0.5", "linestyle": ":", "marker": "^", "markersize": 5},
    "full carry": {"color": "black", "linestyle": "-", "marker": "o", "markersize": 5},
    "capped": {"color": "C0", "linestyle": "-.", "marker": "s", "markersize": 5},
}
HILLS = {
    "x²": (Custom(lambda x: np.square(x).sum(-1), lambda x: 2.0 * x, start=10.0), lambda x: x**2, 0.02, 5),
    "x⁴/4": (Custom(lambda x: (x**4).sum(-1) / 4.0, lambda x: x**3, start=3.0), lambda x: x**4 / 4.0, 0.01, 5),
}


def _slope(x: np.ndarray) -> np.ndarray:
    return x + 1.5 * np.sin(2.0 * x)


def _clipped_square(x: np.ndarray) -> np.ndarray:
    """What is averaged over the steps of a run; as a problem's value it is recorded as the regret."""
    return np.square(np.clip(_slope(x), -RADIUS, RADIUS)).sum(-1)


RIPPLES = Custom(_clipped_square, _slope, start=START)
GAP = DIMENSION * (START**2 / 2.0 - 0.75 * np.cos(2.0 * START) + 0.75)


def _horizons(scale: Scale) -> list[int]:
    return [max(scale.steps // 4**k, 20) for k in (3, 2, 1, 0)]


def _seeds(scale: Scale) -> int:
    return max(scale.seeds // 5, 4)


def _policy(name: str, steps: int) -> CarryPolicy:
    if name != "capped":
        return name == "full carry"
    cap = nonconvex.free_cap(radius=RADIUS, noise_bound=NOISE.bound, proxy=NOISE.proxy, steps=steps)
    return Capped(float(cap))


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """Every policy at every horizon, each with its own learning rate; then two paths without noise."""
    given = {
        "problem": RIPPLES,
        "region": Component(RADIUS),
        "noise": NOISE,
        "dimension": DIMENSION,
        "seeds": _seeds(scale),
        "seed": scale.seed,
        "times": 1,
    }
    parts = []
    for name in LOOKS:
        for steps in _horizons(scale):
            own = {"steps": steps, "lr": 1.0 / np.sqrt(steps), "carry": _policy(name, steps)}
            parts.append({**given, **own})
    for problem, _, rate, _ in HILLS.values():
        steps = min(scale.steps, 4000)
        quiet = {"lr": rate, "steps": steps, "seeds": 1}
        every = {"times": range(1, steps + 1, 5)}  # or the tips of the path are cut off
        parts.append({"problem": problem, "region": Component(1.0), **quiet, **every})
    return simulations(parts, tick)


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """Stationarity against T on the left, wind-up without noise on the right."""
    figure, left, right = panels()
    horizons, rows = _horizons(scale), []
    for place, name in enumerate(LOOKS):
        mine = seen[place * len(horizons) : (place + 1) * len(horizons)]
        values = [float(one.regret[-1].mean()) for one in mine]
        label = "capped at the free cap" if name == "capped" else name
        left.plot(horizons, values, label=label, **LOOKS[name])
        rows += rows_of({"policy": name, "T": horizons, "mean_square": values})
    at = {"smoothness": SMOOTHNESS, "gap": GAP, "radius": RADIUS, "dimension": DIMENSION}
    at |= {"noise_bound": NOISE.bound, "proxy": NOISE.proxy}
    steps = np.array(horizons, float)
    bound = nonconvex.any_radius(steps=steps, lr=1.0 / np.sqrt(steps), **at)
    left.plot(horizons, bound, label="bound, for any radius", **LINES["sharp"])
    rows += rows_of({"policy": "bound", "T": horizons, "mean_square": bound})
    title = "Any radius, skewed noise"
    finish(left, xscale="log", yscale="log", xlabel="T", ylabel="mean of ‖clip(∇f)‖²", title=title)
    hills = zip(HILLS.items(), seen[-2:], ("black", "C0"), strict=True)
    for (name, (problem, function, rate, count)), one, colour in hills:
        times, path = np.append(0.0, one.times * rate), np.append(problem.start, one.mean_position[:, 0])
        right.plot(times, path, color=colour, label=f"f = {name}")
        points = nonconvex.turning_points(function, float(problem.start), radius=1.0, count=count)
        passed = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(points)))])
        inside = passed <= one.times[-1] * rate
        right.plot(passed[inside], np.array(points)[inside], "o", color=colour, markersize=6, fillstyle="none")
        rows += rows_of({"policy": f"turning points of {name}", "T": "", "mean_square": points})
    mark_optimum(right)
    finish(right, xlabel="step × learning rate", ylabel="x", title="Wind-up: full carry, radius 1, no noise")
    last = {row["policy"]: row["mean_square"] for row in rows if row["T"] == horizons[-1]}
    radii = abs(_slope(np.asarray(START))) / RADIUS
    caption = (
        f"Objectives that are not convex. Left: x²/2 − 0.75·cos 2x in {DIMENSION} coordinates from {START:g}, where "
        f"the gradient is {radii:.0f} radii, radius {RADIUS}, skewed noise within 2, learning rate 1/√T, "
        f"{_seeds(scale)} seeds. Mean over the run of ‖clip(∇f)‖² at T = {horizons[-1]}: plain clipping "
        f"{last['plain clipping']:.3g}, full carry {last['full carry']:.3g}, capped at the free cap "
        f"{last['capped']:.3g}, bound {last['bound']:.3g}. The full carry winds up and comes back; a cap that costs "
        "nothing in the bound keeps it from doing so. Right: circles are where f has fallen by the radius times the "
        "distance since the last turn."
    )
    return Result(figure, caption, rows)


STUDY = Study("Objectives that are not convex, and the law of wind-up", compute, present, in_paper=False)
