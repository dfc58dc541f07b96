"""The command: which contests to run, progress, and where the results go."""

import functools
import importlib.util
import math
import os
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its profiler tells of every start

import torch
from rich.console import Console

from carryclip_lab.bench import models, report, runner
from carryclip_lab.bench.runner import Row
from carryclip_lab.commands.output import make_folder

QUIET_SECONDS = 30
"""Between two lines about the progress where there is no terminal."""


PARTS = ("clipping", "overhead", "scaling", "end-to-end", "optax", "theory")


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
        console.print('optax is not installed, so its part is left out; in a clone, pip install ".[jax]" brings it.')
        jax = False
    times = repeats or (11 if quick else 21)
    chosen_parts = part or (("clipping", "overhead") if quick else PARTS)
    command = "carryclip bench" + (" --quick" if quick else "") + "".join(f" --part {name}" for name in part or [])
    command += "".join(f" --model '{name}'" for name in model or [])
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

        largest = max(chosen, key=lambda name: sum(map(math.prod, models.MODELS[name]())))
        compiles = compile and not quick
        contests: dict[str, list[Callable[[], list[Row]]]] = {
            "clipping": [functools.partial(runner.clipping, name, times, compiles, say) for name in chosen],
            "overhead": [functools.partial(runner.overhead, times, say)],
            "scaling": [functools.partial(runner.scaling, runner.SIZES, times, compiles, say)],
            "end-to-end": [functools.partial(runner.end_to_end, 10 * times, compiles, say)],
            "optax": [functools.partial(runner.optax_contest, largest, times, say)] if jax else [],
            "theory": [functools.partial(runner.theory, times, not quick, say)],
        }
        for contest in (contest for name in PARTS if name in chosen_parts for contest in contests[name]):
            rows += contest()
            results = runner.as_json(rows, command)
            report.save(results, folder / "bench.json")  # whatever happens later
    report.show(results, console)
    figures = report.draw(results, folder)
    look = f"Open [bold]{figures[0]}[/bold]; the" if figures else "The"
    console.print(f"\nDone in {time.perf_counter() - start:.0f} s. {look} figures are in {folder / 'bench.json'}.")
    return 0
