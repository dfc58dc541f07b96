"""Where results go: the folder a command writes to, and figures in it."""

from pathlib import Path
from typing import Any

from rich.console import Console


def make_folder(out: str, console: Console) -> Path | None:
    """The folder, made if it is not there; None, after saying why, if it cannot be."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.print(f"[red]Cannot write to {folder}: {error.strerror}. Choose another folder with --out.")
        return None
    return folder


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure to look at and to print, and let it go."""
    import matplotlib.pyplot as plt

    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    for path in paths:
        figure.savefig(path, dpi=150)
    plt.close(figure)
    return paths
