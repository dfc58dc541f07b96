"""Every run as the page has it: columns of numbers, and of words from short lists, so that many rows stay small."""

from collections.abc import Iterable, Sequence
from typing import Any

from carryclip_lab.analysis.naming import method_of, region_name
from carryclip_lab.report.sections import Section
from carryclip_lab.spec import OPTIMIZERS
from carryclip_lab.store.records import Record

WORDS = ("study", "data", "optimizer", "method", "region", "outcome")
"""Columns of words."""
LONGEST = 2000
"""A message is cut after so many characters."""


def table(sections: Iterable[Section]) -> dict[str, Any]:
    """All runs by column: ``{"name", "values"}`` for numbers, ``{"name", "words", "places"}`` for words."""
    rows = [_row(section.name, record) for section in sections for record in section.records]
    names = [*WORDS[:5], "batch", "lr", "seed", "outcome", "epochs", "seconds", "message", "id"]
    return {"length": len(rows), "columns": [_column(name, [row[name] for row in rows]) for name in names]}


def _row(study: str, record: Record) -> dict[str, Any]:
    spec = record.spec
    return {
        "study": study,
        "data": spec.recipe.data_name(spec.examples),
        "optimizer": OPTIMIZERS[spec.optimizer],
        "method": method_of(spec).label,
        "region": "" if spec.region is None else region_name(spec.region).label,
        "batch": spec.batch,
        "lr": spec.lr,
        "seed": spec.seed,
        "outcome": (record.outcome or record.state).replace("_", " "),
        "epochs": record.reached if record.outcome == "reached" else None,
        "seconds": None if record.seconds is None else round(record.seconds, 1),
        "message": None if record.message is None else record.message[:LONGEST],
        "id": spec.id,
    }


def _column(name: str, values: Sequence[Any]) -> dict[str, Any]:
    if name not in WORDS:
        return {"name": name, "values": values}
    words = list(dict.fromkeys(values))
    place = {word: number for number, word in enumerate(words)}
    return {"name": name, "words": words, "places": [place[value] for value in values]}
