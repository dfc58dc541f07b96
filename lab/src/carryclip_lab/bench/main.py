"""The command: which contests to run, progress, and where the results go."""

import importlib.util
import math
import os
import time
from collections.abc import Sequence

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its profiler tells of every start

import torch
from rich.console import Console
from rich.status import Status

from carryclip_lab.bench import models, report, runner
from carryclip_lab.bench.runner import Options, Row
from carryclip_lab.checks import UserError
from carryclip_lab.commands.output import make_folder, tells_errors

QUIET_SECONDS = 30
"""Between two lines about the progress where there is no terminal."""


@tells_errors
def main(
    *,
    quick: bool,
    part: Sequence[str] | None,
    model: list[str] | None,
    repeats: int | None,
    compile: bool,
    jax: bool,
    out: str,
) -> int:
    """Run, print, save, draw."""
    console = Console()
    chosen = model or (["conv-net", "600 tiny tensors"] if quick else list(models.MODELS))
    parts = list(part or (("clipping", "overhead") if quick else runner.PARTS))
    _check(chosen, repeats)
    folder = make_folder(out)
    if "optax" in parts and (not jax or importlib.util.find_spec("optax") is None):
        parts.remove("optax")
        if jax:
            console.print('optax is not installed: its part is left out; in a clone, pip install ".[jax]" brings it.')
    words = ["carryclip bench", *(["--quick"] if quick else []), *(f"--part {name}" for name in part or [])]
    command = " ".join(words + [f"--model '{name}'" for name in model or []])
    rows, start = list[Row](), time.perf_counter()
    torch.set_grad_enabled(True)
    with console.status("starting") as status:
        teller = _Teller(console, status)
        times = repeats or (11 if quick else 21)
        options = Options(chosen, times, compile=compile and not quick, whole=not quick, say=teller)
        for found in (found for name in runner.PARTS if name in parts for found in runner.PARTS[name](options)):
            rows += found
            report.save(runner.as_json(rows, command), folder / "bench.json")  # whatever happens later
    results = runner.as_json(rows, command)
    report.show(results, console)
    figures = report.draw(results, folder)
    look = f"Open [bold]{figures[0]}[/bold]; the" if figures else "The"
    console.print(f"\nDone in {time.perf_counter() - start:.0f} s. {look} figures are in {folder / 'bench.json'}.")
    return 0


def _check(chosen: Sequence[str], repeats: int | None) -> None:
    unknown = [name for name in chosen if name not in models.MODELS]
    if unknown:
        raise UserError(f"There is no model {unknown[0]!r}; choose from: {', '.join(models.MODELS)}.")
    if repeats is not None and repeats < 3:
        raise UserError(f"repeats must be at least 3 for a median with quartiles; got {repeats}.")


class _Teller:
    """Says how far it is: all the time in a terminal, now and then elsewhere."""

    def __init__(self, console: Console, status: Status) -> None:
        self.console, self.status = console, status
        self.start, self.told = time.perf_counter(), -math.inf

    def __call__(self, text: str) -> None:
        now = time.perf_counter() - self.start
        self.status.update(f"{text} ({now:.0f} s)")
        if not self.console.is_terminal and now - self.told >= QUIET_SECONDS:
            self.told = now
            self.console.print(f"{now:6.0f} s  {text}", highlight=False)
