"""The published results: reports, figures, the runs behind them, and the pages in docs that show them.

    python benchmarks/published.py results STORE    # from a store with cifar10-small
    python benchmarks/published.py slice STORE      # from a store with cifar10-slice
    python benchmarks/published.py imagenet STORE   # from a store with imagenet-mini
    python benchmarks/published.py evidence STORE   # from a store with evidence-small
    python benchmarks/published.py --write          # only fill the pages from what is there

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

from carryclip_lab.analysis.summary import summarise
from carryclip_lab.analysis.tables import of_epochs
from carryclip_lab.spec import FIELDS, Spec
from carryclip_lab.store.records import Record

DOCS = Path(__file__).parents[1] / "docs"
FOLDERS = {
    "results": DOCS / "experiments" / "results",
    "slice": DOCS / "experiments" / "slice",
    "imagenet": DOCS / "experiments" / "imagenet",
    "evidence": DOCS / "evidence",
}
PAGES = {
    DOCS / "experiments" / "results.md": ("results", "slice"),
    DOCS / "experiments" / "imagenet.md": ("imagenet",),
    DOCS / "when-to-use.md": ("evidence",),
    DOCS.parent / "README.md": ("evidence",),
}
"""Each with what it shows."""


def records(folder: Path) -> dict[str, list[Record]]:
    """The published runs by study."""
    kinds = {"lr": float, "target": float, "batch": int, "epochs": int, "seed": int, "examples": int}
    found: dict[str, list[Record]] = {}
    with (folder / "runs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            given = {name: kinds.get(name, str)(row[name]) for name in FIELDS if row[name]}
            spec = Spec.read({**given, **json.loads(row["settings"] or "{}")})
            reached = int(row["reached"]) if row["reached"] else None
            seconds = float(row["seconds"]) if row["seconds"] else None
            record = Record(spec, row["state"], row["outcome"] or None, reached, seconds, row["message"] or None, {})
            found.setdefault(row["study"], []).append(record)
    return found


def lines(heads: list[str], table: list[list[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *table]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


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
        elif what == "cost":
            spent = sum(record.seconds or 0.0 for record in known[study])
            made = f"{len(known[study]):,} runs, {spent / 3600:.1f} hours of one core."
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
    from carryclip_lab.store.store import Store

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


def write(page: Path) -> None:
    page.write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [name, store] if name in FOLDERS:
            (evidence.publish if name == "evidence" else publish)(FOLDERS[name], store)
            for each in (page for page, names in PAGES.items() if name in names):
                write(each)
        case ["--write"]:
            for each in PAGES:
                write(each)
        case _:
            print(__doc__)
