"""Which carry policy is safe with every optimizer, and which of those wins most back: the trials behind the default.

    python benchmarks/carries.py                          # all trials, about 80 minutes on two cores; --list shows them
    python benchmarks/carries.py --only digits amounts    # some of them
    python benchmarks/carries.py --show                   # only judge what has run, and print the tables
    python benchmarks/carries.py --write                  # put them into docs/carry.md

Every run is kept in ``benchmarks/carries.json``, and one that is there is not run again. Data, start and batches depend
on the seed alone, so that methods are compared pair by pair.

The rule, fixed before the runs were made. Plain clipping is compared with each policy at the same radius and learning
rate: the one that serves plain clipping best. A policy is *surely worse* where the 95 % interval of the difference
(Student's, over seeds) lies below 0 and the mean loss is more than anybody would notice (``notice`` of each trial). The
default is not surely worse in any trial but that of symmetric heavy tails, with SGD, momentum and AdamW alike; among
those that are not, it is the one that wins most back: the largest mean, over the trials where plain clipping is
surely worse than no clipping or is biased by construction (``skewed``), of the part of plain clipping's error that the
policy removes.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from carryclip import CarryClipWarning, Component, Drip, Gated, Norm, Shrunk
from carryclip.torch import UClip

RESULTS = Path(__file__).with_name("carries.json")
PAGE = Path(__file__).parents[1] / "docs" / "carry.md"
MARK, END = "<!-- carries: written by benchmarks/carries.py -->", "<!-- end of the tables -->"
SEEDS = 5
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's factor for a 95 % interval, by the number of seeds."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params, lr: torch.optim.SGD(params, lr=lr),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr),
}

METHODS: dict[str, Any] = {
    "none": None,
    "clip": False,
    "full": True,
    "Gated": Gated(),
    "Drip": Drip(),
    "Shrunk": Shrunk(),
}
"""What stands behind ``carry=``; None for no clipping."""


class Problem(NamedTuple):
    """One seed of a trial."""

    net: nn.Module
    loss: Callable[[int], Tensor]
    """The loss of a step's batch."""
    measure: Callable[[], dict[str, float]]
    """What is judged under the name ``error``, less is better, and what else is of interest."""


@dataclass(frozen=True)
class Trial:
    """A problem with its radius, its optimizers and their learning rates."""

    make: Callable[[int], Problem]
    steps: int
    radius: float
    rates: dict[str, tuple[float, ...]]
    notice: float
    """The difference in error that somebody would notice."""
    unit: str
    skewed: bool = False
    """Plain clipping is biased here by construction, so that there is something to win back."""
    robust: bool = False
    """Large gradients are noise alone: the one place where a policy may lose to plain clipping."""
    cosine: bool = False
    """The learning rate falls to a tenth along a cosine."""
    coordinates: bool = False
    """Each coordinate is clipped to the radius, instead of the norm of all."""

    @property
    def region(self) -> Norm | Component:
        """What gradients are clipped to."""
        return Component(self.radius) if self.coordinates else Norm(self.radius)


# ---------------------------------------------------------------------------------------------------- digits


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.tensor(found.data[order] / 16.0, dtype=torch.float32)
    labels = torch.tensor(found.target[order])
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def _mlp(seed: int, *sizes: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)


def digits(seed: int, *, batch: int = 32, tail: bool = False, wrong: float = 0.0, spike: int = -1) -> Problem:
    """Scikit-learn's digits: as they are, with a long tail of classes, with wrong labels, or with a spiked batch."""
    images, labels, test_images, test_labels = _digits()
    rng = np.random.default_rng(seed)
    if tail:  # the last class has a thirtieth of the first one's images
        keep = rng.random(len(labels)) < 30.0 ** (-labels.numpy() / 9)
        images, labels = images[keep], labels[keep]
    if wrong:
        bad = torch.from_numpy(rng.random(len(labels)) < wrong)
        labels = torch.where(bad, torch.from_numpy(rng.integers(0, 10, len(labels))), labels)
    net = _mlp(seed, 64, 64, 10)

    def loss(step: int) -> Tensor:
        chosen = torch.randint(len(labels), (batch,), generator=_generator(seed, step))
        value = cross_entropy(net(images[chosen]), labels[chosen])
        return value * 1000.0 if step == spike else value

    def measure() -> dict[str, float]:
        logits = net(test_images)
        right = (logits.argmax(1) == test_labels).double()
        balanced = torch.stack([right[test_labels == label].mean() for label in range(10)]).mean()
        return {"error": 1.0 - float(balanced), "loss": float(cross_entropy(logits, test_labels))}

    return Problem(net, loss, measure)


# ---------------------------------------------------------------------------------------------------- amounts


def amounts(seed: int, *, law: str = "claims", batch: int = 16) -> Problem:
    """Expected amounts by squared error, where single amounts are skewed: insurance claims, returns of a critic.

    ``claims``: 85 % are 0, the rest lognormal. ``critic``: a return of 30 in 2 of 100 cases. ``rare``: of 100 in 4 of
    1,000. ``symmetric``: the claims' mean with normal noise of their size.
    """
    count = 8
    rng = torch.Generator().manual_seed(7)
    lean, size = torch.randn(count, generator=rng) / 4, torch.randn(count, generator=rng) / 6

    def truth(x: Tensor) -> tuple[Tensor, Tensor]:
        """(chance of an amount, its mean)."""
        chance = {"claims": 0.15, "symmetric": 0.15, "critic": 0.02, "rare": 0.004}[law]
        mean = {"claims": 20.0, "symmetric": 20.0, "critic": 30.0, "rare": 100.0}[law]
        logit = math.log(chance / (1 - chance))
        return torch.sigmoid(logit + x @ lean), mean * torch.exp(x @ size)

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, count, generator=generator)
        chance, mean = truth(x)
        noise = torch.randn(batch, generator=generator)
        if law == "symmetric":
            return x, chance * mean + 10.0 * noise
        happens = torch.rand(batch, generator=generator) < chance
        factor = torch.exp(1.2 * noise - 0.72) if law == "claims" else torch.ones(batch)
        return x, torch.where(happens, mean * factor, 0.0)

    net = _mlp(seed, count, 64, 64, 1)
    test = torch.randn(4000, count, generator=torch.Generator().manual_seed(11))
    chance, mean = truth(test)
    wanted = chance * mean

    def loss(step: int) -> Tensor:
        x, y = draw(_generator(seed, step))
        return mse_loss(net(x)[:, 0], y)

    def measure() -> dict[str, float]:
        found = net(test)[:, 0]
        error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
        return {"error": float(error), "total": float(found.mean() / wanted.mean())}

    return Problem(net, loss, measure)


# ---------------------------------------------------------------------------------------------------- known optima


class _Weights(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(count))


def zipf(seed: int) -> Problem:
    """Logits of classes by Zipf's law, which should become the logarithms of their shares."""
    shares = torch.arange(1, 51, dtype=torch.float64) ** -1.2
    shares /= shares.sum()
    net = _Weights(50)

    def loss(step: int) -> Tensor:
        labels = torch.multinomial(shares, 4, replacement=True, generator=_generator(seed, step))
        return cross_entropy(net.values.expand(4, -1), labels)

    def measure() -> dict[str, float]:
        given = net.values.double().log_softmax(0)
        return {"error": float((shares * (shares.log() - given)).sum())}

    return Problem(net, loss, measure)


def line(seed: int, *, law: str) -> Problem:
    """A line through points whose noise is skewed (Pareto, tail 2.5) or symmetric and heavy (t, 1.5 d.f.)."""
    size = 10
    truth = torch.ones(size) / math.sqrt(size)
    net = _Weights(size)

    def loss(step: int) -> Tensor:
        generator = _generator(seed, step)
        x = torch.randn(8, size, generator=generator)
        x[:, 0] = 1.0
        if law == "skewed":
            uniform = torch.rand(8, generator=generator).clamp_min(1e-9)
            noise = uniform ** (-1 / 2.5) - 2.5 / 1.5
        else:
            gamma = torch._standard_gamma(torch.full((8,), 0.75), generator=generator)
            noise = torch.randn(8, generator=generator) / (gamma / 0.75).sqrt()
        return (x @ net.values - x @ truth - noise).square().mean() / 2

    return Problem(net, loss, lambda: {"error": float((net.values - truth).norm())})


# ---------------------------------------------------------------------------------------------------- language model


@cache
def _text() -> tuple[Tensor, Tensor, int]:
    from pydoc_data import topics

    content = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
    known, places = np.unique(content, return_inverse=True)
    text = torch.from_numpy(places)
    held = len(text) * 9 // 10
    return text[:held], text[held:], len(known)


def language(seed: int) -> Problem:
    """A small decoder that learns the next byte of Python's own documentation."""
    from carryclip_lab.tasks._decoder import Decoder

    train, test, tokens = _text()
    context, batch = 32, 16
    net = Decoder(tokens, context, 48, heads=4, layers=2, generator=torch.Generator().manual_seed(seed))
    windows = test[: len(test) // (context + 1) * (context + 1)].view(-1, context + 1)
    windows = windows[torch.linspace(0, len(windows) - 1, 300).long()]

    def loss(step: int) -> Tensor:
        starts = torch.randint(len(train) - context, (batch, 1), generator=_generator(seed, step))
        found = train[starts + torch.arange(context + 1)]
        return cross_entropy(net(found[:, :-1]).flatten(0, 1), found[:, 1:].flatten())

    def measure() -> dict[str, float]:
        return {"error": float(cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()))}

    return Problem(net, loss, measure)


# ---------------------------------------------------------------------------------------------------- the list

_DIGITS = {"SGD": (0.03, 0.1, 0.3, 1.0), "momentum": (0.01, 0.03, 0.1, 0.3), "AdamW": (1e-3, 3e-3, 1e-2)}
_AMOUNTS = {"SGD": (0.003, 0.01, 0.03, 0.1), "momentum": (1e-3, 3e-3, 0.01, 0.03), "AdamW": (3e-4, 1e-3, 3e-3)}
_SMALL = {"SGD": (0.003, 0.01, 0.03), "momentum": (3e-4, 1e-3, 3e-3), "AdamW": (1e-3, 3e-3, 1e-2)}
_LANGUAGE = {"momentum": (0.03, 0.1, 0.3), "AdamW": (1e-3, 3e-3, 6e-3)}


def _made(problem: Callable[..., Problem], **settings: Any) -> Callable[[int], Problem]:
    return lambda seed: problem(seed, **settings)


TRIALS: dict[str, Trial] = {
    "digits, radius 1": Trial(digits, 1000, 1.0, _DIGITS, 0.005, "balanced error"),
    "digits, radius 0.1": Trial(digits, 1000, 0.1, _DIGITS, 0.005, "balanced error"),
    "digits, long tail": Trial(_made(digits, batch=8, tail=True), 1500, 1.0, _DIGITS, 0.01, "balanced error"),
    "digits, wrong labels": Trial(_made(digits, wrong=0.3), 1000, 1.0, _DIGITS, 0.01, "balanced error"),
    "digits, one spike": Trial(_made(digits, spike=800), 1000, 1.0, _DIGITS, 0.01, "balanced error"),
    "amounts": Trial(amounts, 2000, 1.0, _AMOUNTS, 0.01, "relative RMSE", skewed=True, cosine=True),
    "critic": Trial(_made(amounts, law="critic"), 4000, 0.5, _AMOUNTS, 0.01, "relative RMSE", skewed=True, cosine=True),
    "rare critic": Trial(
        _made(amounts, law="rare"), 4000, 0.5, _AMOUNTS, 0.02, "relative RMSE", skewed=True, cosine=True
    ),
    "symmetric amounts": Trial(
        _made(amounts, law="symmetric"), 2000, 1.0, _AMOUNTS, 0.01, "relative RMSE", cosine=True
    ),
    "zipf": Trial(zipf, 2000, 0.25, _SMALL, 0.003, "nats", skewed=True),
    "skewed line": Trial(_made(line, law="skewed"), 2000, 1.0, _SMALL, 0.01, "distance", skewed=True),
    "heavy line": Trial(_made(line, law="heavy"), 2000, 1.0, _SMALL, 0.01, "distance", robust=True),
    "language, radius 1": Trial(language, 400, 1.0, _LANGUAGE, 0.01, "nats", cosine=True),
    "language, radius 0.25": Trial(language, 400, 0.25, _LANGUAGE, 0.01, "nats", cosine=True),
    "language, radius 0.1": Trial(language, 400, 0.1, _LANGUAGE, 0.01, "nats", cosine=True),
    # The same by coordinates. The radii cut about as much as those of the norms: 1/sqrt(weights) of these, times a few.
    "digits by coordinates": Trial(digits, 1000, 0.01, _DIGITS, 0.005, "balanced error", coordinates=True),
    "spike by coordinates": Trial(
        _made(digits, spike=800), 1000, 0.01, _DIGITS, 0.01, "balanced error", coordinates=True
    ),
    "amounts by coordinates": Trial(
        amounts, 2000, 0.03, _AMOUNTS, 0.01, "relative RMSE", skewed=True, cosine=True, coordinates=True
    ),
    "symmetric by coordinates": Trial(
        _made(amounts, law="symmetric"), 2000, 0.03, _AMOUNTS, 0.01, "relative RMSE", cosine=True, coordinates=True
    ),
    "skewed line by coordinates": Trial(
        _made(line, law="skewed"), 2000, 0.3, _SMALL, 0.01, "distance", skewed=True, coordinates=True
    ),
    "heavy line by coordinates": Trial(
        _made(line, law="heavy"), 2000, 0.3, _SMALL, 0.01, "distance", robust=True, coordinates=True
    ),
}


# ---------------------------------------------------------------------------------------------------- running


Run = tuple[str, str, float, str, int]
"""Trial, optimizer, learning rate, method and seed."""


def run(trial: str, optimizer: str, rate: float, method: str, seed: int) -> dict[str, float]:
    """Train once."""
    torch.set_num_threads(1)
    setting = TRIALS[trial]
    problem = setting.make(seed)
    base = OPTIMIZERS[optimizer](problem.net.parameters(), rate)
    if METHODS[method] is not None:
        with warnings.catch_warnings():  # some of these are what carryclip warns of
            warnings.simplefilter("ignore", CarryClipWarning)
            UClip(base, setting.region, carry=METHODS[method], metrics_every=0)
    problem.net.train()
    for step in range(setting.steps):
        if setting.cosine:
            share = 0.55 + 0.45 * math.cos(math.pi * step / setting.steps)
            for group in base.param_groups:
                group["lr"] = rate * share
        base.zero_grad()
        problem.loss(step).backward()
        base.step()
    with torch.no_grad():
        found = problem.measure()
    return {name: value if math.isfinite(value) else math.inf for name, value in found.items()}


def _one(key: Run) -> tuple[Run, dict[str, float]]:
    return key, run(*key)


def _runs(names: list[str]) -> list[Run]:
    """All runs of some trials; seed by seed, so that a part of them is a fair part."""
    return [
        (name, optimizer, rate, method, seed)
        for seed in range(SEEDS)
        for name in names
        for optimizer, rates in TRIALS[name].rates.items()
        for rate in rates
        for method in METHODS
    ]


def _read() -> dict[Run, dict[str, float]]:
    if not RESULTS.is_file():
        return {}
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    return {(name, optimizer, rate, method, seed): found for name, optimizer, rate, method, seed, found in rows}


def _write(results: dict[Run, dict[str, float]]) -> None:
    """All runs in a file, line by line; the old one stays until the new one is whole."""
    lines = [json.dumps([*key, found]) for key, found in sorted(results.items())]
    part = RESULTS.with_suffix(".part")
    part.write_text('{"runs": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    part.replace(RESULTS)


def train(names: list[str], workers: int) -> None:
    """Make the runs that are missing, and keep each."""
    results = _read()
    missing = [key for key in _runs(names) if key not in results]
    begun = saved = time.monotonic()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for done, (key, found) in enumerate(pool.imap_unordered(_one, missing), 1):
            results[key] = found
            if time.monotonic() - saved > 30 or done == len(missing):
                saved = time.monotonic()
                _write(results)
                left = (saved - begun) / done * (len(missing) - done) / 60
                print(f"{done} of {len(missing)} runs, about {left:.0f} minutes left", flush=True)


# ---------------------------------------------------------------------------------------------------- judging


class Difference(NamedTuple):
    """How much better a method is than plain clipping, seed by seed: mean and half of its 95 % interval."""

    mean: float
    half: float

    @property
    def worse(self) -> bool:
        """Surely."""
        return self.mean + self.half < 0.0

    @property
    def better(self) -> bool:
        """Surely."""
        return self.mean - self.half > 0.0

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "diverged"
        return f"{self.mean:+.4f} ± {self.half:.4f}"


def errors(results: dict[Run, Any], trial: str, optimizer: str, rate: float, method: str) -> np.ndarray:
    """Of all seeds; empty if some are missing."""
    keys = [(trial, optimizer, rate, method, seed) for seed in range(SEEDS)]
    return np.array(
        [results[key]["error"] for key in keys if key in results] if all(k in results for k in keys) else []
    )


def best_rate(results: dict[Run, Any], trial: str, optimizer: str, method: str) -> float | None:
    """The learning rate with the smallest mean error."""
    means = {rate: errors(results, trial, optimizer, rate, method) for rate in TRIALS[trial].rates[optimizer]}
    if any(not len(found) for found in means.values()):
        return None
    return min(means, key=lambda rate: float(means[rate].mean()))


def difference(base: np.ndarray, other: np.ndarray) -> Difference:
    """Seed by seed."""
    if not np.isfinite(other).all():
        return Difference(-math.inf, 0.0)
    gain = base - other
    return Difference(float(gain.mean()), float(T95[len(gain)] * gain.std(ddof=1) / math.sqrt(len(gain))))


class Line(NamedTuple):
    """One trial with one optimizer."""

    trial: str
    optimizer: str
    rate: float
    clip: float
    """Plain clipping's error."""
    same: dict[str, Difference]
    """Each method at plain clipping's best rate."""
    own: dict[str, Difference]
    """Each at its own best rate."""
    totals: dict[str, float]
    """What is predicted in all, by the truth, at plain clipping's best rate."""


def lines(results: dict[Run, Any]) -> list[Line]:
    """All trials that have run to their end."""
    found = []
    for trial, setting in TRIALS.items():
        for optimizer in setting.rates:
            rate = best_rate(results, trial, optimizer, "clip")
            if rate is None:
                continue
            base = errors(results, trial, optimizer, rate, "clip")
            same, own, totals = {}, {}, {}
            for method in METHODS:
                mine = best_rate(results, trial, optimizer, method)
                if mine is None:
                    continue
                same[method] = difference(base, errors(results, trial, optimizer, rate, method))
                own[method] = difference(base, errors(results, trial, optimizer, mine, method))
                seen = [results[trial, optimizer, rate, method, seed].get("total") for seed in range(SEEDS)]
                if seen[0] is not None:
                    totals[method] = float(np.mean(seen))
            found.append(Line(trial, optimizer, rate, float(base.mean()), same, own, totals))
    return found


def harms(found: list[Line], method: str) -> list[Line]:
    """The lines where a method is surely worse than plain clipping by more than anybody would notice."""
    bad = []
    for line in found:
        setting, seen = TRIALS[line.trial], line.same.get(method)
        if seen is not None and seen.worse and -seen.mean > setting.notice and not setting.robust:
            bad.append(line)
    return bad


def won_back(found: list[Line], method: str) -> float:
    """The mean part of plain clipping's error that a method removes where clipping is biased by construction."""
    parts = [line.same[method].mean / line.clip for line in found if TRIALS[line.trial].skewed and method in line.same]
    return float(np.mean([max(part, -1.0) for part in parts])) if parts else math.nan


def tables(results: dict[Run, Any]) -> str:
    """The tables, and what the rule picks, as Markdown."""
    found = lines(results)
    return "\n\n".join([_differences(found), _totals(found), _choice(found)])


def _differences(found: list[Line]) -> str:
    names = [method for method in METHODS if method != "clip"]
    rows = [
        "How much less error than plain clipping, at the learning rate that serves plain clipping best; behind it, "
        "each at its own best rate. Bold: surely better or worse.",
        "",
        f"| trial (radius, judged by) | optimizer | rate | plain clipping | {' | '.join(names)} |",
        f"|{'---|' * (4 + len(names))}",
    ]
    for line in found:
        cells = []
        for name in names:
            same, own = line.same[name], line.own[name]
            mark = "**" if same.better or same.worse else ""
            other = f"{own.mean:+.3f}" if math.isfinite(own.mean) else "diverged"
            cells.append(f"{mark}{same}{mark} ({other})")
        setting = TRIALS[line.trial]
        first = f"{line.trial.split(', radius')[0]} ({setting.radius:g}, {setting.unit})"
        rows.append(f"| {first} | {line.optimizer} | {line.rate:g} | {line.clip:.4f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _totals(found: list[Line]) -> str:
    rows = [
        "What is predicted in all, divided by the truth, at the same rate:",
        "",
        f"| trial | optimizer | {' | '.join(METHODS)} |",
        f"|{'---|' * (2 + len(METHODS))}",
    ]
    for line in found:
        if line.totals:
            cells = [f"{line.totals[name]:.2f}" for name in METHODS]
            rows.append(f"| {line.trial} | {line.optimizer} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _choice(found: list[Line]) -> str:
    rows, safe = ["By the rule:", ""], {}
    for name in METHODS:
        if name == "clip":
            continue
        bad = harms(found, name)
        where = "; ".join(f"{line.trial} ({line.optimizer})" for line in bad)
        rows.append(
            f"- `{name}`: surely worse in {len(bad)} of {len(found)} lines{' (' + where + ')' if bad else ''}; removes "
            f"{won_back(found, name):.0%} of plain clipping's error where that is biased."
        )
        if not bad and name != "none":
            safe[name] = won_back(found, name)
    if safe:
        rows += ["", f"So the default is `{max(safe, key=lambda name: safe[name])}()`."]
    return "\n".join(rows)


PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "totals.svg"
SHOWN = {
    "amounts": "amounts, 85 % of which are 0",
    "critic": "a critic: 2 returns in 100 are large",
    "rare critic": "a critic: 4 returns in 1,000 are large",
    "symmetric amounts": "control: the amounts' mean with symmetric noise",
}
"""Trials whose totals are drawn, in words."""
LOOKS = {
    "none": ("no clipping", "#4d4d4d", "o"),
    "clip": ("plain clipping", "#d55e00", "s"),
    "Shrunk": ("default carry", "#0072b2", "^"),
}


def draw(results: dict[Run, Any]) -> None:
    """What networks predict in all, by the truth, with AdamW at plain clipping's best rate: the picture of README."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    found = {line.trial: line for line in lines(results) if line.optimizer == "AdamW" and line.trial in SHOWN}
    figure, axis = plt.subplots(figsize=(7.2, 2.4), layout="constrained")
    axis.axvline(1.0, color="0.6", linewidth=1.0)
    for place, trial in enumerate(reversed(SHOWN)):
        totals = found[trial].totals
        axis.plot([min(totals[name] for name in LOOKS), max(totals[name] for name in LOOKS)], [place] * 2, color="0.85")
        told: list[float] = []
        for name, (label, color, marker) in LOOKS.items():
            axis.plot(totals[name], place, marker, color=color, markersize=8, label=label if place == 0 else None)
            offset = (0, -15) if name == "none" else (0, 9)
            at = {"xytext": offset, "textcoords": "offset points", "ha": "center", "fontsize": 7, "color": color}
            if all(abs(totals[name] - other) > 0.02 for other in told):  # numbers that fall together are told once
                axis.annotate(f"{totals[name]:.2f}", (totals[name], place), **at)
            told.append(totals[name])
    axis.set_yticks(range(len(SHOWN)), list(reversed(SHOWN.values())))
    axis.set(xlim=(-0.05, 1.2), ylim=(-0.6, len(SHOWN) - 0.4), xlabel="total predicted, divided by the truth (AdamW)")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "totals"}):
        figure.savefig(PICTURE, metadata={"Date": None})
    plt.close(figure)


def write_page(results: dict[Run, Any]) -> str:
    """The page with fresh tables."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    _, _, after = rest.partition(END)
    return f"{before}{MARK}\n\n{tables(results)}\n\n{END}{after}"


def main() -> None:
    """Run, then show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="trials whose names contain one of these words")
    parser.add_argument("--list", action="store_true", help="list the trials")
    parser.add_argument("--show", action="store_true", help="run nothing, only print the tables")
    parser.add_argument("--write", action="store_true", help="run nothing, only fill docs/carry.md with the tables")
    parser.add_argument("--draw", action="store_true", help="run nothing, only draw docs/figures/totals.svg")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    given = parser.parse_args()
    names = [name for name in TRIALS if given.only is None or any(word in name for word in given.only)]
    if given.list:
        for name in names:
            print(f"{name}: {len(_runs([name]))} runs of {TRIALS[name].steps} steps; judged by {TRIALS[name].unit}")
        return
    if given.write:
        PAGE.write_text(write_page(_read()), encoding="utf-8")
        return
    if given.draw:
        draw(_read())
        return
    if not given.show:
        train(names, given.workers)
    print(tables(_read()))


if __name__ == "__main__":
    main()
