"""The command behind ``carryclip reproduce theory``: simulate, save figures, captions and numbers, judge the claims."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from carryclip import __version__
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.commands.output import make_folder, many, save_figure, save_rows, tells_errors
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
    setting = {"command": command, "carryclip": __version__, **asdict(scale)}
    unfinished = Unfinished(folder, setting)
    with _progress(console) as progress:
        for each in chosen:
            title = (STUDIES | ALONE)[each].title
            if each in unfinished.claims:
                console.print(f"[bold]{title}[/bold]: done before", highlight=False)
                continue
            try:
                result, paths = reproduce(each, scale, folder, progress)
            except KeyboardInterrupt:
                progress.stop()
                return _stopped(console, folder, chosen, unfinished)
            console.print(f"[bold]{title}[/bold]: {paths[0]}", highlight=False)
            seeds = corrupted.SEEDS if each in ALONE else scale.seeds
            told = [replace(claim, tier=scale.tier, seeds=seeds, command=command) for claim in result.claims]
            unfinished.note(each, told)
    judged = [claim for each in chosen for claim in unfinished.claims[each]]
    for claim in judged:
        said = f"{claim.statement} ({claim.paper})"
        table.add_row(claim.id, said, claim.ours, f"[bold]{claim.verdict}[/bold]")
    record = {"setting": setting, "claims": [asdict(claim) for claim in judged]}
    (folder / "claims.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.end()
    if table.row_count:
        console.print(table)
    page = write_page(folder)
    console.print(
        f"\nDone in {time.perf_counter() - start:.0f} s. Open [bold]{page}[/bold], which has all figures with their "
        "captions. Beside it is each figure as PNG, SVG and PDF, its caption as .txt and its numbers as .csv.",
        highlight=False,
    )
    return 0


def write_page(folder: Path) -> Path:
    """All figures of a folder, captions and what they say of the paper's claims, on one page that works offline."""
    from carryclip_lab.report.build import lines, render
    from carryclip_lab.report.theory import read_theory

    section = read_theory(folder)
    page = folder / "figures.html"
    page.write_text(render([section], lines([section])), encoding="utf-8")
    return page


class Unfinished:
    """What a command has done so far, beside the figures, so that it can be stopped; gone when it ends.

    It counts only for a command that would compute the same: figures that are complete are drawn anew when asked for.
    """

    def __init__(self, folder: Path, setting: dict[str, Any]) -> None:
        self.path, self.setting = folder / "unfinished.json", setting
        self.claims: dict[str, list[Claim]] = {}
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
            if told["setting"] == setting:
                self.claims = {name: [Claim(**claim) for claim in claims] for name, claims in told["done"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return  # none, or not ours: begin at the beginning

    def note(self, name: str, claims: list[Claim]) -> None:
        """A figure is drawn and saved."""
        self.claims[name] = claims
        done = {each: [asdict(claim) for claim in told] for each, told in self.claims.items()}
        text = json.dumps({"setting": self.setting, "done": done}, ensure_ascii=False)
        aside = self.path.with_suffix(".part")
        aside.write_text(text, encoding="utf-8")
        aside.replace(self.path)

    def end(self) -> None:
        """Everything is done."""
        self.path.unlink(missing_ok=True)


def _stopped(console: Console, folder: Path, chosen: list[str], unfinished: Unfinished) -> int:
    done = [name for name in chosen if name in unfinished.claims]
    said = f"{len(done)} of {many(len(chosen), 'figure')} in {folder}"
    said += f": {', '.join(done)}." if done else "."
    console.print(f"\nStopped. Done: {said}\nTo go on: the same command again.", highlight=False, markup=False)
    return 130


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
