"""The map in CONTRIBUTING: every module of the library with the first line of its docstring.

python tests/house_map.py --write      puts it there; a test compares the two
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "src" / "carryclip"
LABORATORY = ROOT / "lab" / "src" / "carryclip_lab"
BEGIN, END = "<!-- map: written by tests/house_map.py -->", "<!-- end of the map -->"
ROOMS = {
    "": "The core: the algorithm once, for every backend; it imports no framework",
    "torch": "PyTorch",
    "optax": "JAX",
    "theory": "Theory: NumPy alone",
    "theory/bounds": "Its bounds, one function per result",
    "integrations": "Trainers and loggers",
}
LAB_ROOMS = {
    "": "The laboratory: what to run",
    "tasks": "Its tasks",
    "engine": "How runs get done",
    "store": "Where they are kept",
    "analysis": "What they say",
    "figures": "Figures of studies",
    "report": "The report",
    "commands": "What people type",
    "data": "Data sets",
    "imagenet": "Folders of images",
    "theory_figures": "Figures of the theory",
    "bench": "What clipping costs",
}


def first_line(path: Path) -> str:
    """What a module says of itself."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.split("\n")[0].replace("|", "\\|")


def house_map() -> str:
    """The map as Markdown."""
    lines: list[str] = []
    for house, rooms in ((HOUSE, ROOMS), (LABORATORY, LAB_ROOMS)):
        for room, title in rooms.items():
            lines += [f"### {title}", "", "| module | what it is for |", "|---|---|"]
            for path in sorted((house / room).glob("*.py")):
                if path.name not in ("__init__.py", "__main__.py"):
                    lines.append(f"| `{path.relative_to(house)}` | {first_line(path)} |")
            lines.append("")
    return "\n".join(lines).strip()


def written() -> str:
    """CONTRIBUTING with the map as it is now."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{house_map()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        (ROOT / "CONTRIBUTING.md").write_text(written())
    else:
        print(house_map())
