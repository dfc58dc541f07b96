"""Turns tutorial.ipynb into the page tutorial.md: the same cells, with what they print and the picture they draw.

    python docs/_tutorial.py            # runs the notebook, a minute or two, and writes tutorial.md
    python docs/_tutorial.py --check    # says whether the page has the notebook's cells; runs nothing

The notebook is the source and is kept without outputs. Nothing of jupyter is needed.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
NOTEBOOK, PAGE, PICTURE = DOCS / "tutorial.ipynb", DOCS / "tutorial.md", DOCS / "figures" / "tutorial.svg"
HEAD = "<!-- Made from tutorial.ipynb by docs/_tutorial.py: change the notebook, not this page. -->\n\n"
DOWNLOAD = "\n\n[Download the notebook](tutorial.ipynb), or read on: each cell is followed by what it prints.\n"
# Python that tests of pages need not run once more: a test of its own runs the notebook.
FENCE = "```py\n{}\n```\n"


def cells() -> list[tuple[str, str]]:
    """(kind, text) of every cell."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in found]


def run(told: list[tuple[str, str]]) -> tuple[list[str], dict]:
    """What each cell prints, and the names they leave."""
    names: dict = {}
    printed = []
    for kind, text in told:
        out = io.StringIO()
        if kind == "code":
            with contextlib.redirect_stdout(out):
                exec(compile(text, "tutorial.ipynb", "exec"), names)
        printed.append(out.getvalue().rstrip())
    return printed, names


def written(told: list[tuple[str, str]], printed: list[str]) -> str:
    """The page."""
    parts = []
    for (kind, text), output in zip(told, printed, strict=True):
        if kind == "markdown":
            parts.append(text + "\n")
            continue
        parts.append(FENCE.format(text))
        if output:
            parts.append(f"```text\n{output}\n```\n")
        if "plt.subplots" in text:
            parts.append("![Predicted over true total during training](figures/tutorial.svg)\n")
    first = parts[0].replace("\n\n", DOWNLOAD + "\n", 1)
    return HEAD + "\n".join([first, *parts[1:]])


def bare(page: str) -> str:
    """A page without what was printed, for comparisons: figures differ from machine to machine in their last digits."""
    return re.sub(r"```text\n.*?\n```\n\n?", "", page, flags=re.DOTALL).rstrip()


def main() -> int:
    """Write the page, or check it."""
    told = cells()
    if "--check" in sys.argv:
        current = bare(PAGE.read_text(encoding="utf-8")) == bare(written(told, [""] * len(told)))
        print("tutorial.md is current." if current else "tutorial.md is old: run python docs/_tutorial.py")
        return 0 if current else 1
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "carryclip"  # the same file from the same numbers
    printed, names = run(told)
    names["figure"].savefig(PICTURE, metadata={"Date": None})
    PAGE.write_text(written(told, printed), encoding="utf-8")
    print(f"Wrote {PAGE.name} and {PICTURE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
