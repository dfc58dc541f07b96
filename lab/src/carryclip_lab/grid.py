"""A study as data: a TOML file of grids, each the product of its lists."""

import itertools
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from carryclip_lab.checks import check_keys
from carryclip_lab.spec import FIELDS, Spec
from carryclip_lab.task import find, settings


@dataclass(frozen=True)
class Study:
    """A named set of runs.

    Attributes:
        name: short, for files and the command line.
        title: what it is.
        tier: ``"smoke"``, ``"small"`` or ``"paper"``.
        specs: every run once, in the order of the file.
        typical: epochs that each may be expected to take, for planning; by default all that it may take.
    """

    name: str
    title: str
    tier: str
    specs: tuple[Spec, ...]
    typical: tuple[float, ...] = ()
    folder: str | None = None
    """Where a study of one's own is, and what it names beside it."""
    file: str | None = None
    """Its file, as it was named on the command line."""
    rules: str | None = None
    """The file of ``rules/`` by which its results are judged, written before they were there."""

    def __post_init__(self) -> None:
        if not self.typical:
            object.__setattr__(self, "typical", tuple(float(spec.epochs) for spec in self.specs))

    @property
    def tasks(self) -> set[str]:
        """What is trained."""
        return {spec.task for spec in self.specs}

    def with_data(self, data: str | None, *, make: bool) -> "Study | None":
        """The same on the data that there are; None if a task has none. ``make`` what a task can make itself."""
        chosen = {task: find(task).found(data, self.tier, make=make) for task in sorted(self.tasks)}
        changed = []
        for spec in self.specs:
            found = chosen[spec.task]
            if found is None:
                return None
            changed.append(replace(spec, settings=(*spec.settings, *found.items())) if found else spec)
        return replace(self, specs=tuple(changed))


def load(source: str | Path) -> Study:
    """A study that ships (by name) or one of your own (by path).

    >>> study = load("cifar10-paper")
    >>> study.tier, len(study.specs)
    ('paper', 30750)
    """
    path = Path(source)
    if path.suffix == ".toml":
        if not path.is_file():
            raise ValueError(f"There is no study file {path}.")
        beside = str(path.resolve().parent)
        sys.path.extend(folder for folder in (beside, str(Path.cwd())) if folder not in sys.path)  # for one's own code
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}.") from None
        return replace(read(text, str(path)), folder=beside, file=str(source))
    known = names()
    if str(source) not in known:
        raise ValueError(f"There is no study {str(source)!r}; there are {', '.join(known)}, or give a .toml file.")
    return read((_folder() / f"{source}.toml").read_text(encoding="utf-8"), f"{source}.toml")


def names() -> list[str]:
    """The studies that ship."""
    return sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml"))


def rules_of(name: str) -> str | None:
    """The rules that a study that ships names, without making its runs."""
    if name not in names():
        return None
    return tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8")).get("rules")


def families() -> list[str]:
    """What studies that ship are about: the first word of their names."""
    return sorted({name.partition("-")[0] for name in names()})


def read(text: str, where: str) -> Study:
    """A study from TOML."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is no TOML: {error}.") from None
    check_keys(where, given, ["name", "title", "tier", "rules", "defaults", "methods", "grid"])
    for key in ("name", "tier", "grid"):
        if key not in given:
            raise ValueError(f"{where} lacks {key!r}.")
    if not isinstance(given["name"], str) or not given["name"]:
        raise ValueError(f"{where}: name must be a word, got {given['name']!r}.")
    if not isinstance(given["grid"], list) or not all(isinstance(grid, dict) for grid in given["grid"]):
        raise ValueError(f"{where}: a grid begins with [[grid]], in two pairs of brackets.")
    for key in ("defaults", "methods"):
        if not isinstance(given.get(key, {}), dict):
            raise ValueError(f"{where}: {key} must be a table, [{key}].")
    if given["tier"] not in ("smoke", "small", "paper"):
        raise ValueError(f"{where}: tier must be 'smoke', 'small' or 'paper', got {given['tier']!r}.")
    defaults = given.get("defaults", {})
    check_keys(f"{where}, defaults", defaults, [*_keys([defaults, *given["grid"]], where), "methods", "stage"])
    parts = [
        (stage, f"{where}, grid {number}", each)
        for number, grid in enumerate(given["grid"], 1)
        for stage, each in _with_methods({**defaults, **grid}, given.get("methods", {}), f"{where}, grid {number}")
    ]
    parts.sort(key=lambda part: part[0])  # as they are in the file within a stage
    runs = itertools.chain.from_iterable(_expanded(each, place) for _, place, each in parts)
    once = {}
    for spec, typical in runs:  # grids may overlap; a run stands where it comes first
        once.setdefault(spec, typical)
    title = given.get("title", given["name"])
    return Study(given["name"], title, given["tier"], tuple(once), tuple(once.values()), rules=given.get("rules"))


def _with_methods(
    grid: Mapping[str, Any], known: Mapping[str, Any], where: str
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """A grid once for each of the sets of methods that it names; what they say goes before what the grid says.

    A region of "" is none. Stages of a grid and of a set of methods add up: all of a lower stage is run first.
    """
    rest = {key: value for key, value in grid.items() if key not in ("methods", "stage")}
    stage = _stage(grid, where)
    names = grid.get("methods")
    if names is None:
        yield stage, rest
        return
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: methods must be a list of names, got {names!r}.")
    for name in names:
        check_keys(f"{where}, methods", {name: None}, list(known))
        if not isinstance(known[name], Mapping):
            raise ValueError(f"{where}: methods.{name} must be a table, [methods.{name}].")
        both = {**rest, **known[name]}
        added = stage + _stage(both, f"{where}, methods.{name}")
        yield added, {key: value for key, value in both.items() if (key, value) != ("region", "") and key != "stage"}


def _stage(given: Mapping[str, Any], where: str) -> int:
    stage = given.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise ValueError(f"{where}: stage must be a whole number, got {stage!r}.")
    return stage


def _expanded(grid: Mapping[str, Any], where: str) -> Iterator[tuple[Spec, float]]:
    """All combinations of a grid's lists.

    A table gives a value, or a list of them, for each value of another key: {by = "batch", 1 = 100}.
    """
    check_keys(where, grid, _keys([grid], where))
    tables = {key: value for key, value in grid.items() if isinstance(value, Mapping)}
    lists = {key: value if isinstance(value, list) else [value] for key, value in grid.items() if key not in tables}
    for key, values in lists.items():
        if not values:
            raise ValueError(f"{where}: {key} is an empty list.")
    for combination in itertools.product(*lists.values()):
        chosen = dict(zip(lists, combination, strict=True))
        found = {key: _looked_up(key, table, chosen, where) for key, table in tables.items()}
        for values in itertools.product(*(value if isinstance(value, list) else [value] for value in found.values())):
            given = {**chosen, **dict(zip(found, values, strict=True))}
            typical = given.pop("typical", None)
            spec = Spec.read(given, where)
            if typical is not None and (not isinstance(typical, (int, float)) or not typical > 0):
                raise ValueError(f"{where}: typical must be a number of epochs, got {typical!r}.")
            yield spec, float(min(typical or spec.epochs, spec.epochs))


def _keys(grids: Iterable[Mapping[str, Any]], where: str) -> list[str]:
    """What grids may say: what all runs have, and what their tasks let one choose."""
    named = [grid["task"] for grid in grids if "task" in grid]
    tasks = [name for each in named for name in (each if isinstance(each, list) else [each])]
    try:
        return [*FIELDS, "typical", *(key for task in tasks for key in settings(task))]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _looked_up(key: str, table: Mapping[str, Any], chosen: Mapping[str, Any], where: str) -> Any:
    by = str(table.get("by"))
    if by not in chosen:
        raise ValueError(f'{where}: the table for {key} needs by = the key it depends on, such as by = "batch".')
    value = table.get(str(chosen[by]))
    if value is None:
        raise ValueError(f"{where}: the table for {key} has no value for {by} = {chosen[by]!r}.")
    return value


def matches(spec: Spec, only: Mapping[str, Collection[str]] | None) -> bool:
    """Whether a spec has one of the wanted values in every field that is named."""
    return all(str(spec.values.get(key)) in values for key, values in (only or {}).items())


def _folder() -> Any:
    return resources.files("carryclip_lab") / "studies"
