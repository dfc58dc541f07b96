"""Figure 4: average regret, below the lemma's bound with the predicted and with the observed carry."""

import math
from typing import Any

import numpy as np

from carryclip.theory import bounds
from carryclip.theory.noise import Uniform
from carryclip.theory.problems import Absolute
from carryclip.theory.simulate import Above, Simulation, log_times
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.theory_figures import claims
from carryclip_lab.theory_figures.drawing import LINES, finish, panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, rows_of, simulations

RATE, START = 0.1, 100.0
HORIZONS = (100, 1000, 10_000)
CASES = {"α = 0.1, σ² = 0.1": (0.1, math.sqrt(0.1), None), "β = 0.25, σ² = 0.2": (0.25 * 0.2, math.sqrt(0.2), 0.25)}
"""Margin, half width of the noise, and beta where the region is adaptive."""


def compute(scale: Scale, tick: Tick) -> list[Simulation]:
    """Both cases."""
    times = np.unique([*log_times(scale.steps, 60), *(t for t in HORIZONS if t <= scale.steps)])
    given = {"problem": Absolute(START), "lr": RATE, "steps": scale.steps, "times": times}
    given |= {"seeds": scale.seeds, "seed": scale.seed}
    cases = [{"region": Above(margin), "noise": Uniform(noise)} for margin, noise, _ in CASES.values()]
    return simulations([{**given, **case} for case in cases], tick)


def curves(name: str, scale: Scale, one: Simulation) -> dict[str, np.ndarray]:
    """Average regret and its bounds, at each horizon."""
    margin, noise, beta = CASES[name]
    bound = float(scale.bound(noise))
    radius, times = 1.0 + margin, one.times.astype(float)
    given: dict[str, Any] = {"steps": times, "lr": RATE, "distance": START}
    predicted = {}
    for form in ("printed", "corrected"):
        if beta is None:
            predicted[form] = bounds.carry_mean(alpha=margin, gradient_bound=bound, largest_radius=radius, form=form)
        else:
            spread = {"beta": beta, "min_variance": noise**2, "gradient_bound": bound}
            predicted[form] = bounds.adaptive_carry_mean(**spread, form=form)
    shadow = {**given, "gradient_square": 1.0 + noise**2 / 3.0, "mean_gradient": 1.0}
    rate = bounds.lundberg_rate(alpha=margin, noise=Uniform(noise))
    observed = np.maximum.accumulate(one.carry.mean(-1))
    return {
        "seen": one.regret.mean(-1),
        **{form: bounds.transformation_mean(carry=carry, update=radius, **given) for form, carry in predicted.items()},
        "observed": bounds.transformation_mean(carry=observed, update=radius, **given),
        "sharp": bounds.shadow_regret(carry=bounds.lundberg_mean(rate=rate), **shadow),
    }


LABELS = {
    "seen": "average regret",
    "printed": "lemma, printed carry bound",
    "corrected": "lemma, corrected carry bound",
    "observed": "lemma, observed carry",
    "sharp": "through the shadow, sharp carry bound",
}
LOOKS = {
    **LINES,
    "seen": {**LINES["seen"], "markevery": 5},
    "observed": {"color": "C1", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
}


def present(scale: Scale, seen: list[Simulation]) -> Result:
    """One panel for each case."""
    figure, *axes = panels()
    rows, ratios, words = [], [], []
    for axis, name, one in zip(axes, CASES, seen, strict=True):
        lines = curves(name, scale, one)
        for kind, values in lines.items():
            axis.plot(one.times, values, label=LABELS[kind], **LOOKS[kind])
        finish(axis, xscale="log", yscale="log", xlabel="T", ylabel="average regret", title=name)
        picked = [int(np.flatnonzero(one.times == t)[0]) for t in HORIZONS if t in one.times]
        mine = [float(lines["observed"][k] / lines["seen"][k]) for k in picked]
        ratios += mine
        words.append(f"{name}: {', '.join(f'{ratio:.2f}' for ratio in mine)}")
        rows += rows_of({"case": name, "T": one.times, **lines})
    horizons = ", ".join(str(t) for t in HORIZONS if t in seen[0].times)
    ours = f"bound with the observed carry / regret at T = {horizons}: {'; '.join(words)}"
    verdict = claims.nearly_tight(ratios) if len(ratios) == 2 * len(HORIZONS) else "not run at this size"
    claim = Claim(
        "T6", "The regret bound is nearly tight once the observed carry is put in", "essentially tight", ours, verdict
    )
    caption = (
        f"Average regret on f(x) = |x| from x = {START:g}, learning rate {RATE}, mean of {scale.seeds} seeds, with the "
        "gradient-transformation lemma's bound: with the expected carry as printed, corrected and observed; and the "
        f"sharper bound through x − ηΔ. Left: γ = |ḡ| + α; right: γ = |ḡ| + βσ². Here {scale.said}. "
        f"{ours[0].upper()}{ours[1:]}."
    )
    return Result(figure, caption, rows, [claim])


STUDY = Study("Regret with predicted and observed carry (figure 4)", compute, present)
