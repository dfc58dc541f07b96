"""The command behind ``carryclip plan``: what studies cost on this machine, before anything starts."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from carryclip.experiments import cost, grid
from carryclip.experiments.database import StoreError
from carryclip.experiments.engine.settings import Options
from carryclip.experiments.output import complain
from carryclip.experiments.records import duration
from carryclip.experiments.store import Store


def ask(what: Sequence[str], *, tier: str | None, store: str, workers: int | None, threads: int, device: str) -> int:
    """Find the studies and plan them."""
    from carryclip.experiments.reproduce import check_options, studies

    try:
        check_options(Options(workers=workers, threads=threads, device=device))
        chosen = studies(what or ([] if tier else grid.names()), tier)
        typed = " ".join([*what, *(["--tier", tier] if tier else [])]) or "STUDY"
        workers = workers or default_workers(threads, device)
        return main(chosen, typed, store=store, workers=workers, threads=threads, device=device)
    except (ValueError, StoreError) as error:
        complain(Console(), error)
        return 2


def main(chosen: Sequence[grid.Study], typed: str, *, store: str, workers: int, threads: int, device: str) -> int:
    """Measure, and print a table."""
    from carryclip.experiments.calibration import calibrate
    from carryclip.experiments.data.cifar10 import DataError

    console = Console()
    begun = time.perf_counter()
    with console.status("Timing a few steps of everything ..."):
        try:
            rates = calibrate([spec for study in chosen for spec in study.specs], workers, threads, device)
        except DataError as error:
            complain(console, error)
            return 2
    table = Table(title=f"On this machine: {workers} worker(s) of {threads} thread(s), {device}", title_justify="left")
    for column in ("study", "tier", "runs", "done", "steps", "expected", "at most"):
        table.add_column(column, justify="left" if column in ("study", "tier") else "right")
    for study in chosen:
        done = finished(study, store)
        left = [pair for pair in zip(study.specs, study.typical, strict=True) if pair[0].id not in done]
        longest = [(spec, float(spec.epochs)) for spec, _ in left]
        expected, most = (estimate(pairs, rates, workers) for pairs in (left, longest))
        steps = sum(cost.steps_of(spec) * epochs for spec, epochs in left)
        runs = f"{len(study.specs):,}"
        table.add_row(study.name, study.tier, runs, f"{len(done):,}", said(steps), duration(expected), duration(most))
    console.print(table)
    console.print(
        f"Expected: each run stops at its target after as many epochs as is typical of the study. At most: none does. "
        f"Measured in {time.perf_counter() - begun:.0f} s.\n"
        f"To go ahead: carryclip reproduce {typed}",
        highlight=False,
        markup=False,
    )
    return 0


def estimate(pairs: Sequence[tuple[cost.Spec, float]], rates: dict[str, cost.Rates], workers: int) -> float:
    """Seconds for runs of so many epochs each, by workers that share them evenly but for the last."""
    if not pairs:
        return 0.0
    each = [rates[spec.task].seconds(spec, epochs) for spec, epochs in pairs]
    start = max(rates[spec.task].start for spec, _ in pairs)
    return start + max(sum(each) / min(workers, len(each)), max(each))


def finished(study: grid.Study, path: str) -> set[str]:
    """Ids of the study's runs that a store has done already."""
    if not Path(path).is_file():
        return set()
    with Store(path, create=False) as store:
        return store.done() & {spec.id for spec in study.specs}


def said(number: float) -> str:
    """A large number in a few characters."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"


def default_workers(threads: int = 1, device: str = "cpu") -> int:
    """As many as there are cores for; one for a GPU."""
    if device != "cpu":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // threads)
