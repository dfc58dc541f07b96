"""The results as tables, as JSON and as a figure."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from carryclip_lab.commands.output import many, save_figure

Record = dict[str, Any]


COLUMNS: dict[str, Callable[[Record], str]] = {
    "ms": lambda row: _shown(row["milliseconds"], ".3g"),
    "±": lambda row: f"{(row['high'] - row['low']) / 2 / row['milliseconds']:.0%}",
    "× base": lambda row: _shown(row["ratio"], ".2f" if (row["ratio"] or 1.0) > 0.1 else ".4f"),
    "× floor": lambda row: _shown(row["floor"], ".2f"),
    "peak MB": lambda row: _shown(row["peak_bytes"], ".2f", 1e-6),
    "B/param": lambda row: _shown(row["held_per_parameter"], ".2f"),
    "kernels": lambda row: _shown(row["kernels"], ".0f"),
    "models moved": lambda row: _shown(row["bytes_moved"], ".1f"),
}
"""Of all tables; one that has nothing to say is left out."""
HALVES = tuple(COLUMNS)[:4], tuple(COLUMNS)[4:]
"""Time, and what else it costs: two tables where one would be too wide for the terminal."""


def _shown(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else format(value * factor, form)


def tables(results: dict[str, Any], width: int = 200) -> Iterable[Table]:
    """One table for each contest; two where so many characters cannot hold one, since a number cut short is none."""
    contests: dict[tuple[str, str], list[Record]] = {}
    for row in results["rows"]:
        contests.setdefault((row["part"], row["model"]), []).append(row)
    for (part, model), rows in contests.items():
        unit = "runs side by side" if part == "theory" else "parameters"
        title = f"{part}: {model} ({rows[0]['parameters']:,} {unit})"
        columns = {name: [shown(row) for row in rows] for name, shown in COLUMNS.items()}
        columns = {name: words for name, words in columns.items() if any(words)}
        names = [row["name"] for row in rows]
        if _width(names, columns) <= width:
            yield _table(title, names, columns)
            continue
        for number, half in enumerate(HALVES):
            if some := {name: columns[name] for name in half if name in columns}:
                yield _table(title if number == 0 else f"{part}: {model}, memory and kernels", names, some)


def _width(names: list[str], columns: dict[str, list[str]]) -> int:
    """Of a table that shows everything: its widest words, and the space between."""
    return 2 + max(map(len, names)) + sum(3 + max(map(len, [name, *words])) for name, words in columns.items())


def _table(title: str, names: list[str], columns: dict[str, list[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in zip(names, *columns.values(), strict=True):
        table.add_row(*row)
    return table


def show(results: dict[str, Any], console: Console) -> None:
    """Print all tables."""
    where = results["setting"]
    console.print(
        f"carryclip {where['carryclip']}, torch {where['torch']}, {where['processor']}, "
        f"{many(where['threads'], 'thread')}; medians, timed by turns"
    )
    console.print(
        "ms: per step, ± half the distance of its quartiles; × base: to clip_grad_norm_ (optax: to optax's own; "
        "theory: to a loop over seeds); "
        "× floor: to a bare pass over the same arrays; peak MB: allocated at a time; B/param: kept between steps; "
        "kernels: dispatched per step."
    )
    for table in tables(results, console.width):
        console.print(table)


def save(results: dict[str, Any], path: Path) -> None:
    """Write the JSON."""
    path.write_text(json.dumps(results, indent=1) + "\n")


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Cost at the largest model, and how it grows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_part: dict[str, list[Record]] = {}
    for row in results["rows"]:
        by_part.setdefault(row["part"], []).append(row)
    clipping, growth = by_part.get("clipping", []), by_part.get("scaling", [])
    if not clipping:
        return []
    largest = max(clipping, key=lambda row: row["parameters"])["model"]
    bars = [row for row in clipping if row["model"] == largest and "metrics" not in row["name"]]
    size = (13 if growth else 7, 0.27 * len(bars) + 1.6)
    figure, axes = plt.subplots(1, 2 if growth else 1, figsize=size, layout="constrained", squeeze=False)
    _bars(axes[0, 0], sorted(bars, key=lambda row: row["ratio"]))
    axes[0, 0].set_title(f"{largest}: cost of clipping")
    if growth:
        _growth(axes[0, 1], growth)
    return save_figure(figure, folder, "bench")


def _bars(axes: Any, rows: list[Record], longest: float = 4.0) -> None:
    """Ratios, in numbers too; a bar that would be longer than the rest leaves the picture."""
    names = [row["name"] for row in rows]
    axes.barh(names, [row["ratio"] for row in rows], color=[_colour(name) for name in names])
    axes.axvline(1.0, color="black", linewidth=1)
    for place, row in enumerate(rows):
        where, side, colour = row["ratio"] + 0.03, "left", "black"
        if row["ratio"] > longest:
            where, side, colour = longest * 1.07, "right", "white"
        axes.text(where, place, f"{row['ratio']:.2f}", va="center", ha=side, color=colour, fontsize=8)
    axes.set(xlim=(0, longest * 1.08), xlabel="time per step / clip_grad_norm_")
    axes.tick_params(axis="y", labelsize=8)


def _growth(axes: Any, rows: list[Record]) -> None:
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        color = {"Component": "C3", "Norm": "C0"}.get(name.split()[-1], "black")
        line = {"marker": "o", "markersize": 4, "color": color, "linestyle": "--" if "eager" in name else "-"}
        axes.plot([row["parameters"] for row in mine], [row["milliseconds"] for row in mine], label=name, **line)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ms per step", title="How it grows")
    axes.legend(frameon=False, fontsize=8)


def _colour(name: str) -> str:
    if name.startswith("compiled"):
        return "C3"
    if name.startswith("eager"):
        return "C1"
    return "0.75" if name.startswith("floor") else "C0"
