"""A radius that nobody chooses against the best of five that somebody did: trials of ``benchmarks/carries.py``.

    python benchmarks/radii.py            # run what is missing, about half an hour on one core, and print the table
    python benchmarks/radii.py --show     # only print it
    python benchmarks/radii.py --write    # put it into docs/radius.md

The rule, fixed before the runs were made. Constants and four rules clip a norm over all parameters, three rules one of
each row or tensor; all with the default carry. Each method has
its best learning rate, by the mean over seeds, and the constant is the best of five radii as well: what a person would
find who tried them all. A rule is *as good* where the 95 % interval of the difference (Student's, over seeds) reaches
0, or its mean loss is less than anybody would notice (``notice`` of each trial).
"""

import argparse
import json
import math
import multiprocessing
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from carries import OPTIMIZERS, TRIALS, Difference, difference

from carryclip import RMS, Average, CarryClipWarning, Norm, Quantile, ZScore
from carryclip.presets import adagc, agc
from carryclip.torch import UClip

RESULTS = Path(__file__).with_name("radii.json")
PAGE = Path(__file__).parents[1] / "docs" / "radius.md"
MARK, END = "<!-- radii: written by benchmarks/radii.py -->", "<!-- end of the table -->"
SEEDS = 3
CHOSEN = ("digits, radius 1", "amounts", "critic", "skewed line", "heavy line", "language, radius 1")
CONSTANTS = {f"{radius:g}": radius for radius in (0.1, 0.3, 1.0, 3.0, 10.0)}
OF_ALL = {
    "RMS(2)": RMS(2.0),
    "Quantile(0.9)": Quantile(0.9),
    "ZScore(2.5)": ZScore(2.5),
    "Average(1.05)": Average(1.05),
}
RULES = {name: Norm(radius) for name, radius in OF_ALL.items()} | {
    "RMS(2) of rows": Norm(RMS(2.0), over="row"),
    "adagc()": adagc(),
    "agc()": agc(),
}

Run = tuple[str, str, float, str, int]
"""Trial, optimizer, learning rate, radius and seed."""


def run(key: Run) -> tuple[Run, float]:
    """Train once, and return the error."""
    trial, optimizer, rate, radius, seed = key
    torch.set_num_threads(1)
    setting = TRIALS[trial]
    problem = setting.make(seed)
    base = OPTIMIZERS[optimizer](problem.net.parameters(), rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryClipWarning)
        UClip(base, RULES[radius] if radius in RULES else Norm(CONSTANTS[radius]), metrics_every=0)
    for step in range(setting.steps):
        if setting.cosine:
            share = 0.55 + 0.45 * math.cos(math.pi * step / setting.steps)
            for group in base.param_groups:
                group["lr"] = rate * share
        base.zero_grad()
        problem.loss(step).backward()
        base.step()
    with torch.no_grad():
        error = problem.measure()["error"]
    return key, error if math.isfinite(error) else math.inf


def runs() -> list[Run]:
    """All of them, seed by seed, so that a part of them is a fair part."""
    return [
        (trial, optimizer, rate, radius, seed)
        for seed in range(SEEDS)
        for trial in CHOSEN
        for optimizer in ("momentum", "AdamW")
        for rate in TRIALS[trial].rates[optimizer]
        for radius in (*CONSTANTS, *RULES)
    ]


def read() -> dict[Run, float]:
    """The errors that are known."""
    if not RESULTS.is_file():
        return {}
    return {(a, b, c, d, e): error for a, b, c, d, e, error in json.loads(RESULTS.read_text(encoding="utf-8"))}


def train(workers: int) -> None:
    """Make the runs that are missing, and keep each."""
    results = read()
    missing = [key for key in runs() if key not in results]
    begun = saved = time.monotonic()
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for done, (key, error) in enumerate(pool.imap_unordered(run, missing), 1):
            results[key] = error
            if time.monotonic() - saved > 30 or done == len(missing):
                saved = time.monotonic()
                rows = ",\n".join(json.dumps([*one, results[one]]) for one in sorted(results))
                RESULTS.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
                left = (saved - begun) / done * (len(missing) - done) / 60
                print(f"{done} of {len(missing)} runs, about {left:.0f} minutes left", flush=True)


def best(results: dict[Run, float], trial: str, optimizer: str, radii: Any) -> tuple[str, float, np.ndarray]:
    """(radius, learning rate, errors of all seeds) with the smallest mean."""
    found = []
    for radius in radii:
        for rate in TRIALS[trial].rates[optimizer]:
            errors = np.array([results[trial, optimizer, rate, radius, seed] for seed in range(SEEDS)])
            found.append((radius, rate, errors))
    return min(found, key=lambda each: float(each[2].mean()))


def as_good(trial: str, gain: Difference) -> bool:
    """Whether a rule is as good as the best constant."""
    return not gain.worse or -gain.mean <= TRIALS[trial].notice


def table(results: dict[Run, float]) -> str:
    """The table as Markdown, and how often each rule is as good."""
    names = list(RULES)
    rows = [
        "How much less error than the best of five constant radii; bold where a rule is not as good.",
        "",
        f"| trial (judged by) | optimizer | best constant | its error | {' | '.join(names)} |",
        f"|{'---|' * (4 + len(names))}",
    ]
    good = dict.fromkeys(names, 0)
    for trial in CHOSEN:
        for optimizer in ("momentum", "AdamW"):
            constant, _, base = best(results, trial, optimizer, CONSTANTS)
            cells = []
            for name in names:
                gain = difference(base, best(results, trial, optimizer, [name])[2])
                good[name] += as_good(trial, gain)
                mark = "" if as_good(trial, gain) else "**"
                cells.append(f"{mark}{gain}{mark}")
            label = f"{trial.split(', radius')[0]} ({TRIALS[trial].unit})"
            rows.append(f"| {label} | {optimizer} | {constant} | {base.mean():.4f} | {' | '.join(cells)} |")
    lines = 2 * len(CHOSEN)
    said = ", ".join(f"`{name}` in {count}" for name, count in good.items())
    return "\n".join([*rows, "", f"As good as the best constant: {said} of {lines} lines."])


def write_page(results: dict[Run, float]) -> str:
    """The page with a fresh table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    _, _, after = rest.partition(END)
    return f"{before}{MARK}\n\n{table(results)}\n\n{END}{after}"


def main() -> None:
    """Run, then show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--show", action="store_true", help="run nothing, only print the table")
    parser.add_argument("--write", action="store_true", help="run nothing, only fill docs/radius.md with the table")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    given = parser.parse_args()
    if given.write:
        PAGE.write_text(write_page(read()), encoding="utf-8")
        return
    if not given.show:
        train(given.workers)
    print(table(read()))


if __name__ == "__main__":
    main()
