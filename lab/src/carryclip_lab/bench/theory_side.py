"""The simulator: time of the paper's figures at their size, and many seeds at once against a plain loop over seeds."""

import time
from collections.abc import Callable

import numpy as np

from carryclip.theory.noise import Uniform
from carryclip.theory.problems import Absolute
from carryclip.theory.simulate import Above, run
from carryclip_lab.bench.meters import Times, quartiles
from carryclip_lab.theory_figures.main import STUDIES
from carryclip_lab.theory_figures.study import Scale, Study

LOOP = "NumPy loop over seeds"
MANY = "carryclip.theory.simulate"
NOISE, RATE, START = 0.1**0.5, 0.1, 100.0


def margins(points: int) -> np.ndarray:
    """The sweep of the paper's second figure."""
    return np.linspace(0.1, 1.0, points)


def plain_loop(alphas: np.ndarray, seeds: int, steps: int) -> np.ndarray:
    """What one writes first: for each margin and seed, step by step. Gives the last carries."""
    ends = np.zeros((len(alphas), seeds))
    for point, alpha in enumerate(alphas):
        for seed in range(seeds):
            noise = np.random.default_rng(seed).uniform(-NOISE, NOISE, steps)
            x, carry = START, 0.0
            for t in range(steps):
                mean = np.sign(x)
                total = mean + noise[t] + carry
                update = np.clip(total, -(abs(mean) + alpha), abs(mean) + alpha)
                carry = total - update
                x = x - RATE * update
            ends[point, seed] = carry
    return ends


def many(alphas: np.ndarray, seeds: int, steps: int) -> np.ndarray:
    """The same runs, all at once."""
    seen = run(Absolute(START), Above(alphas), noise=Uniform(NOISE), lr=RATE, steps=steps, seeds=seeds, times=1)
    return seen.carry[-1]


def contest(points: int, seeds: int, repeats: int) -> dict[str, Times]:
    """Seconds per step of all runs, by turns. The loop runs one seed per margin and is scaled up to all of them."""
    alphas, steps = margins(points), 200
    times: dict[str, list[float]] = {LOOP: [], MANY: []}
    for _ in range(repeats):
        times[LOOP].append(_seconds(lambda: plain_loop(alphas, 1, steps)) * seeds / steps)
        times[MANY].append(_seconds(lambda: many(alphas, seeds, steps)) / steps)
    return {name: quartiles(samples) for name, samples in times.items()}


def figures(scale: Scale, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds for each figure of the paper: simulations, bounds and drawing."""
    times = {}
    for name, study in STUDIES.items():
        if not study.in_paper:
            continue
        say(f"theory: {name}")
        times[name] = _seconds(lambda study=study: _draw(study, scale))
    return times


def _draw(study: Study, scale: Scale) -> None:
    import matplotlib.pyplot as plt

    plt.close(study.present(scale, study.compute(scale, lambda done, total: None)).figure)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
