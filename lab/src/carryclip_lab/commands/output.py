"""Where results go: the folder a command writes to, and figures in it."""

import csv
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

from rich.console import Console

from carryclip_lab.checks import UserError

P = ParamSpec("P")


def complain(console: Console, error: object) -> None:
    """Say what is wrong, in red; what looks like markup in a path or a message stays as it is."""
    console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)


def many(count: int, word: str) -> str:
    """A count with its word: "1 run", "72 runs"."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def tells_errors(command: Callable[P, int]) -> Callable[P, int]:
    """A command that says what can be put right, and returns 2."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            complain(Console(), error)
            return 2

    return run


def make_folder(out: str | Path) -> Path:
    """The folder, made if it is not there."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        said = f"Cannot write to {folder}: {error.strerror}. Choose another folder with --out."
        raise UserError(said) from None
    return folder


def save_figure(figure: Any, folder: Path, name: str, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write a figure to look at and to print, and let it go. The same figure gives the same files."""
    import matplotlib
    import matplotlib.pyplot as plt

    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    paths = [folder / f"{name}.{kind}" for kind in formats]
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": name}):
        for kind, path in zip(formats, paths, strict=True):
            figure.savefig(path, dpi=150, metadata=undated.get(kind))
    plt.close(figure)
    return paths


def save_rows(rows: list[dict[str, Any]], folder: Path, name: str) -> Path:
    """Write rows that share their columns as CSV."""
    path = folder / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
