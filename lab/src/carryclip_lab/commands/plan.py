"""The command behind ``carryclip plan``: what studies cost on this machine, before anything starts."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from carryclip_lab import grid
from carryclip_lab.commands.output import complain
from carryclip_lab.data.unpack import DataError
from carryclip_lab.engine import cost
from carryclip_lab.engine.settings import Options
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.records import duration
from carryclip_lab.store.store import Store


def ask(
    what: Sequence[str],
    *,
    tier: str | None,
    store: str,
    workers: int | None,
    threads: int,
    device: str,
    data: str | None,
    images_per_second: float | None,
) -> int:
    """Find the studies and plan them."""
    from carryclip_lab.commands.reproduce import InputError, check_options, studies, with_text

    console = Console()
    try:
        check_options(Options(workers=workers, threads=threads, device=device))
        if images_per_second is not None and not images_per_second > 0:
            raise InputError(f"--images-per-second must be above 0, got {images_per_second:g}.")
        chosen = _with_sizes(studies(what or ([] if tier else grid.names()), tier), data, console)
        chosen = _at_hand(with_text(chosen, data), data, console)
        if not chosen:
            return 2
        typed = " ".join([*what, *(["--tier", tier] if tier else [])]) or "STUDY"
        if any("imagenet" in study.tasks and study.tier != "smoke" for study in chosen):
            typed += f" --data {data or 'DIR'}"
        elsewhere = images_per_second is not None  # where nothing is known of its cores
        workers = workers or (1 if elsewhere else default_workers(threads, device))
        given = {"store": store, "workers": workers, "threads": threads, "device": device, "data": data}
        return main(chosen, typed, **given, images_per_second=images_per_second)
    except (ValueError, StoreError, DataError) as error:
        complain(console, error)
        return 2


def _with_sizes(chosen: Sequence[grid.Study], data: str | None, console: Console) -> list[grid.Study]:
    """Studies of images with the size of the folder that will be used; those of an unknown size are left out."""
    found = []
    for study in chosen:
        if "imagenet" not in study.tasks or (study.tier == "paper" and data is None):
            found.append(study)
        elif data is not None:
            from carryclip_lab.imagenet.folder import look_through

            found.append(study.with_settings("imagenet", look_through(data).settings))
        elif study.tier == "smoke":
            from carryclip_lab.imagenet import made

            found.append(study.with_settings("imagenet", made.settings()))
        else:
            console.print(f"{study.name} depends on the images: say --data DIR.", highlight=False, markup=False)
    return found


def _at_hand(chosen: Sequence[grid.Study], data: str | None, console: Console) -> list[grid.Study]:
    """Those whose data are here, as steps are timed on them; the others are named, with what to do."""
    from carryclip_lab.commands.reproduce import check_data

    found = []
    for study in chosen:
        try:
            check_data(study.specs, data)
            found.append(study)
        except DataError as error:
            console.print(f"{study.name} is left out. {error}", highlight=False, markup=False)
    return found


def main(
    chosen: Sequence[grid.Study],
    typed: str,
    *,
    store: str,
    workers: int,
    threads: int,
    device: str,
    data: str | None = None,
    images_per_second: float | None = None,
) -> int:
    """Measure, and print a table."""
    from carryclip_lab.engine.calibration import calibrate

    console = Console()
    begun = time.perf_counter()
    specs = [spec for study in chosen for spec in study.specs]
    images = [spec for spec in specs if spec.task == "imagenet"]
    with console.status("Timing a few steps of everything ..."):
        if images_per_second is not None:
            specs = [spec for spec in specs if spec.task != "imagenet"]
        rates: dict[str, Any] = calibrate(specs, workers, threads, device, data) if specs else {}
        if images and images_per_second is not None:
            keys = {cost.Throughput.key(spec) for spec in images}
            rates["imagenet"] = cost.Throughput(dict.fromkeys(keys, images_per_second))
    where = "On this machine" if specs else f"At {images_per_second:,.0f} images/s"
    how = f"{workers} worker(s) of {threads} thread(s), {device}" if specs else f"{workers} run(s) at a time"
    table = Table(title=f"{where}: {how}", title_justify="left")
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
    for line in _said_of_images(images, rates.get("imagenet"), images_per_second):
        console.print(line, highlight=False, markup=False)
    for line in _said_of_epochs(chosen):
        console.print(line, highlight=False, markup=False)
    spent = f"Measured in {time.perf_counter() - begun:.0f} s. " if specs else ""
    console.print(f"{spent}To go ahead: carryclip reproduce {typed}", highlight=False, markup=False)
    return 0


def _said_of_epochs(chosen: Sequence[grid.Study]) -> list[str]:
    """Where the expected time comes from, for studies whose runs can stop before their last epoch."""
    known = {
        study.name: any(typical < spec.epochs for spec, typical in zip(study.specs, study.typical, strict=True))
        for study in chosen
        if any(spec.target is not None for spec in study.specs)
    }
    lines = []
    if any(known.values()):
        said = "Expected: each run stops at its target after as many epochs as is typical of the study."
        lines.append(f"{said} At most: none does.")
    if unknown := ", ".join(name for name, typical in known.items() if not typical):
        lines.append(f"Nothing is known of when runs of {unknown} stop: both times are for all their epochs.")
    return lines


def _said_of_images(images: Sequence[cost.Spec], found: Any, given: float | None) -> list[str]:
    """What the price of ImageNet rests on."""
    if not images:
        return []
    if given is not None:
        return [
            f"ImageNet: priced at {given:,.0f} images/s for each run, as you gave it, not measured here. An image that "
            "is only evaluated counts a third."
        ]
    rates = {key: found.rates[key] for key in map(cost.Throughput.key, images)}
    told = ", ".join(f"{net} at {side} pixels {rate:,.1f}" for (net, side, *_), rate in rates.items())
    return [
        f"ImageNet: measured here on made-up pixels, so that reading files comes on top if it is slower; images/s of "
        f"each worker: {told}. For another machine: --images-per-second N"
    ]


def estimate(pairs: Sequence[tuple[cost.Spec, float]], rates: dict[str, Any], workers: int) -> float:
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
