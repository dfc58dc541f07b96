"""A store as tables for other tools: runs and epochs, as CSV and Parquet."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from carryclip_lab.commands.output import make_folder, tells_errors
from carryclip_lab.spec import FIELDS, Spec
from carryclip_lab.store.records import Epoch, Record
from carryclip_lab.store.store import Store

_EPOCH = [field.name for field in fields(Epoch)]
_END = ("state", "outcome", "reached", "seconds", "message", "environment")
RUN_COLUMNS = ("study", "run", *FIELDS, "settings", "label", *_END)
EPOCH_COLUMNS = ("run", *_EPOCH)


@tells_errors
def main(path: str, out: str, kinds: Sequence[str]) -> int:
    """The command behind ``carryclip export``."""
    folder = make_folder(out)
    with Store(path, create=False) as store:
        for written in export(store, folder, kinds):
            Console().print(f"Wrote {written}.", highlight=False, soft_wrap=True)
    return 0


@tells_errors
def merge(into: str, others: Sequence[str]) -> int:
    """The command behind ``carryclip merge``."""
    with Store(into) as store:
        for path in others:
            with Store(path, create=False) as other:
                new, results = store.merge(other)
            Console().print(f"{path}: {new} runs and {results} results that {into} had not.", highlight=False)
    return 0


@tells_errors
def backup(path: str, to: str) -> int:
    """The command behind ``carryclip backup``."""
    with Store(path, create=False) as store:
        store.backup(Path(to))
    Console().print(f"Wrote {to}.", highlight=False, markup=False, soft_wrap=True)
    return 0


def export(store: Store, folder: Path, kinds: Sequence[str] = ("csv", "parquet")) -> list[Path]:
    """Write ``runs`` and ``epochs`` in each format."""
    paths = []
    for name, columns, rows in (("runs", RUN_COLUMNS, _runs), ("epochs", EPOCH_COLUMNS, _epochs)):
        for kind in kinds:
            paths.append(folder / f"{name}.{kind}")
            {"csv": _csv, "parquet": _parquet}[kind](paths[-1], columns, rows(store))
    return paths


def _runs(store: Store) -> Iterator[tuple[Any, ...]]:
    for study in store.studies():
        for record in store.records(study):
            yield (study, *_row(record))


def _row(record: Record) -> tuple[Any, ...]:
    spec, told = record.spec, ", ".join(f"{key} {value}" for key, value in record.environment.items())
    end = (record.outcome, record.reached, record.seconds, record.message, told)
    settings = json.dumps(dict(spec.settings), sort_keys=True) if spec.settings else None
    return (spec.id, *(getattr(spec, name) for name in FIELDS), settings, spec.label, record.state, *end)


def _epochs(store: Store) -> Iterator[tuple[Any, ...]]:
    seen: set[str] = set()
    for study in store.studies():
        for record in store.records(study):
            if record.spec.id not in seen:
                seen.add(record.spec.id)
                for epoch in store.epochs(record.spec.id):
                    told = json.dumps(epoch.metrics, sort_keys=True) if epoch.metrics else None
                    yield (record.spec.id, *list(asdict(epoch).values())[:-1], told)


def _csv(path: Path, columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _parquet(path: Path, columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    import pyarrow
    import pyarrow.parquet

    values = list(zip(*rows, strict=True)) or [()] * len(columns)
    types = _types()
    arrays = [pyarrow.array(column, types[name]) for name, column in zip(columns, values, strict=True)]
    pyarrow.parquet.write_table(pyarrow.table(arrays, names=list(columns)), path)


def _types() -> dict[str, Any]:
    """By what a column holds, not by what happens to be in its first rows."""
    import pyarrow

    kinds = {"float": pyarrow.float64(), "int": pyarrow.int64(), "bool": pyarrow.bool_()}
    declared = {field.name: str(field.type) for owner in (Spec, Epoch, Record) for field in fields(owner)}
    names = {*RUN_COLUMNS, *EPOCH_COLUMNS}
    return {name: next((kinds[k] for k in kinds if k in declared.get(name, "")), pyarrow.string()) for name in names}
