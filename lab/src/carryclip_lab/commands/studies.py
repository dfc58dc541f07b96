"""The command behind ``carryclip studies``: what can be reproduced, and what ``--only`` can choose of it."""

import difflib
import json
import shlex
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from carryclip_lab import grid
from carryclip_lab.checks import UserError
from carryclip_lab.commands.output import many, tells_errors
from carryclip_lab.spec import Spec

SHOWN = 12
"""Of a field with more values than that, the first few are shown; all of them with --json."""


@tells_errors
def main(what: Sequence[str], *, as_json: bool) -> int:
    """List everything, or say what the named studies have."""
    console = Console()
    chosen = [_loaded(name) for name in (what or grid.names())]
    if as_json:
        told: dict[str, Any] = {"studies": [_as_data(study) for study in chosen]}
        if not what:
            told["figures"] = [{"name": name, "title": title} for name, title in figures().items()]
        print(json.dumps(told, indent=1, ensure_ascii=False))
        return 0
    if what:
        for study in chosen:
            console.print(_choices(study))
        said = f"A part of it: carryclip reproduce {shlex.quote(what[0])} --only field=value"
    else:
        console.print(_overview(chosen))
        console.print(_figures())
        said = "More of one: carryclip studies NAME. How long it takes: carryclip plan NAME."
    console.print(said, highlight=False, markup=False)
    return 0


def _loaded(name: str) -> grid.Study:
    try:
        return grid.load(known(name))
    except ValueError as error:
        raise UserError(error) from None


def known(name: str) -> str:
    """The name of a study, or of a file.

    Raises:
        UserError: nothing has the name; the message has the nearest that is, among figures too.
    """
    names = grid.names()
    if name.endswith(".toml") or name in names:
        return name
    if name in figures() or name == "theory":
        raise UserError(f"{name} is a figure of the theory, not a study: carryclip reproduce {name}, by itself.")
    near = difflib.get_close_matches(name, [*names, *grid.families(), "theory", *figures()], n=1)
    said = f"did you mean {near[0]!r}?" if near else "carryclip studies lists what there is."
    raise UserError(f"There is no study {name!r}; {said}")


def figures() -> dict[str, str]:
    """The theory's figures and their titles."""
    from carryclip_lab.theory_figures.main import ALONE, STUDIES

    return {name: study.title for name, study in (STUDIES | ALONE).items()}


def choices(specs: Sequence[Spec]) -> dict[str, list[Any]]:
    """The values of every field in which runs differ."""
    found: dict[str, dict[Any, None]] = {}
    for spec in specs:
        for field, value in spec.values.items():
            found.setdefault(field, {})[tuple(value) if isinstance(value, list) else value] = None
    return {field: list(values) for field, values in found.items() if len(values) > 1}


def none_left(specs: Sequence[Spec], only: dict[str, set[str]]) -> str:
    """Why ``--only`` leaves no run."""
    for field, wanted in only.items():
        there = list(dict.fromkeys(str(spec.values[field]) for spec in specs if field in spec.values))
        if wanted & set(there):
            continue
        near = difflib.get_close_matches(min(wanted), there, n=1)
        said = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_few(there))}."
        return f"No run is left by --only: none has {field} {', '.join(sorted(wanted))}; {said}"
    return "No run is left by --only: there are runs with each of these, but none with all of them."


def _as_data(study: grid.Study) -> dict[str, Any]:
    about = {"name": study.name, "title": study.title, "tier": study.tier, "runs": len(study.specs)}
    return {**about, "tasks": sorted(study.tasks), "choices": choices(study.specs)}


def _overview(chosen: Sequence[grid.Study]) -> Table:
    table = Table(title="Studies of training runs", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("study", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    table.add_column("runs", no_wrap=True, justify="right")
    table.add_column("what it is")
    for study in sorted(chosen, key=lambda study: (("smoke", "small", "paper").index(study.tier), study.name)):
        table.add_row(study.name, study.tier, f"{len(study.specs):,}", study.title)
    return table


def _figures() -> Table:
    title = 'Figures of the theory ("theory" for all but the last)'
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("what it shows")
    for name, shown in figures().items():
        table.add_row(name, shown)
    return table


def _choices(study: grid.Study) -> Table:
    title = f"{study.name} (tier {study.tier}, {many(len(study.specs), 'run')}): {study.title}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("field", no_wrap=True)
    table.add_column("values")
    for field, values in choices(study.specs).items():
        table.add_row(field, ", ".join(_few([str(value) for value in values])))
    return table


def _few(values: Sequence[str]) -> list[str]:
    more = [f"and {len(values) - SHOWN} more"] if len(values) > SHOWN else []
    return [*values[:SHOWN], *more]
