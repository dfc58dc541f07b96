"""The command behind ``carryclip plan``: what studies cost on this machine, before anything starts."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from carryclip_lab import grid
from carryclip_lab.checks import UserError
from carryclip_lab.commands.output import many, tells_errors
from carryclip_lab.data.unpack import DataError
from carryclip_lab.engine import cost
from carryclip_lab.engine.settings import Options
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import duration
from carryclip_lab.store.store import Store
from carryclip_lab.task import Place, find


@tells_errors
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
    as_json: bool = False,
) -> int:
    """Find the studies and plan them."""
    from carryclip_lab.commands.reproduce import InputError, check_options, studies

    console = Console(stderr=as_json)  # what is no JSON goes elsewhere
    try:
        check_options(Options(workers=workers, threads=threads, device=device))
        if images_per_second is not None and not images_per_second > 0:
            raise InputError(f"--images-per-second must be above 0, got {images_per_second:g}.")
        chosen = _at_hand(studies(what or ([] if tier else grid.names()), tier), data, console)
        if not chosen:
            return 2
        typed = " ".join([*what, *(["--tier", tier] if tier else [])]) or "STUDY"
        for needs in {find(task).needs for study in chosen if study.tier != "smoke" for task in study.tasks} - {""}:
            typed += f" {needs}" if data is None else f" {needs.split()[0]} {data}"
        given = Options(
            # One at a time on a machine of whose cores nothing is known.
            workers=workers or (1 if images_per_second is not None else default_workers(threads, device)),
            threads=threads,
            device=device,
            data=data,
        )
        return _tell(chosen, typed, store, given, images_per_second, console, as_json=as_json)
    except ValueError as error:
        raise UserError(error) from None


def _at_hand(chosen: Sequence[grid.Study], data: str | None, console: Console) -> list[grid.Study]:
    """Those whose data are here, as steps are timed on them; the others are named, with what to do."""
    found = []
    for study in chosen:
        known = study.with_data(data, make=False)
        if known is None:
            needs = " ".join({find(task).needs for task in study.tasks})
            console.print(f"{study.name} depends on the images: say {needs}.", highlight=False, markup=False)
            continue
        try:
            for task in {spec.task: spec.recipe for spec in known.specs}.values():
                task.at_hand(data)
            found.append(known)
        except DataError as error:
            console.print(f"{study.name} is left out. {error}", highlight=False, markup=False)
    return found


def _tell(
    chosen: Sequence[grid.Study],
    typed: str,
    store: str,
    options: Options,
    images_per_second: float | None,
    console: Console,
    *,
    as_json: bool,
) -> int:
    """Measure, and print a table."""
    from carryclip_lab.engine.calibration import calibrate
    from carryclip_lab.engine.display import Timings

    workers, threads, device = options.workers or 1, options.threads, options.device
    begun = time.perf_counter()
    specs = [spec for study in chosen for spec in study.specs]
    images = [spec for spec in specs if find(spec.task).lasting]
    with Timings(Console(stderr=True)) as tell:
        if images_per_second is not None:
            specs = [spec for spec in specs if not find(spec.task).lasting]
        rates = calibrate(specs, workers, threads, Place(device, options.data), tell) if specs else {}
        if images and images_per_second is not None:
            rates[images[0].task] = cost.priced(images, images_per_second)
    where = "On this machine" if specs else f"At {images_per_second:,.0f} images/s"
    how = f"{many(workers, 'worker')} of {many(threads, 'thread')}, {device}"
    how = how if specs else f"{many(workers, 'run')} at a time"
    rows = [_row(study, store, rates, workers) for study in chosen]
    if as_json:
        print(json.dumps({"workers": workers, "threads": threads, "device": device, "studies": rows}, indent=1))
        return 0
    table = Table(title=f"{where}: {how}", title_justify="left")
    for column in ("study", "tier", "runs", "done", "steps", "expected", "at most"):
        table.add_column(column, justify="left" if column in ("study", "tier") else "right", no_wrap=True)
    for row in rows:
        times = duration(row["expected_seconds"]), duration(row["at_most_seconds"])
        table.add_row(row["study"], row["tier"], f"{row['runs']:,}", f"{row['done']:,}", said(row["steps"]), *times)
    console.print(table)
    for line in _said_of_images(images, rates, images_per_second):
        console.print(line, highlight=False, markup=False)
    for line in _said_of_epochs(chosen):
        console.print(line, highlight=False, markup=False)
    spent = f"Measured in {time.perf_counter() - begun:.0f} s. " if specs else ""
    console.print(f"{spent}To go ahead: carryclip reproduce {typed}", highlight=False, markup=False)
    return 0


def _row(study: grid.Study, store: str, rates: dict[str, cost.Rates], workers: int) -> dict[str, Any]:
    """What is left of a study, and how long that takes."""
    done = finished(study, store)
    left = [pair for pair in zip(study.specs, study.typical, strict=True) if pair[0].id not in done]
    longest = [(spec, float(spec.epochs)) for spec, _ in left]
    expected, most = (estimate(pairs, rates, workers) for pairs in (left, longest))
    about = {"study": study.name, "tier": study.tier, "runs": len(study.specs), "done": len(done)}
    steps = round(sum(spec.recipe.epoch(spec)[0] * epochs for spec, epochs in left))
    return {**about, "steps": steps, "expected_seconds": expected, "at_most_seconds": most}


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


def _said_of_images(images: Sequence[Spec], rates: dict[str, cost.Rates], given: float | None) -> list[str]:
    """What the price of runs that take days rests on."""
    if not images:
        return []
    name = images[0].recipe.name
    if given is not None:
        return [
            f"{name}: priced at {given:,.0f} images/s for each run, as you gave it, not measured here. An image that "
            "is only evaluated counts a third."
        ]
    found = {}
    for spec in images:
        seconds = rates[spec.task].step[spec.batch, cost.data_of(spec)]
        found[f"{spec.recipe.net} at {spec.recipe.image} pixels {spec.batch / seconds:,.1f}"] = None
    return [
        f"{name}: measured here on made-up pixels, so that reading files comes on top if it is slower; images/s of "
        f"each worker: {', '.join(found)}. For another machine: --images-per-second N"
    ]


def estimate(pairs: Sequence[tuple[Spec, float]], rates: dict[str, cost.Rates], workers: int) -> float:
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
