"""The command behind ``carryclip reproduce``: figures of the theory and studies by name, by tier or from a file."""

import importlib.util
import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from carryclip_lab import grid
from carryclip_lab import task as tasks
from carryclip_lab.checks import UserError, check_keys
from carryclip_lab.commands.output import make_folder, tells_errors
from carryclip_lab.commands.studies import known, none_left
from carryclip_lab.engine.owners import free_the_dead
from carryclip_lab.engine.settings import Options, Setting
from carryclip_lab.spec import FIELDS, parse
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.store import Store


class InputError(UserError):
    """Something on the command line that cannot be meant."""


def studies(what: Sequence[str], tier: str | None) -> list[grid.Study]:
    """The studies that are named or have the tier, each once."""
    tiers = ("smoke", "small", "paper")
    if tier is not None and tier not in tiers:
        raise InputError(f"There is no tier {tier!r}; there are {', '.join(tiers)}.")
    families = {name for name in what if name in grid.families()}
    named = [grid.load(known(name)) for name in dict.fromkeys(what) if name not in families]
    shipped = [grid.load(name) for name in grid.names() if not families or name.partition("-")[0] in families]
    tiered = [study for study in shipped if study.tier == tier] if tier else []
    if families and not tier:
        offered = ", ".join(f"{study.name} (--tier {study.tier})" for study in shipped)
        raise InputError(f"Of which size? There are {offered}.")
    chosen = list({study.name: study for study in (*named, *tiered)}.values())
    if not chosen:
        there = ", ".join(grid.names())
        raise InputError(f'Which study? There are {there}; or --tier smoke, or a .toml file. Or "theory" for figures.')
    return chosen


def restriction(only: Sequence[str], chosen: Sequence[grid.Study] = ()) -> dict[str, set[str]]:
    """``["optimizer=sgd,adam", "batch=50"]`` as a mapping from field to wanted values."""
    wanted: dict[str, set[str]] = {}
    own = {name: value for task in {*tasks.names(), *_tasks_of(chosen)} for name, value in tasks.settings(task).items()}
    for each in only:
        key, equals, values = each.partition("=")
        if not equals or not values:
            raise InputError(f"--only wants field=value, such as optimizer=sgd,adam; got {each!r}.")
        check_keys("--only", {key: values}, [*FIELDS, *own])
        wanted.setdefault(key, set()).update(_canonical(key, value.strip(), own) for value in _split(values))
    return wanted


def _tasks_of(chosen: Sequence[grid.Study]) -> set[str]:
    return {task for study in chosen for task in study.tasks}


def _split(values: str) -> list[str]:
    """At commas, but not at those inside parentheses."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _canonical(key: str, value: str, own: dict[str, Any]) -> str:
    """A value as a spec would have it, for comparing."""
    try:
        if key in ("lr", "target") or isinstance(own.get(key), float):
            return str(float(value))
        if key in ("region", "carry") and "(" in value:
            return repr(parse(value))
    except ValueError as error:
        raise InputError(f"--only {key}: {error}") from None
    return value


@tells_errors
def main(
    what: Sequence[str],
    *,
    tier: str | None,
    only: Sequence[str],
    options: Options,
    store: str,
    resume: bool,
    out: str,
    retry: bool = False,
    theory: str | None = None,
) -> int:
    """Run studies and build the report."""
    console = Console()
    team: Any = None
    try:
        chosen = studies(what, tier)
        wanted = restriction(only, chosen)
        check_options(options)
        setting, team = _gathered(chosen, options)
        if team is not None and not team.leads:
            return _follow(Path(store), setting, team)
        chosen = with_data(chosen, wanted, setting, console)
        _check(chosen, wanted, setting, theory, processes=1 if team is None else team.size)
    except (ValueError, UserError) as error:
        if team is not None:
            team.told(None)  # the others may go home
        raise UserError(error) from None
    path = Path(store)
    make_folder(out)
    make_folder(path.parent)
    from carryclip_lab.engine.supervise import supervise

    try:
        if not resume:
            _set_aside(path, console)
        code = supervise(chosen, path, setting, console, wanted, retry=retry, team=team)
    except (sqlite3.Error, ValueError, ConnectionError) as error:
        raise UserError(error) from None
    if code == 130:
        return code
    from carryclip_lab.analysis.summary import runs_of, summaries
    from carryclip_lab.commands.terminal import table, verdicts
    from carryclip_lab.report.build import main as report

    with Store(path) as opened:
        for summary in (each for study in chosen for each in summaries(opened, study.name)):
            if runs_of(summary.cells)[0]:
                console.print(table(summary, console.width))
        for study in chosen:
            for said in verdicts(opened, study.name, study.rules):
                console.print(said, highlight=False, markup=False)
    return report(store, [study.name for study in chosen], out, theory) or code


def _gathered(chosen: Sequence[grid.Study], options: Options) -> tuple[Setting, Any]:
    """Options as they are meant, and the processes that work together, if torchrun has started some."""
    beside = {str(Path(study.folder)) for study in chosen if study.folder is not None}
    setting = Setting(**vars(options), paths=tuple(sorted(beside)))
    if options.data is None and all(study.tier == "smoke" for study in chosen):
        made = {folder for task in _tasks_of(chosen) if (folder := tasks.find(task).own_data())}
        setting = replace(setting, data=next(iter(made), None))
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return setting, None
    others = {task for task in _tasks_of(chosen) if not tasks.find(task).joint}
    if others:
        raise InputError(f"torchrun is for imagenet; {', '.join(sorted(others))} runs in workers, without it.")
    if options.timeout is not None:
        raise InputError("--timeout is for workers, and torchrun has none: leave it out.")
    if options.device not in ("cpu", "cuda"):
        raise InputError(
            f"Under torchrun each process takes the GPU of its number: --device cuda, not {options.device}."
        )
    check_device(options.device)
    from carryclip_lab.engine.team import join

    return setting, join(options.device)


def _follow(store: Path, setting: Setting, team: Any) -> int:
    from carryclip_lab.engine.supervise import setting_of
    from carryclip_lab.engine.together import follow

    return follow(setting_of(store, setting), team)


def with_data(
    chosen: Sequence[grid.Study], wanted: dict[str, set[str]], options: Options, console: Console
) -> list[grid.Study]:
    """Studies on the data that there are; those that need --data are left out without it, if there are others."""
    asked = chosen
    chosen = [study for study in asked if any(grid.matches(spec, wanted) for spec in study.specs)]
    if not chosen:
        raise InputError(none_left([spec for study in asked for spec in study.specs], wanted))
    found = []
    for study in chosen:
        known = study.with_data(options.data, make=True)
        kinds = [tasks.find(task) for task in study.tasks]
        needs = " ".join(sorted({kind.needs for kind in kinds} - {""}))
        if known is not None:
            found.append(known)
            if needs and options.data:
                console.print(f"{known.specs[0].recipe.data_name(None)}.", highlight=False, markup=False)
        elif study is chosen[-1] and not found:
            raise InputError(" ".join(kind.missing for kind in kinds))
        else:
            console.print(f"{study.name} is left out: it needs {needs}.", highlight=False, markup=False)
    return found


def _check(
    chosen: Sequence[grid.Study], wanted: dict[str, set[str]], options: Options, theory: str | None, *, processes: int
) -> None:
    """Before anything starts: is there something to do, and all that it needs? A run's failure is for good."""
    specs = [spec for study in chosen for spec in study.specs if grid.matches(spec, wanted)]
    if not specs:
        raise InputError(none_left([spec for study in chosen for spec in study.specs], wanted))
    if theory is not None and not (Path(theory) / "claims.json").is_file():
        raise InputError(
            f"{theory} has no figures of the theory; carryclip reproduce theory --out {theory} makes them."
        )
    for spec in specs:
        spec.recipe.check(spec, processes)
        if spec.recipe.lasting and not options.device.startswith(("cpu", "cuda")):
            raise InputError(f"{spec.task} trains on cpu or cuda, not on {options.device!r}.")
    for method in {spec.method for spec in specs if spec.method is not None}:
        tasks.load(method, "method")
    if options.engine == "ray" and importlib.util.find_spec("ray") is None:
        raise InputError('The cluster engine is an extra; in a clone: pip install "./lab[ray]"')
    if options.engine == "local" and processes == 1:  # the processes of a team have looked at theirs, and will
        for task in {(spec.task, spec.settings): spec.recipe for spec in specs}.values():
            task.at_hand(options.data)
        check_device(options.device)


def check_device(device: str) -> None:
    """Whether it is there."""
    if device != "cpu":
        import torch

        try:
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"Cannot train on {device!r} here: {str(error).splitlines()[0]}") from None


def _set_aside(path: Path, console: Console) -> None:
    """Begin anew without losing what there is."""
    if not path.exists():
        return
    with Store(path) as store:
        free_the_dead(store)
        if store.owners():
            raise StoreError(f"Someone is at work on {path}; stop that first, or choose another --store.")
    aside = path.with_name(f"{path.stem}-until-{time.strftime('%Y%m%d-%H%M%S')}{path.suffix}")
    for ending in ("", "-wal", "-shm", ".checkpoints", ".weights"):
        part = path.with_name(path.name + ending)
        if part.exists():
            part.rename(aside.with_name(aside.name + ending))
    console.print(f"The old store is now {aside}.", highlight=False)


def check_options(options: Options) -> None:
    """Numbers that can be meant."""
    for name in ("workers", "threads"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}.")
    for name in ("timeout", "memory"):
        if (value := getattr(options, name)) is not None and not value > 0.0:
            raise InputError(f"--{name} must be above 0, got {value:g}.")
    if options.gpus < 0.0 or (options.gpus > 1.0 and options.gpus != int(options.gpus)):
        raise InputError(f"--gpus must be a share of one or a whole number, got {options.gpus:g}.")
    if options.engine == "ray" and options.device != "cpu" and not options.gpus:
        raise InputError("Workers on a cluster get a GPU only if you say how much of one: --gpus 1, or --gpus 0.25.")
