"""The demo: the smoke tier from end to end. The theory's figures, a study of training runs, and the report of both."""

import time
from pathlib import Path

from rich.console import Console

from carryclip_lab.commands import reproduce
from carryclip_lab.commands.output import make_folder, tells_errors
from carryclip_lab.engine.settings import Options
from carryclip_lab.theory_figures import main as theory
from carryclip_lab.theory_figures.study import Scale

SCALE = Scale(seeds=250, points=12)
"""A quarter of the paper's simulations: enough to judge its claims."""
QUICK = Scale(steps=500, seeds=20, points=4)


@tells_errors
def main(*, quick: bool, out: str) -> int:
    """Run it, and say where to look."""
    console = Console()
    begun = time.perf_counter()
    folder = make_folder(out)
    console.rule("1. What the theory says", align="left")
    code = theory.main("theory", QUICK if quick else SCALE, str(folder / "theory"))
    if code:
        return code
    console.rule("2. Training: no clipping, plain clipping, the U-Clip of the paper, our default", align="left")
    code = reproduce.main(
        ["digits-smoke"],
        tier=None,
        only=["seed=0", "batch=64"] if quick else [],
        options=Options(),
        store=str(folder / "store.sqlite"),
        resume=True,
        out=str(folder),
        theory=str(folder / "theory"),
    )
    if code == 0:
        where = Path(out).resolve() / "report.html"
        console.print(f"\nDone in {time.perf_counter() - begun:.0f} s.", highlight=False)
        console.print(f"Open in a browser: {where.as_uri()}", highlight=False, soft_wrap=True)
    return code
