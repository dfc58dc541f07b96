"""A store with made-up results, to see whether the reading side keeps pace with the paper's 30,750 runs.

    python benchmarks/synthetic_store.py                       # time status, all figures and the report
    python benchmarks/synthetic_store.py --out DIR             # and keep what was written
    python benchmarks/synthetic_store.py --study digits-smoke  # another study

The numbers are drawn at random around plausible ones and mean nothing: no claim can be judged by them.
"""

import argparse
import json
import math
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np

from carryclip_lab.analysis.naming import region_name
from carryclip_lab.analysis.summary import summaries
from carryclip_lab.figures import FIGURES, draw
from carryclip_lab.grid import Study, load
from carryclip_lab.report.build import build
from carryclip_lab.spec import Spec
from carryclip_lab.store.store import Store

ENVIRONMENT = json.dumps({"carryclip": "0.1.0", "device": "made up", "python": "3.11", "torch": "2.13.0"})
BEST_RATE = {"sgd": 0.05, "momentum": 0.01, "adam": 0.001}
PACE = {"sgd": 1.0, "momentum": 0.7, "adam": 0.6}


def fill(store: Store, study: Study, *, share: float = 1.0, seed: int = 0) -> None:
    """Add a study with made-up results for the first ``share`` of its runs."""
    store.add(study)
    chance = np.random.default_rng(seed)
    done, epochs = [], []
    for spec in study.specs[: round(share * len(study.specs))]:
        run = spec.id
        outcome, reached, message = _ending(spec, chance)
        last = reached or spec.epochs
        done.append((outcome, reached, 2.5 * last, message, ENVIRONMENT, run))
        epochs += _epochs(run, spec, last, chance)
    with sqlite3.connect(store.path) as db:
        db.executemany(
            "UPDATE runs SET state = 'done', outcome = ?, reached = ?, seconds = ?, message = ?, environment = ? "
            "WHERE id = ?",
            done,
        )
        db.executemany(f"INSERT OR REPLACE INTO epochs VALUES ({', '.join('?' * 12)})", epochs)
    db.close()


def _ending(spec: Spec, chance: np.random.Generator) -> tuple[str, int | None, str | None]:
    """How a run ended: faster near the best learning rate, with small radii at small batches, slower at large ones."""
    luck = chance.random()
    if luck < 0.0005:
        return "crashed", None, "RuntimeError: made up, to see how a crash is shown"
    off = math.log10(spec.lr / (BEST_RATE[spec.optimizer] * math.sqrt(spec.batch / 50)))
    if off > 1.2 + 0.3 * chance.standard_normal() and spec.region is None:
        return "diverged", None, None
    pace = PACE[spec.optimizer] * 8 * math.exp(1.1 * off * off) * (1 + 20 / spec.batch) ** 0.3
    expected = pace * (1 + spec.batch / 150) ** 0.65 * _effect(spec)
    needed = expected * math.exp(0.08 * chance.standard_normal())
    return ("reached", max(1, round(needed)), None) if needed <= spec.epochs else ("not_reached", None, None)


def _effect(spec: Spec) -> float:
    name = region_name(spec.region)
    if name.kind == "none":
        return 1.0
    if name.kind in ("Welford", "EWMA"):
        never = name.kind == "Welford" and name.sizes == (2.0, 0.0) and spec.carry == "full"
        return math.inf if never else 1.02 if spec.carry == "full" else 1.15
    strength = 1 / (1 + name.sizes[0]) * (1.0 if name.kind == "norm" else 0.3)
    if spec.batch <= 100:
        return 1 - (0.5 if spec.carry == "full" else 0.25) * strength
    return 1 + {"full": 1.2, "none": 0.05}.get(spec.carry, 0.2) * strength * math.log10(spec.batch / 50)


def _epochs(run: str, spec: Spec, last: int, chance: np.random.Generator) -> list[tuple]:
    """A handful of epochs of a run."""
    rows = []
    for epoch in sorted({1, 2, max(1, last // 4), max(1, last // 2), max(1, 3 * last // 4), last}):
        part = epoch / last
        accuracy = 1 - 0.9 * 0.011**part
        noise = chance.lognormal(0.0, 0.15, 3)
        clipped = spec.region is not None
        carried = clipped and spec.carry != "none"
        norms = (2.0 * (1 - 0.7 * part) * noise[0], 4.0 * part * (1.2 - part) * noise[1] if carried else None)
        feed = 0.4 * noise[2] * (1 - part) if carried else None
        radius, fraction = (0.5, 0.6 * (1 - part)) if clipped else (None, None)
        rows.append(
            (run, epoch, 2.3 * (1 - accuracy) + 0.02, accuracy, accuracy, 0.7, *norms, radius, fraction, feed, 2.5)
        )
    return rows


def measure(study: str, folder: Path) -> None:
    """Time what stands between a full store and its report."""
    with Store(folder / "runs.sqlite") as store:
        clock = _Clock()
        fill(store, load(study))
        clock.lap("made the store")
        progress = store.progress(study)
        clock.lap(f"status ({progress.total():,} runs)")
        parts = summaries(store, study)
        clock.lap("summary")
        for name in FIGURES:
            drawn = [draw(name, summary) for summary in parts]
            clock.lap(f"figure {name}" + ("" if any(drawn) else " (nothing to show)"))
        clock = _Clock()
        path = build(store, [study], folder / "report")
        clock.lap("whole report: summary, verdicts, figures as SVG, PDF and PNG, page")
        print(f"{path.stat().st_size / 1e6:.1f} MB {path.name}")


class _Clock:
    """Says what each step took: on the wall, and of the processor, which counts where other programs run too."""

    def __init__(self) -> None:
        self.last = time.perf_counter(), time.process_time()

    def lap(self, what: str) -> None:
        now = time.perf_counter(), time.process_time()
        wall, work = (after - before for after, before in zip(now, self.last, strict=True))
        print(f"{wall:7.2f} s  {work:7.2f} s CPU  {what}", flush=True)
        self.last = now


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--study", default="cifar10-paper")
    parser.add_argument("--out")
    given = parser.parse_args()
    if given.out:
        Path(given.out).mkdir(parents=True, exist_ok=True)
        measure(given.study, Path(given.out))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            measure(given.study, Path(scratch))
