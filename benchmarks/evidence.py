"""The published trials of ``evidence-small``: what was done of every run, in one file, and all that pages say of it.

    python benchmarks/published.py evidence STORE   # fills docs/evidence, docs/when-to-use.md and README.md

Kept is one row for each run with what was measured after its last step. A method with one optimizer in one trial is
kept if all of its runs are done; what is left out is told by name.
"""

import functools
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from carryclip_lab import grid
from carryclip_lab.analysis import rule, tables
from carryclip_lab.analysis.answers import DEFAULT
from carryclip_lab.analysis.naming import CLIP, METHODS
from carryclip_lab.analysis.summary import Cell, Summary, summarise
from carryclip_lab.analysis.worth import Row, blocks, row_name, stills
from carryclip_lab.spec import OPTIMIZERS, Spec
from carryclip_lab.store.records import Epoch, Record, last

STUDY = "evidence-small"
FILE = "runs.parquet"
SHOWN = ("Skewed amounts", "Visits to the doctor", "One spiked batch")
"""Trials whose learning rates are drawn; the others are in the report that the command makes."""
COLUMNS = ("spec", "outcome", "seconds", "metrics", "environment")
DIGITS = 7
"""Of a number that was measured."""


def publish(folder: Path, store_path: str) -> None:
    """Write the file of runs and the figures."""
    from carryclip_lab.store.store import Store

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with Store(store_path, create=False) as store:
        rows = _rows(store.records(STUDY), store.epochs)
    _write(folder / FILE, rows)
    for part in parts(folder):
        names = ["frozen"] if part.subject and part.subject.kind == "frozen" else ["worth"]
        if names == ["frozen"] or part.data in SHOWN:
            _draw(part, names[0], folder / "figures")


def _rows(records: Iterable[Record], epochs: Any) -> list[dict[str, Any]]:
    """Of the cells that are whole; lists that were measured are for the mean over seeds, and are left out."""
    found = []
    for part in summarise(STUDY, STUDY, "small", records, epochs):
        for cell in part.cells:
            if cell.partial:
                continue
            for record in cell.records:
                seen = epochs(record.spec.id)
                metrics = seen[-1].metrics if seen else {}
                numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
                kept = {name: float(f"{value:.{DIGITS}g}") for name, value in numbers.items()}
                found.append(
                    {
                        "spec": record.spec.canonical,
                        "outcome": record.outcome,
                        "seconds": round(record.seconds or 0.0, 3),
                        "metrics": json.dumps(kept, sort_keys=True),
                        "environment": json.dumps(record.environment, sort_keys=True),
                    }
                )
    return found


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: [row[name] for row in rows] for name in COLUMNS})
    pyarrow.parquet.write_table(table, path, compression="zstd", compression_level=19)


def _draw(part: Summary, name: str, place: Path) -> None:
    import matplotlib

    from carryclip_lab.commands.output import save_figure
    from carryclip_lab.figures import draw
    from carryclip_lab.figures.style import RC
    from carryclip_lab.report.sections import slug

    drawn = draw(name, part)
    if drawn is None:
        return
    folder = place / slug(part.data.lower())
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(RC):
        save_figure(drawn.figure, folder, name, ["svg"])
    (folder / f"{name}.txt").write_text(drawn.caption + "\n", encoding="utf-8")


# ---------------------------------------------------------------------- reading


def records(folder: Path) -> tuple[list[Record], dict[str, list[Epoch]]]:
    """The published runs, and of each the end of its last epoch."""
    import pyarrow.parquet

    found: list[Record] = []
    ends: dict[str, list[Epoch]] = {}
    for row in pyarrow.parquet.read_table(folder / FILE).to_pylist():
        spec = Spec.from_canonical(row["spec"])
        reached = spec.epochs if row["outcome"] == "reached" else None
        environment = json.loads(row["environment"])
        found.append(Record(spec, "done", row["outcome"], reached, row["seconds"], None, environment))
        metrics = json.loads(row["metrics"])
        ends[spec.id] = [Epoch(spec.epochs, loss=0.0 if metrics else None, metrics=metrics, seconds=row["seconds"])]
    return found, ends


@functools.cache
def parts(folder: Path) -> list[Summary]:
    """The trials, from the published runs."""
    found, ends = records(folder)
    study = grid.load(STUDY)
    return summarise(STUDY, study.title, study.tier, found, lambda run: ends[run])


@functools.cache
def told(folder: Path) -> dict[str, Any]:
    """What the rules say of them."""
    name = grid.rules_of(STUDY)
    assert name is not None
    return rule.told(parts(folder), rule.read(name), DEFAULT)


# ---------------------------------------------------------------------- what pages say


def said(folder: Path, what: str) -> str:
    """What stands between a page's markers."""
    match what.split():
        case ["cost"]:
            done = records(folder)[0]
            seconds = sum(record.seconds or 0.0 for record in done)
            return f"{len(done):,} runs, {seconds / 3600:.1f} hours of one core that was shared with other work."
        case ["advice"]:
            said_of = told(folder)["families"]
            return "\n".join(f"- **{family}** ({trials}): {words}" for family, _, words, trials in said_of)
        case ["candidates"]:
            heads = ["carry", "surely worse than plain clipping in", "where", "of clipping's error gone"]
            return _lines(heads, told(folder)["candidates"])
        case ["uncontrolled"]:
            return _lines(["trial", "what wins", "its control"], told(folder)["uncontrolled"])
        case ["edges"]:
            return _edges(told(folder)["edges"])
        case ["left-out"]:
            return _left_out(folder)
        case ["frozen"]:
            return _frozen(folder)
        case ["default"]:
            return _default(told(folder))
        case ["totals"]:
            return _totals(folder)
        case ["trials", name]:
            lines = tables.together(name, map(tables.parts, parts(folder)))
            kept = [place for place, _ in enumerate(tables.HEADS[name]) if any(line[place] for line in lines)]
            heads = [tables.HEADS[name][place] for place in kept]
            return _lines(heads, [[line[place] for place in kept] for line in lines])
        case ["figure", place, name]:
            return (folder / "figures" / place / f"{name}.txt").read_text(encoding="utf-8").strip()
    raise ValueError(f"Nothing is known of {what!r}.")


def _lines(heads: Sequence[str], table: Iterable[Sequence[str]]) -> str:
    cells = [list(heads), ["---"] * len(heads), *table]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells)


def _default(found: dict[str, Any]) -> str:
    picked, lines = found["default"], f"{found['compared']} lines in which all carries were run"
    if not found["compared"]:
        return "There are no lines yet in which all carries were run."
    if picked is None:
        return f"By the rule no carry may be the default: each is surely worse somewhere ({lines})."
    word = "is confirmed" if found["confirmed"] else "is not the one that the rule picks"
    return f"The default, `{DEFAULT.carry!r}`, {word}: the rule picks {picked} ({lines})."


def _edges(edges: Sequence[Sequence[str]]) -> str:
    """By line, one after the other."""
    if not edges:
        return "Nowhere."
    grouped = itertools.groupby(edges, key=lambda edge: edge[0])
    return "\n".join(
        f"- {line}: {', '.join(f'{method} at {lr} ({side})' for _, method, lr, side in group)}"
        for line, group in grouped
    )


def _left_out(folder: Path) -> str:
    """What the study has and is not here: whole trials first, then methods with the trials that lack them."""
    here = {record.spec.id for record in records(folder)[0]}
    study = grid.load(STUDY)
    planned = [Record(spec, "waiting", None, None, None, None, {}) for spec in study.specs]
    gone: list[str] = []
    lacking: dict[str, list[str]] = {}
    for part in summarise(STUDY, study.title, study.tier, planned, lambda run: []):
        missing = [cell for cell in part.cells if not any(record.spec.id in here for record in cell.records)]
        if len(missing) == len(part.cells):
            gone.append(part.data)
            continue
        for method, optimizers in _by_method(missing, min(part.batches)).items():
            whole = len(optimizers) == len(part.optimizers)
            lacking.setdefault(method, []).append(part.data + ("" if whole else f" ({', '.join(optimizers)})"))
    told = [f"- Trials: {'; '.join(gone)}."] if gone else []
    told += [f"- {method}: {'; '.join(trials)}." for method, trials in lacking.items()]
    return "\n".join(told) or "Nothing."


def _by_method(cells: Iterable[Cell], least: int) -> dict[str, list[str]]:
    """Optimizers by the method's words."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        name = row_name(cell.setting.method, cell.batch / least)
        optimizers = found.setdefault(name, [])
        if OPTIMIZERS[cell.setting.optimizer] not in optimizers:
            optimizers.append(OPTIMIZERS[cell.setting.optimizer])
    return found


def _totals(folder: Path) -> str:
    """What is predicted in all by the true total, mean over seeds, at plain clipping's best rate."""
    table = []
    for part in parts(folder):
        for block in blocks(part):
            plain = block.find(CLIP)
            if block.subject.bias != "calibration" or plain is None or plain.cell.lr is None:
                continue
            rows = [block.find(method) for method in METHODS]
            told = [_total(part, row, plain.cell.lr) if row else "" for row in rows]
            table.append([block.subject.title, block.stepped_by, *told])
    return _lines(["trial", "optimizer", *(method.words for method in METHODS)], table)


def _total(part: Summary, row: Row, lr: float) -> str:
    seen = [last(part.epochs(record.spec.id), "calibration") for record in row.cell.runs.get(lr, {}).values()]
    known = [each for each in seen if each is not None]
    return f"{statistics.fmean(known):.3f}" if known and len(known) == len(seen) else "nothing"


def _frozen(folder: Path) -> str:
    """What the mean step lacks along its own direction, and what of it goes astray, in percent, at each radius."""
    lines = []
    for part in parts(folder):
        for (optimizer, method), group in itertools.groupby(
            sorted(stills(part), key=lambda each: (list(OPTIMIZERS).index(each.optimizer), each.method.order)),
            key=lambda each: (each.optimizer, each.method),
        ):
            cells = [f"{100 * each.share.value:+.0f} / {100 * (each.astray or math.nan):.0f}" for each in group]
            lines.append([OPTIMIZERS[optimizer], method.label, *cells])
    radii = sorted({each.radius for part in parts(folder) for each in stills(part)})
    return _lines(["optimizer", "carry", *(f"radius {radius:g}" for radius in radii)], lines)
