"""The command: which contests to run, progress, and where the results go."""

import functools
import importlib.util
import math
import os
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its profiler tells of every start

import torch
from rich.console import Console

from carryclip.experiments.bench import models, report, runner
from carryclip.experiments.bench.runner import Row
from carryclip.experiments.output import make_folder

QUIET_SECONDS = 30
"""Between two lines about the progress where there is no terminal."""


def main(*, quick: bool, model: list[str] | None, repeats: int | None, compile: bool, jax: bool, out: str) -> int:
    """Run, print, save, draw."""
    console = Console()
    chosen = model or (["conv-net", "600 tiny tensors"] if quick else list(models.MODELS))
    unknown = [name for name in chosen if name not in models.MODELS]
    if unknown:
        console.print(f"[red]There is no model {unknown[0]!r}; choose from: {', '.join(models.MODELS)}.")
        return 2
    if repeats is not None and repeats < 3:
        console.print(f"[red]repeats must be at least 3 for a median with quartiles; got {repeats}.")
        return 2
    folder = make_folder(out, console)
    if folder is None:
        return 2
    if jax and importlib.util.find_spec("optax") is None:
        console.print('optax is not installed, so its part is left out; pip install "carryclip[jax]" brings it.')
        jax = False
    times = repeats or (11 if quick else 21)
    command = "carryclip bench" + (" --quick" if quick else "") + "".join(f" --model '{name}'" for name in model or [])
    results = runner.as_json([], command)
    torch.set_grad_enabled(True)
    start, rows = time.perf_counter(), list[Row]()
    told = -math.inf
    with console.status("starting") as status:

        def say(text: str) -> None:
            nonlocal told
            now = time.perf_counter() - start
            status.update(f"{text} ({now:.0f} s)")
            if not console.is_terminal and now - told >= QUIET_SECONDS:
                told = now
                console.print(f"{now:6.0f} s  {text}", highlight=False)

        parts = [functools.partial(runner.clipping, name, times, compile and not quick, say) for name in chosen]
        parts.append(functools.partial(runner.overhead, times, say))
        if not quick:
            parts.append(functools.partial(runner.scaling, runner.SIZES, times, compile, say))
            parts.append(functools.partial(runner.end_to_end, 10 * times, compile, say))
        if jax and not quick:
            largest = max(chosen, key=lambda name: sum(map(math.prod, models.MODELS[name]())))
            parts.append(functools.partial(runner.optax_contest, largest, times, say))
        for part in parts:
            rows += part()
            results = runner.as_json(rows, command)
            report.save(results, folder / "bench.json")  # whatever happens later
    report.show(results, console)
    figures = report.draw(results, folder)
    console.print(
        f"\nDone in {time.perf_counter() - start:.0f} s. Open [bold]{figures[0]}[/bold]; the figures are in "
        f"{folder / 'bench.json'}."
    )
    return 0
