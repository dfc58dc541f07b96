"""The tables in docs, from the committed results of ``carryclip bench``.

    python benchmarks/table.py            # print them
    python benchmarks/table.py --write    # put them into docs

To renew the results run ``carryclip bench --out DIR`` on a quiet machine, and copy ``DIR/bench.json`` to
``benchmarks/results.json`` and ``DIR/bench.svg`` to ``docs/bench.svg``.
"""

import json
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")
PAGES = [Path(__file__).parents[1] / name for name in ("docs/speed.md",)]
SHOWN = (
    "clip_grad_norm_",
    "clip_grad_value_",
    "AGC rule",
    "ZClip-style rule",
    "AdamW step, fused",
    "eager Component",
    "eager Norm",
    "eager Norm, Shrunk",
    "eager Norm, Drip",
    "eager Norm, inside its radius",
    "eager Norm, RMS radius",
    "eager Norm of rows",
    "eager Norm of rows, Shrunk",
    "eager AGC, no carry",
    "eager Adaptive EWMA",
    "compiled Component",
    "compiled Component, propagate",
    "compiled Component, Gated",
    "compiled Norm",
    "compiled Adaptive EWMA",
    "compiled Adaptive Welford",
)


def pick(results: dict, part: str, model: str | None = None) -> list[dict]:
    return [r for r in results["rows"] if r["part"] == part and model in (None, r["model"])]


def large(results: dict) -> str:
    """GPT-2 small: time, floor, memory."""
    rows = {row["name"]: row for row in pick(results, "clipping", "GPT-2 small")}
    lines = [
        "| 124 M parameters (GPT-2 small) | ms | × `clip_grad_norm_` | × floor | kept B/param | peak MB |",
        "|---|---|---|---|---|---|",
    ]
    for name in SHOWN:
        row = rows[name]
        floor = "" if row["floor"] is None else f"{row['floor']:.2f}"
        figures = f"{row['milliseconds']:.0f} | {row['ratio']:.2f} | {floor} | {row['held_per_parameter']:.0f}"
        lines.append(f"| {name} | {figures} | {row['peak_bytes'] / 1e6:.1f} |")
    return "\n".join(lines)


def small(results: dict) -> str:
    """Ratios to ``clip_grad_norm_`` where Python counts, and in whole training steps."""
    lines = ["| | × `clip_grad_norm_` |", "|---|---|"]
    for model in ("conv-net", "ResNet50", "600 tiny tensors"):
        rows = {row["name"]: row["ratio"] for row in pick(results, "clipping", model)}
        kinds = ("eager Component", "eager Norm", "eager Norm, inside its radius")
        lines.append(f"| {model}: {', '.join(kinds)} | {', '.join(f'{rows[kind]:.2f}' for kind in kinds)} |")
    for model in dict.fromkeys(row["model"] for row in pick(results, "end to end")):
        rows = {row["name"]: row["ratio"] for row in pick(results, "end to end", model)}
        names = [name for name in ("no clipping", "U-Clip Norm", "U-Clip Component", "floor") if name in rows]
        shown = ", ".join(f"{rows[name]:.2f}" for name in names)
        lines.append(f"| whole training step, {model}: {', '.join(names)} | {shown} |")
    return "\n".join(lines)


def optax(results: dict) -> str:
    """The same in JAX, against optax's own."""
    lines = ["| 124 M parameters, JAX | ms | × optax's own | model sizes moved |", "|---|---|---|---|"]
    for row in pick(results, "optax"):
        moved = f"{row['bytes_moved']:.1f}"
        lines.append(f"| {row['name']} | {row['milliseconds']:.0f} | {row['ratio']:.2f} | {moved} |")
    return "\n".join(lines)


def theory(results: dict) -> str:
    """The simulator: against a loop over seeds, and the paper's figures."""
    rows = {row["name"]: row for row in pick(results, "theory")}
    loop, mine = rows["NumPy loop over seeds"], rows["carryclip.theory.simulate"]
    lines = ["| | |", "|---|---|"]
    speed = loop["milliseconds"] / mine["milliseconds"]
    lines.append(f"| {mine['model']}: speed against a NumPy loop over seeds | {speed:.0f} × |")
    lines += [
        f"| {name}: simulations, bounds and drawing | {row['milliseconds'] / 1e3:.1f} s |"
        for name, row in rows.items()
        if row["ratio"] is None
    ]
    return "\n".join(lines)


def setting(results: dict) -> str:
    """Where the figures come from."""
    where = results["setting"]
    return (
        f"`{where['command']}` on {where['cores']} cores of an {where['processor']}, torch {where['torch']}, "
        f"jax {where['jax']}: medians, timed by turns in one run{'; ' + where['note'] if 'note' in where else ''}"
    )


TABLES = {"large": large, "small": small, "optax": optax, "theory": theory, "setting": setting}


def filled(text: str, results: dict) -> str:
    """A page with what stands between its markers replaced by the tables they name."""

    def table(match: re.Match) -> str:
        return f"<!-- bench: {match[1]} -->\n{TABLES[match[1]](results)}\n<!-- end -->"

    return re.sub(r"<!-- bench: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    results = json.loads(RESULTS.read_text())
    if "--write" in sys.argv:
        for page in PAGES:
            page.write_text(filled(page.read_text(), results))
    else:
        print("\n\n".join(table(results) for table in TABLES.values()))


if __name__ == "__main__":
    main()
