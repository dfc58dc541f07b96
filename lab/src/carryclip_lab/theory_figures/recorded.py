"""Recorded gradients: what they say of the carry for every radius, beside the carry itself."""

from typing import Any

import numpy as np

from carryclip.regions import Component
from carryclip.theory import paths
from carryclip.theory.noise import Gaussian, Noise, Pareto, Rare
from carryclip.theory.problems import Linear
from carryclip.theory.simulate import Simulation
from carryclip_lab.theory_figures.drawing import LINES, finish, panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, rows_of, simulations

TILT = 0.3
LAWS: dict[str, Noise] = {"Gaussian": Gaussian(1.0), "rare": Rare(5.0, p=0.05), "Pareto": Pareto(1.0, tail=2.5)}
LOOKS: dict[str, dict[str, Any]] = {
    "Gaussian": {"color": "black", "linestyle": "-"},
    "rare": {"color": "C3", "linestyle": "--"},
    "Pareto": {"color": "C0", "linestyle": "-."},
}


def _steps(scale: Scale) -> int:
    return min(scale.steps, 2000)


def _radii(scale: Scale) -> np.ndarray:
    return np.geomspace(0.1, 3.0, max(scale.points // 2, 5))


def _gradients(law: Noise, scale: Scale, seeds: int) -> np.ndarray:
    """The gradients that a run with this seed sees; axes (steps, seeds)."""
    rng = np.random.default_rng(scale.seed)
    draws = [law.draw(rng, (seeds, 1))[:, 0] for _ in range(_steps(scale))]
    return TILT + law.scale * np.array(draws)


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """The carry of all radii at once, for each law."""
    given = {"problem": Linear(TILT), "region": Component(_radii(scale)), "times": 1}
    given |= {"steps": _steps(scale), "seeds": max(scale.seeds // 5, 4), "seed": scale.seed}
    return simulations([{**given, "noise": law} for law in LAWS.values()], tick)


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """One sequence against the radius on the left, shares of the bound over all seeds on the right."""
    figure, left, right = panels()
    radii, rows, shares = _radii(scale), [], []
    for name, one in zip(LAWS, seen, strict=True):
        seeds = one.peak_carry.shape[-1]
        most = paths.path_curve(_gradients(LAWS[name], scale, seeds), radii)
        largest = one.peak_carry
        shares.append(largest[most > 1e-9] / most[most > 1e-9])
        left.fill_between(radii, most[:, 0] / 2.0, most[:, 0], color=LOOKS[name]["color"], alpha=0.15, linewidth=0)
        left.plot(radii, most[:, 0], linewidth=0.8, **LOOKS[name])
        left.plot(radii, largest[:, 0], "o", color=LOOKS[name]["color"], markersize=4, label=name)
        limits = {"least": most[:, 0] / 2.0, "carry": largest[:, 0], "most": most[:, 0]}
        rows += rows_of({"noise": name, "radius": radii, **limits})
    left.axvline(TILT, color="0.5", linewidth=0.8, linestyle=LINES["sharp"]["linestyle"])
    left.text(TILT * 1.04, 0.03, "mean gradient", transform=left.get_xaxis_transform(), fontsize=8, color="0.3")
    title = "One recorded sequence each"
    finish(left, xscale="log", yscale="log", xlabel="radius", ylabel="largest |carry|", title=title)
    look = [LOOKS[name]["color"] for name in LAWS]
    right.hist(shares, bins=np.linspace(0.5, 1.0, 26), density=True, color=look, label=list(LAWS))
    finish(right, xlabel="largest |carry| / upper bound", ylabel="density", title="All radii, all seeds")
    everything = np.concatenate(shares)
    caption = (
        f"Recorded gradients with mean {TILT}, {_steps(scale)} of them. Left: for every radius the largest carry "
        "(dots, from running the algorithm) lies between half of what windows of gradients exceed the radii by and all "
        f"of it (bands, from the gradients alone). Right: its share of the upper bound over {seen[0].carry.shape[-1]} "
        f"seeds, {len(radii)} radii and three laws: from {everything.min():.2f} to {everything.max():.2f}."
    )
    return Result(figure, caption, rows)


STUDY = Study("Recorded gradients and the carry, for every radius", compute, present, in_paper=False)
