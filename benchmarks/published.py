"""The published results in docs/experiments: report, figures, the runs behind them, and the page that shows them.

    python benchmarks/published.py STORE     # from a store with the results of its studies
    python benchmarks/published.py --write   # only fill the page from what is there

Kept are the figures as SVG with captions, the claims, runs as CSV and epochs as Parquet.
"""

import csv
import json
import re
import shutil
import sys
from pathlib import Path

from carryclip.experiments.analysis.summary import Summary, summarise
from carryclip.experiments.records import Record
from carryclip.experiments.spec import FIELDS, Spec
from carryclip.experiments.terminal import rows

PAGE = Path(__file__).parents[1] / "docs" / "experiments" / "results.md"
FOLDER = PAGE.parent / "results"
THEORY = PAGE.parents[1] / "theory" / "figures"


def records() -> dict[str, list[Record]]:
    """The published runs by study."""
    kinds = {"lr": float, "target": float, "batch": int, "epochs": int, "seed": int, "examples": int}
    found: dict[str, list[Record]] = {}
    with (FOLDER / "runs.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            given = {name: row[name] for name in FIELDS if row[name]}
            spec = Spec.read({name: kinds.get(name, str)(value) for name, value in given.items()})
            reached = int(row["reached"]) if row["reached"] else None
            seconds = float(row["seconds"]) if row["seconds"] else None
            record = Record(spec, row["state"], row["outcome"] or None, reached, seconds, row["message"] or None, {})
            found.setdefault(row["study"], []).append(record)
    return found


def table(summary: Summary) -> str:
    heads = ["optimizer", "clipping", *(f"batch {batch:,}" for batch in summary.batches)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows(summary))])


def claims() -> str:
    told = json.loads((FOLDER / "claims.json").read_text(encoding="utf-8"))
    lines = ["| | the paper | seen here | study | verdict |", "|---|---|---|---|---|"]
    for claim in told["claims"]:
        if claim["id"].startswith("C"):
            said = f"{claim['statement']} ({claim['paper']})"
            cells = (claim["id"], said, claim["ours"] or "no such runs", claim["study"], f"**{claim['verdict']}**")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """The page with what stands between its markers replaced."""
    known = records()

    def part(match: re.Match) -> str:
        study, _, what = match[1].partition(" ")
        if study == "claims":
            made = claims()
        elif what == "table":
            made = "\n\n".join(map(table, summarise(study, study, "small", known[study], lambda _: [])))
        elif what == "cost":
            spent = sum(record.seconds or 0.0 for record in known[study])
            made = f"{len(known[study])} runs, {spent / 3600:.1f} hours of one core."
        else:
            made = (FOLDER / "figures" / study / f"{what}.txt").read_text(encoding="utf-8").strip()
        return f"<!-- results: {match[1]} -->\n{made}\n<!-- end -->"

    return re.sub(r"<!-- results: ([\w -]+) -->\n.*?<!-- end -->", part, text, flags=re.DOTALL)


def publish(store_path: str) -> None:
    from carryclip.experiments.export import export
    from carryclip.experiments.report.build import build
    from carryclip.experiments.store import Store

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with Store(store_path, create=False) as store:
        build(store, sorted(store.studies(), reverse=True), FOLDER, theory=THEORY, formats=("svg",))
        for path in export(store, FOLDER):
            if path.name in ("epochs.csv", "runs.parquet"):
                path.unlink()
    for path in (FOLDER / "figures").rglob("*.csv"):
        path.unlink()


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1] != "--write":
        publish(sys.argv[1])
    if len(sys.argv) == 2:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(__doc__)
