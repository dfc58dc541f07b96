"""The figures of docs/theory and of docs/parallel, with their captions and tables.

    python benchmarks/figures.py --draw     # run ``carryclip reproduce theory`` and ``corrupted-rank``, then fill
    python benchmarks/figures.py --write    # only fill the pages from what is there

Kept are the figures as SVG, captions, the claims, and the numbers of the wind-up table.
"""

import csv
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
THEORY = ("figures.md", "wind-up.md", "nonconvex.md", "paths.md")
PAGES = [*(DOCS / "theory" / name for name in THEORY), DOCS / "parallel.md"]
FIGURES = DOCS / "theory" / "figures"
OTHERS = DOCS / "figures"
"""Those that are not part of the theory."""


def caption(name: str) -> str:
    folder = OTHERS if (OTHERS / f"{name}.txt").is_file() else FIGURES
    return (folder / f"{name}.txt").read_text(encoding="utf-8").strip()


def claims() -> str:
    record = json.loads((FIGURES / "claims.json").read_text(encoding="utf-8"))
    lines = ["| | the paper | seen here | verdict |", "|---|---|---|---|"]
    for claim in record["claims"]:
        said = f"{claim['statement']} ({claim['paper']})"
        cells = (claim["id"], said, claim["ours"], f"**{claim['verdict']}**")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def wind_up() -> str:
    with (FIGURES / "wind-up.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    starts = ("0.0", "10.0", "100.0")
    heads = ["bias", "overshoot from 10", "from 100", "carry from 0", "from 10", "from 100"]
    lines = [f"| noise | policy | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    named = ""
    for noise, policy in dict.fromkeys((row["noise"], row["policy"]) for row in rows):
        mine = {row["start"]: row for row in rows if (row["noise"], row["policy"]) == (noise, policy)}
        cells = [mine["0.0"]["bias"], *(mine[start]["overshoot"] for start in starts[1:])]
        cells += [mine[start]["largest_carry"] for start in starts]
        lines.append(f"| {'' if noise == named else noise} | {policy} | {' | '.join(cells)} |")
        named = noise
    return "\n".join(lines)


def filled(text: str) -> str:
    """A page with what stands between its markers replaced."""

    def part(match: re.Match) -> str:
        name, _, kind = match[1].rpartition(" ")
        made = claims() if match[1] == "claims" else wind_up() if kind == "table" else caption(name)
        return f"<!-- theory: {match[1]} -->\n{made}\n<!-- end -->"

    return re.sub(r"<!-- theory: ([\w -]+) -->\n.*?<!-- end -->", part, text, flags=re.DOTALL)


def draw() -> None:
    from carryclip_lab.theory_figures.main import main
    from carryclip_lab.theory_figures.study import Scale

    main("theory", Scale(), str(FIGURES))
    main("corrupted-rank", Scale(), str(OTHERS))
    for path in [*FIGURES.iterdir(), *OTHERS.iterdir()]:
        if path.suffix in (".png", ".pdf") or (path.suffix == ".csv" and path.stem != "wind-up"):
            path.unlink()


if __name__ == "__main__":
    if "--draw" in sys.argv:
        draw()
    if {"--draw", "--write"} & set(sys.argv):
        for page in PAGES:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(claims(), wind_up(), sep="\n\n")
