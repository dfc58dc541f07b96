"""The results as tables, as JSON and as a figure."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from carryclip_lab.commands.output import save_figure

Record = dict[str, Any]


def tables(results: dict[str, Any]) -> Iterable[Table]:
    """One table for each contest."""
    rows: list[Record] = results["rows"]
    for part, model in dict.fromkeys((row["part"], row["model"]) for row in rows):
        mine = [row for row in rows if (row["part"], row["model"]) == (part, model)]
        unit = "runs side by side" if part == "theory" else "parameters"
        title = f"{part}: {model} ({mine[0]['parameters']:,} {unit})"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        table.add_column("", no_wrap=True)
        for column in columns(mine):
            table.add_column(column, justify="right", no_wrap=True)
        for row in mine:
            table.add_row(row["name"], *cells(row, columns(mine)))
        yield table


def columns(rows: list[Record]) -> list[str]:
    """What there is to say of these rows."""
    fields = {
        "ms": "milliseconds",
        "±": "low",
        "× base": "ratio",
        "× floor": "floor",
        "peak MB": "peak_bytes",
        "B/param": "held_per_parameter",
        "kernels": "kernels",
        "models moved": "bytes_moved",
    }
    return [title for title, field in fields.items() if any(row.get(field) is not None for row in rows)]


def cells(row: Record, titles: list[str]) -> list[str]:
    """One row in words."""

    def shown(field: str, form: str, factor: float = 1.0) -> str:
        value = row.get(field)
        return "" if value is None else format(value * factor, form)

    words = {
        "ms": shown("milliseconds", ".3g"),
        "±": f"{(row['high'] - row['low']) / 2 / row['milliseconds']:.0%}",
        "× base": shown("ratio", ".2f" if (row.get("ratio") or 1.0) > 0.1 else ".4f"),
        "× floor": shown("floor", ".2f"),
        "peak MB": shown("peak_bytes", ".2f", 1e-6),
        "B/param": shown("held_per_parameter", ".2f"),
        "kernels": shown("kernels", ".0f"),
        "models moved": shown("bytes_moved", ".1f"),
    }
    return [words[title] for title in titles]


def show(results: dict[str, Any], console: Console) -> None:
    """Print all tables."""
    where = results["setting"]
    console.print(
        f"carryclip {where['carryclip']}, torch {where['torch']}, {where['processor']}, {where['threads']} threads; "
        "medians, timed by turns"
    )
    console.print(
        "ms: per step, ± half the distance of its quartiles; × base: to clip_grad_norm_ (optax: to optax's own; "
        "theory: to a loop over seeds); "
        "× floor: to a bare pass over the same arrays; peak MB: allocated at a time; B/param: kept between steps; "
        "kernels: dispatched per step."
    )
    for table in tables(results):
        console.print(table)


def save(results: dict[str, Any], path: Path) -> None:
    """Write the JSON."""
    path.write_text(json.dumps(results, indent=1) + "\n")


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Cost at the largest model, and how it grows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows: list[Record] = results["rows"]
    clipping = [row for row in rows if row["part"] == "clipping"]
    if not clipping:
        return []
    largest = max(clipping, key=lambda row: row["parameters"])["model"]
    bars = [row for row in clipping if row["model"] == largest and "metrics" not in row["name"]]
    bars.sort(key=lambda row: row["ratio"])
    growth = [row for row in rows if row["part"] == "scaling"]
    figure, axes = plt.subplots(
        1,
        2 if growth else 1,
        figsize=(13 if growth else 7, 0.27 * len(bars) + 1.6),
        layout="constrained",
        squeeze=False,
    )
    left = axes[0, 0]
    left.barh([row["name"] for row in bars], [row["ratio"] for row in bars], color=[_colour(r["name"]) for r in bars])
    left.axvline(1.0, color="black", linewidth=1)
    longest = 4.0
    for place, row in enumerate(bars):
        beyond = row["ratio"] > longest
        where, side, colour = (longest * 1.07, "right", "white") if beyond else (row["ratio"] + 0.03, "left", "black")
        left.text(where, place, f"{row['ratio']:.2f}", va="center", ha=side, color=colour, fontsize=8)
    left.set(xlim=(0, longest * 1.08), xlabel="time per step / clip_grad_norm_", title=f"{largest}: cost of clipping")
    left.tick_params(axis="y", labelsize=8)
    if growth:
        right = axes[0, 1]
        for name in dict.fromkeys(row["name"] for row in growth):
            mine = [row for row in growth if row["name"] == name]
            right.plot(
                [row["parameters"] for row in mine],
                [row["milliseconds"] for row in mine],
                marker="o",
                markersize=4,
                color={"Component": "C3", "Norm": "C0"}.get(name.split()[-1], "black"),
                linestyle="--" if "eager" in name else "-",
                label=name,
            )
        right.set(xscale="log", yscale="log", xlabel="parameters", ylabel="ms per step", title="How it grows")
        right.legend(frameon=False, fontsize=8)
    return save_figure(figure, folder, "bench")


def _colour(name: str) -> str:
    if name.startswith("compiled"):
        return "C3"
    if name.startswith("eager"):
        return "C1"
    return "0.75" if name.startswith("floor") else "C0"
