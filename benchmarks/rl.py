"""Clipping in reinforcement learning: does the critic learn the truth, and what becomes of the return?

    python benchmarks/rl.py            # run what is missing, about 20 minutes on an idle core, and print the tables
    python benchmarks/rl.py --smoke    # one seed of every trial, much shortened; nothing is kept
    python benchmarks/rl.py --show     # only print them
    python benchmarks/rl.py --write    # put them into docs/reinforcement-learning.md, and draw docs/figures/critics.svg

Every run is kept in ``benchmarks/rl.json``, and one that is there is not run again. A trial is one function:
``trial(environment, method, seed) -> {"calibration", "error", "return"}``.

The rules, fixed before the runs were made. The environments and the length of training were chosen with seeds from 100
on; seeds 0 to 4 judge. No learning rate is tuned: PPO has the same one with every method, Adam throughout. When about a
quarter of the runs had been made, *lottery* and the radius ``Quantile(0.9)`` were added, which seeds 100 and 101 had
suggested, and the seeds of environments were moved apart, for which runs of seed 1 were made again; the rules stayed.
When more than half had been made it was added that fewer than three seeds judge nothing.

- *Calibration* is the mean of the critic's values over the mean of Monte Carlo returns, at the states that the trained
  policy visits. A critic is *true* if its mean over seeds is within 10 % of 1, and *off* if it differs by 30 % or more.
- The claim about critics holds in an environment with rare rewards if clipping at 0.5 is off and our default is true.
- ``Quantile(0.9)``, a radius that follows the gradients, is judged as the default with the radius 0.5 is.
- CartPole, trained by Stable-Baselines3, trains *as before* unless the default's return is surely below that of
  clipping at 0.5: the 95 % interval of the difference (Student's, seed by seed) lies below 0, and the mean loss is
  above 25 of 500 steps.
- Clipped rewards are compared with rewards left alone, both without clipping of gradients. A method *keeps the return*
  if it is not surely below by more than 5 %, and keeps the critic true by the first rule.
- The control has symmetric heavy-tailed rewards, whose large values say nothing. There plain clipping should lose
  nothing: the table says what the carry costs.
"""

import argparse
import fcntl
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from carries import T95
from gymnasium.vector import VectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from carryclip import CarryClipWarning, Norm, Quantile
from carryclip.carry import DEFAULT
from carryclip.torch import UClip
from carryclip_lab.rewards import Carried, Clipped, Seen
from carryclip_lab.tasks._critic import Agents, measure
from carryclip_lab.tasks._rooms import Bandit, Chain, Lottery, Noise, cart_pole, lake

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from ppo_loop import Agent, train
from sb3_ppo import agent as sb3_lottery

RESULTS = Path(__file__).with_name("rl.json")
PAGE = Path(__file__).parents[1] / "docs" / "reinforcement-learning.md"
MARK, END = "<!-- rl: written by benchmarks/rl.py -->", "<!-- end of the tables -->"
PICTURE = PAGE.parent / "figures" / "critics.svg"
SEEDS = 5


@dataclass(frozen=True)
class Setting:
    """An environment, and how PPO is trained in it."""

    make: Callable[[int], VectorEnv]
    rounds: int = 40
    discount: float = 0.99
    library: str = "loop"
    """``loop``: ``examples/ppo_loop.py``; ``sb3``: Stable-Baselines3."""


class Method(NamedTuple):
    """What is done to gradients (a carry, or None for no clipping at all) and to rewards."""

    carry: Any
    rewards: str = "raw"
    radius: Any = 0.5
    """Of gradients; 0.5 is what every PPO has."""


SETTINGS = {
    "bandit": Setting(Bandit),
    "chain": Setting(Chain),
    "lake": Setting(lake, discount=0.95),
    "lottery": Setting(Lottery, library="sb3"),
    "CartPole": Setting(cart_pole, discount=0.98, library="sb3"),
    "noise": Setting(Noise),
}
GRADIENTS = {
    "clip 0.5": Method(False),
    "none": Method(None),
    "default": Method(DEFAULT),
    "full carry": Method(True),
    "default, Quantile(0.9)": Method(DEFAULT, radius=Quantile(0.9)),
}
REWARDS = {
    "clipped": Method(None, "clipped"),
    "with carry": Method(None, "carried"),
    "with carry, seen": Method(None, "seen"),
}
METHODS = GRADIENTS | REWARDS
RARE = ("bandit", "chain", "lake", "lottery")

Run = tuple[str, str, int]
"""Environment, method and seed."""
WAYS = {"clipped": Clipped, "carried": Carried, "seen": Seen}


def with_rewards(envs: VectorEnv, how: str) -> VectorEnv:
    """The environments, with rewards left alone, clipped, or clipped with a carry, which the learner may see."""
    return WAYS[how].wrapped(envs) if how in WAYS else envs


def trial(environment: str, method: str, seed: int, share: float = 1.0) -> dict[str, float]:
    """Train once, and measure. ``share`` shortens the training."""
    torch.set_num_threads(1)
    setting, chosen = SETTINGS[environment], METHODS[method]
    rounds = max(1, round(share * setting.rounds))
    trained = sb3_ppo if setting.library == "sb3" else loop_ppo
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryClipWarning)  # the full carry before Adam is a trial here
        # Environments side by side take the seeds from this one on: seeds of different runs must not overlap.
        agent = trained(setting, chosen, 1000 * seed, rounds)
    envs = with_rewards(setting.make(100), chosen.rewards)
    return measure(agent, envs, setting.discount, seed, seen=chosen.rewards == "seen")


def loop_ppo(setting: Setting, method: Method, seed: int, rounds: int) -> Agents:
    """Train by ``examples/ppo_loop.py``: 32 environments, 32 steps a round."""
    torch.manual_seed(seed)
    envs = with_rewards(setting.make(32), method.rewards)
    agent = Agent(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    if method.carry is not None:
        UClip(optimizer, Norm(method.radius), method.carry, metrics_every=0)
    train(agent, optimizer, envs, rounds, steps=32, discount=setting.discount, seed=seed)
    return agent


def sb3_ppo(setting: Setting, method: Method, seed: int, rounds: int) -> Agents:
    """Train by Stable-Baselines3; ``clip 0.5`` is its own clipping."""
    own = 0.5 if method.carry is False else math.inf
    model = sb3_lottery(own, seed) if setting.make is Lottery else sb3_cart_pole(own, seed, setting.discount)
    if method.carry not in (None, False):
        UClip(model.policy.optimizer, Norm(method.radius), method.carry, metrics_every=0)
    model.learn(1024 * rounds)
    return lambda seen: (
        model.policy.get_distribution(seen).distribution.logits,
        model.policy.predict_values(seen)[:, 0],
    )


def sb3_cart_pole(max_grad_norm: float, seed: int, discount: float) -> PPO:
    """PPO for CartPole."""
    return PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8, seed=seed),
        learning_rate=lambda left: 1e-3 * left,
        n_steps=128,
        batch_size=256,
        gamma=discount,
        gae_lambda=0.8,
        max_grad_norm=max_grad_norm,
        seed=seed,
        device="cpu",
    )


def methods(environment: str) -> list[str]:
    """Rewards of CartPole are never clipped, and an episode of one step pays its whole reward at once."""
    return list(GRADIENTS if SETTINGS[environment].library == "sb3" else METHODS)


def runs(seeds: int = SEEDS) -> list[Run]:
    """All of them, seed by seed, so that a part of them is a fair part."""
    return [
        (environment, method, seed)
        for seed in range(seeds)
        for environment in SETTINGS
        for method in methods(environment)
    ]


def read() -> dict[Run, dict[str, float]]:
    """The runs that are known."""
    if not RESULTS.is_file():
        return {}
    return {(a, b, c): found for a, b, c, found in json.loads(RESULTS.read_text(encoding="utf-8"))}


def run_missing(seeds: list[int]) -> None:
    """Make the runs of ``seeds`` that are missing, and keep each; several processes may work side by side."""
    missing = [key for key in runs() if key[2] in seeds and key not in read()]
    for done, key in enumerate(missing, 1):
        if key in read():  # another process has made it
            continue
        begun = time.monotonic()
        keep(key, trial(*key))
        print(f"{done} of {len(missing)} runs: {key}, {time.monotonic() - begun:.0f} seconds", flush=True)


def keep(key: Run, found: dict[str, float]) -> None:
    """Add a run to the file, which another process may be writing to."""
    with open(__file__, encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read() | {key: found}
        rows = ",\n".join(json.dumps([*one, results[one]]) for one in sorted(results))
        fresh = RESULTS.with_suffix(".new")
        fresh.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
        fresh.replace(RESULTS)


class Interval(NamedTuple):
    """A mean over seeds with its 95 % interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.half:.2f}" if math.isfinite(self.half) else f"{self.mean:.2f}"


def interval(values: Any) -> Interval:
    """Student's interval; infinite for one seed."""
    values = np.asarray(values)
    half = T95[len(values)] * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Interval(float(values.mean()), float(half))


class Judge:
    """The rules."""

    def __init__(self, results: dict[Run, dict[str, float]]) -> None:
        self.results = results

    def seeds(self, environment: str, *names: str) -> list[int]:
        """Those with which all of these methods have run."""
        return [seed for seed in range(SEEDS) if all((environment, name, seed) in self.results for name in names)]

    def values(self, environment: str, method: str, what: str) -> np.ndarray:
        """Of all seeds that have run."""
        return np.array([self.results[environment, method, seed][what] for seed in self.seeds(environment, method)])

    def gain(self, environment: str, method: str, base: str) -> Interval:
        """How much larger the return is than with ``base``, seed by seed."""
        seeds = self.seeds(environment, method, base)
        found = [[self.results[environment, name, seed]["return"] for seed in seeds] for name in (method, base)]
        return interval(np.subtract(*found))

    def few(self, environment: str, *names: str) -> bool:
        """Whether there are too few seeds for a verdict."""
        return len(self.seeds(environment, *names)) < 3

    def off(self, environment: str, method: str) -> float:
        """How far from 1 the mean calibration is."""
        return abs(float(self.values(environment, method, "calibration").mean()) - 1.0)

    def surely_below(self, environment: str, method: str, base: str, notice: float) -> bool:
        """Whether the return is below that of ``base``, by more than ``notice``."""
        gain = self.gain(environment, method, base)
        return gain.mean + gain.half < 0 and -gain.mean > notice

    def critic(self, environment: str, ours: str) -> str:
        """The claim about critics, in words."""
        plain, found = self.off(environment, "clip 0.5"), self.off(environment, ours)
        verdict = "holds" if plain >= 0.3 and found <= 0.1 else "does not hold"
        if self.few(environment, "clip 0.5", ours):
            verdict = "is not judged, for want of seeds,"
        return f"{verdict} on *{environment}* (off by {plain:.0%} with clip 0.5, by {found:.0%} with it)"

    def cart_pole(self) -> str:
        """The claim about CartPole, in words."""
        below = self.surely_below("CartPole", "default", "clip 0.5", 25.0)
        verdict = "does not train as before" if below else "trains as before"
        if self.few("CartPole", "default", "clip 0.5"):
            verdict = "is not judged, for want of seeds,"
        gain = self.gain("CartPole", "default", "clip 0.5")
        return f"Stable-Baselines3's PPO {verdict} on CartPole: default minus clip 0.5 is {gain} steps."

    def rewards(self, environment: str, method: str) -> str:
        """The claim about rewards, in words."""
        notice = 0.05 * abs(float(self.values(environment, "none", "return").mean()))
        keeps = "loses" if self.surely_below(environment, method, "none", notice) else "keeps"
        if self.few(environment, method, "none"):
            keeps = "has too few seeds to judge"
        return f"{keeps} the return, critic off by {self.off(environment, method):.0%}"


def table(results: dict[Run, dict[str, float]]) -> str:
    """The tables as Markdown, and the verdicts."""
    judge = Judge(results)
    if not all(judge.seeds(environment, method) for environment, method, _ in runs(1)):
        return "Some methods have not run yet."
    made = len(results)
    whole = "" if made == len(runs()) else f" {made} of {len(runs())} runs have been made; the others are missing."
    lines = [
        f"Mean over seeds and 95 % interval. A true critic has calibration 1.{whole}",
        "",
        "| environment | seeds | gradients | rewards | calibration | error of the value | return |",
        "|---|---|---|---|---|---|---|",
    ]
    for environment in SETTINGS:
        for method in methods(environment):
            gradients, rewards = ("none", method) if method in REWARDS else (method, "left alone")
            found = [interval(judge.values(environment, method, what)) for what in ("calibration", "error", "return")]
            row = [environment, len(judge.seeds(environment, method)), gradients, rewards, *found]
            lines.append(f"| {' | '.join(map(str, row))} |")
    lines.append("")
    for ours in ("default", "default, Quantile(0.9)"):
        said = "; ".join(judge.critic(environment, ours) for environment in RARE)
        lines.append(f"- The claim about critics, for *{ours}*: {said}.")
    lines.append(f"- {judge.cart_pole()}")
    for environment in ("bandit", "chain", "lake"):
        said = "; ".join(f"*{method}* {judge.rewards(environment, method)}" for method in REWARDS)
        lines.append(f"- Rewards of *{environment}*: {said}.")
    return "\n".join(lines)


def draw(results: dict[Run, dict[str, float]]) -> None:
    """Calibration of every method in every environment: a point for each seed, and the mean."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    judge, shown = Judge(results), list(METHODS)
    figure, axes = plt.subplots(1, len(SETTINGS), figsize=(11.0, 2.7), sharey=True, layout="constrained")
    for axis, environment in zip(axes, SETTINGS, strict=True):
        axis.axvspan(0.9, 1.1, color="0.93", zorder=0)
        axis.axvline(1.0, color="0.5", linewidth=0.7, zorder=1)
        for method in methods(environment):
            place, values = shown.index(method), judge.values(environment, method, "calibration")
            colour = "C3" if method in REWARDS else "C0"
            axis.plot(values, np.full(len(values), place), "o", color=colour, markersize=3, alpha=0.5)
            axis.plot(values.mean(), place, "|", color="black", markersize=9, markeredgewidth=1.6)
        axis.set(title=environment, xlim=(-0.1, 2.3), ylim=(len(shown) - 0.5, -0.5))
        axis.spines[["top", "right"]].set_visible(False)
    names = [method if method in GRADIENTS else f"rewards {method}" for method in shown]
    axes[0].set_yticks(range(len(shown)), names)
    figure.supxlabel("mean value of the critic / mean return", fontsize=9)
    with matplotlib.rc_context({"svg.hashsalt": "critics"}):
        figure.savefig(PICTURE, metadata={"Date": None})
    plt.close(figure)


def smoke() -> None:
    """One seed of every trial, a tenth as long; prints what it finds and keeps nothing."""
    for environment, method, _ in runs(1):
        found = trial(environment, method, 100, share=0.1)
        print(environment, method, {name: round(value, 3) for name, value in found.items()}, flush=True)


def write_page(results: dict[Run, dict[str, float]]) -> str:
    """The page with fresh tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    _, _, after = rest.partition(END)
    return f"{before}{MARK}\n\n{table(results)}\n\n{END}{after}"


def main() -> None:
    """Run, then show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="one short seed of everything, kept nowhere")
    parser.add_argument("--show", action="store_true", help="run nothing, only print the tables")
    parser.add_argument("--write", action="store_true", help="run nothing, only fill the page with the tables")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)), help="make only the runs of these")
    given = parser.parse_args()
    if given.smoke:
        smoke()
        return
    if given.write:
        PAGE.write_text(write_page(read()), encoding="utf-8")
        draw(read())
        return
    if not given.show:
        run_missing(given.seeds)
    print(table(read()))


if __name__ == "__main__":
    main()
