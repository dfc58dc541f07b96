"""The published results: reports, figures, the runs behind them, and the pages in docs that show them.

    python benchmarks/published.py results STORE    # from a store with cifar10-small
    python benchmarks/published.py slice STORE      # from a store with cifar10-slice
    python benchmarks/published.py claims STORE     # from a store with cifar10-claims
    python benchmarks/published.py imagenet STORE   # from a store with imagenet-mini
    python benchmarks/published.py evidence STORE   # from a store with evidence-small
    python benchmarks/published.py --write          # only fill the pages from what is there
    python benchmarks/published.py --restore claims STORE    # a store with the published runs, to go on from

Kept are the figures as SVG with captions, the claims and answers, runs as CSV and epochs as Parquet; of the evidence
less, see ``evidence.py``.
"""

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import evidence  # the module beside this one

from carryclip_lab.analysis.shifts import drop_in, of_rates, shifts
from carryclip_lab.analysis.summary import summarise
from carryclip_lab.analysis.tables import of_epochs
from carryclip_lab.grid import Study, load
from carryclip_lab.spec import FIELDS, Spec
from carryclip_lab.store.records import OUTCOMES, Epoch, Outcome, Record
from carryclip_lab.store.store import Store

DOCS = Path(__file__).parents[1] / "docs"
FOLDERS = {
    "results": DOCS / "experiments" / "results",
    "slice": DOCS / "experiments" / "slice",
    "claims": DOCS / "experiments" / "claims",
    "imagenet": DOCS / "experiments" / "imagenet",
    "evidence": DOCS / "evidence",
}
PAGES = {
    DOCS / "experiments" / "results.md": ("results", "slice"),
    DOCS / "experiments" / "claims.md": ("claims",),
    DOCS / "experiments" / "imagenet.md": ("imagenet",),
    DOCS / "when-to-use.md": ("evidence",),
    DOCS.parent / "README.md": ("evidence",),
}
"""Each with what it shows."""
ME = "published"
"""Who writes what is restored."""
BY_RATE = ("rates-table", "shifts", "drop-in")


def records(folder: Path) -> dict[str, list[Record]]:
    """The published runs by study."""
    kinds = {
        "brief": "True".__eq__,
        "lr": float,
        "target": float,
        "batch": int,
        "epochs": int,
        "seed": int,
        "examples": int,
    }
    found: dict[str, list[Record]] = {}
    with (folder / "runs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            given = {name: kinds.get(name, str)(row[name]) for name in FIELDS if row.get(name)}
            spec = Spec.read({**given, **json.loads(row["settings"] or "{}")})
            reached = int(row["reached"]) if row["reached"] else None
            seconds = float(row["seconds"]) if row["seconds"] else None
            outcome: Outcome | None = next((each for each in OUTCOMES if each == row["outcome"]), None)
            where = _environment(row["environment"])
            record = Record(spec, row["state"], outcome, reached, seconds, row["message"] or None, where)
            found.setdefault(row["study"], []).append(record)
    return found


def _environment(told: str) -> dict[str, str | int]:
    """From ``"python 3.11.7, threads 1, commit None"``."""
    pairs = dict(part.split(" ", 1) for part in told.split(", ")) if told else {}
    return {key: int(value) if value.isdigit() else value for key, value in pairs.items() if value != "None"}


def lines(heads: list[str], table: list[list[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *table]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


def cost(found: list[Record]) -> str:
    """How many runs, and what they took."""
    done = [record for record in found if record.state == "done"]
    runs = f"{len(done):,} runs" if len(done) == len(found) else f"{len(done):,} of {len(found):,} runs"
    return f"{runs}, {sum(record.seconds or 0.0 for record in done) / 3600:.1f} hours of one core."


def by_rate(found: list[Record], study: str, what: str) -> str:
    """Epochs at each learning rate: a table, or what it says of the carry in sentences."""
    (summary,) = summarise(study, study, "paper", found, lambda _: [])
    if what == "rates-table":
        table = of_rates(summary)
        return lines(table.heads, table.lines)
    said = drop_in(summary) if what == "drop-in" else shifts(summary)
    return "\n".join(f"- {each}." for each in said)


def accuracy_table(folder: Path, study: str) -> str:
    with (folder / "figures" / study / "accuracy.csv").open(encoding="utf-8", newline="") as file:
        heads, *table = csv.reader(file)
    return lines(heads, table)


def claims(folder: Path) -> str:
    told = json.loads((folder / "claims.json").read_text(encoding="utf-8"))
    table = []
    for claim in told["claims"]:
        if claim["id"].startswith("C"):
            said = f"{claim['statement']} ({claim['paper']})"
            seen = claim["ours"] or "no such runs"
            table.append([claim["id"], said, seen, claim["study"], f"**{claim['verdict']}**"])
    return lines(["", "the paper", "seen here", "study", "verdict"], table)


def filled(page: Path) -> str:
    """A page with what stands between its markers replaced."""
    places: dict[str, Path] = {}
    known: dict[str, list[Record]] = {}
    for folder in (FOLDERS[name] for name in PAGES[page] if name != "evidence"):
        found = records(folder)
        known |= found
        places |= dict.fromkeys(found, folder)

    def part(match: re.Match) -> str:
        study, _, what = match[1].partition(" ")
        if study == evidence.STUDY:
            made = evidence.said(FOLDERS["evidence"], what)
        elif study == "claims":
            made = claims(FOLDERS[what or "results"])
        elif what == "accuracies":
            made = accuracy_table(places[study], study)
        elif what == "table":
            tables = map(of_epochs, summarise(study, study, "small", known[study], lambda _: []))
            made = "\n\n".join(lines(table.heads, table.lines) for table in tables)
        elif what in BY_RATE:
            made = by_rate(known[study], study, what)
        elif what == "cost":
            made = cost(known[study])
        else:
            made = _caption(places[study], study, what)
        return f"<!-- results: {match[1]} -->\n{made}\n<!-- end -->"

    text = page.read_text(encoding="utf-8")
    return re.sub(r"<!-- results: ([\w -]+) -->\n.*?<!-- end -->", part, text, flags=re.DOTALL)


def _caption(folder: Path, study: str, what: str) -> str:
    """Of a figure: its name, or that of a trial before it."""
    trial, _, figure = what.rpartition(" ")
    place = f"{study}-{trial}" if trial else study
    return (folder / "figures" / place / f"{figure}.txt").read_text(encoding="utf-8").strip()


def publish(folder: Path, store_path: str) -> None:
    from carryclip_lab.report.build import build
    from carryclip_lab.store.export import export

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    theory = DOCS / "theory" / "figures" if folder.name == "results" else None
    with Store(store_path, create=False) as store:
        build(store, sorted(store.studies(), reverse=True), folder, theory=theory, formats=("svg",))
        for path in export(store, folder):
            if path.name in ("epochs.csv", "runs.parquet"):
                path.unlink()
    for path in (folder / "figures").rglob("*.csv"):
        if path.name != "accuracy.csv":
            path.unlink()


def records_with_epochs(folder: Path) -> tuple[dict[str, list[Record]], dict[str, list[Epoch]]]:
    """The published runs by study, and the epochs of each; of the evidence only how the last one ended."""
    if folder == FOLDERS["evidence"]:
        found, ends = evidence.records(folder)
        return {evidence.STUDY: found}, ends
    import pyarrow.parquet

    seen: dict[str, list[Epoch]] = {}
    for row in pyarrow.parquet.read_table(folder / "epochs.parquet").to_pylist():
        told = {**row, "metrics": json.loads(row.get("metrics") or "{}")}
        seen.setdefault(told.pop("run"), []).append(Epoch(**told))
    return records(folder), seen


def restore(folder: Path, store_path: str) -> None:
    """A store with the published runs and their epochs, as they were: the study goes on from there."""
    studies, seen = records_with_epochs(folder)
    with Store(store_path) as store:
        for name, found in studies.items():
            study = load(name)
            store.add(Study(name, study.title, study.tier, tuple(record.spec for record in found)))
            store.take(name, ME, limit=len(found))
            for record in found:
                if record.outcome is not None:
                    _restore(store, record, seen.get(record.spec.id, []))
            store.give_back(ME)


def _restore(store: Store, record: Record, epochs: list[Epoch]) -> None:
    run = record.spec.id
    store.begin(run, ME)
    for epoch in epochs:
        store.record(run, ME, epoch)
    assert record.outcome is not None
    end = {"reached": record.reached, "message": record.message, "environment": record.environment}
    if not store.finish(run, ME, record.outcome, **end):
        raise SystemExit(f"Run {run} is in that store already, or somebody else's: choose a new file.")


def write(page: Path) -> None:
    page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [name, store] if name in FOLDERS:
            (evidence.publish if name == "evidence" else publish)(FOLDERS[name], store)
            for each in (page for page, names in PAGES.items() if name in names):
                write(each)
        case ["--restore", name, store] if name in FOLDERS:
            restore(FOLDERS[name], store)
        case ["--write"]:
            for each in PAGES:
                write(each)
        case _:
            print(__doc__)
