"""The command behind ``carryclip reproduce``: run the studies, save figures, captions and numbers, judge the claims."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from carryclip import __version__
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.commands.output import make_folder, save_figure, save_rows, tells_errors
from carryclip_lab.theory_figures import (
    aliasing,
    bias,
    corrupted,
    nonconvex,
    norm,
    quadratics,
    recorded,
    regret,
    sweeps,
    windup,
)
from carryclip_lab.theory_figures.study import Result, Scale, Study

STUDIES: dict[str, Study] = {
    "aliasing": aliasing.STUDY,
    "quadratics": quadratics.STUDY,
    "bias": bias.STUDY,
    "carry-bounds": sweeps.CARRY_STUDY,
    "adaptive-bounds": sweeps.ADAPTIVE_STUDY,
    "regret": regret.STUDY,
    "norm-carry": norm.STUDY,
    "wind-up": windup.STUDY,
    "non-convex": nonconvex.STUDY,
    "recorded": recorded.STUDY,
}

ALONE: dict[str, Study] = {"corrupted-rank": corrupted.STUDY}
"""Drawn in the same way but not part of the theory, so only by name; of a size of their own."""


@tells_errors
def main(name: str, scale: Scale, out: str) -> int:
    """Run one study, or all of them for ``"theory"``."""
    console = Console()
    chosen = list(STUDIES) if name == "theory" else [name]
    for field, least in (("steps", 100), ("seeds", 20), ("points", 4)):
        if getattr(scale, field) < least:
            console.print(f"[red]--{field} must be at least {least} for these figures; got {getattr(scale, field)}.")
            return 2
    if scale.seed < 0:
        console.print(f"[red]--seed must be at least 0, got {scale.seed}.")
        return 2
    folder = make_folder(out)
    start = time.perf_counter()
    table = Table(title="The paper's claims", title_justify="left", show_lines=True)
    for column in ("", "the paper", "seen here", "verdict"):
        table.add_column(column)
    command = f"carryclip reproduce {name}"
    judged: list[Claim] = []
    with _progress(console) as progress:
        for each in chosen:
            result, paths = reproduce(each, scale, folder, progress)
            title = (STUDIES | ALONE)[each].title
            console.print(f"[bold]{title}[/bold]: {', '.join(path.name for path in paths)}")
            seeds = corrupted.SEEDS if each in ALONE else scale.seeds
            judged += [replace(claim, tier=scale.tier, seeds=seeds, command=command) for claim in result.claims]
            for claim in result.claims:
                said = f"{claim.statement} ({claim.paper})"
                table.add_row(claim.id, said, claim.ours, f"[bold]{claim.verdict}[/bold]")
    setting = {"command": command, "carryclip": __version__, **asdict(scale)}
    record = {"setting": setting, "claims": [asdict(claim) for claim in judged]}
    (folder / "claims.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if table.row_count:
        console.print(table)
    console.print(
        f"\nDone in {time.perf_counter() - start:.0f} s. Open [bold]{folder / chosen[0]}.png[/bold]; captions end in "
        ".txt, the numbers behind each figure in .csv.",
        highlight=False,
    )
    return 0


def reproduce(name: str, scale: Scale, folder: Path, progress: Progress) -> tuple[Result, list[Path]]:
    """One study: compute, draw, save."""
    study = (STUDIES | ALONE)[name]
    task = progress.add_task(name, total=None)
    data = study.compute(scale, lambda done, total: progress.update(task, completed=done, total=total))
    result = study.present(scale, data)
    if not scale.enough and name not in ALONE:
        result.claims = [replace(claim, verdict="not run at this size") for claim in result.claims]
    progress.remove_task(task)
    paths = save_figure(result.figure, folder, name, formats=("png", "svg", "pdf"))
    paths.append(save_rows(result.rows, folder, name))
    caption = folder / f"{name}.txt"
    caption.write_text(result.caption + "\n", encoding="utf-8")
    return result, [*paths, caption]


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
