"""The seconds that ``carryclip plan`` expects of ``digits-smoke``, and those that it then takes.

    python benchmarks/plan.py                                # once
    python benchmarks/plan.py --repeats 5                    # again and again, each into a new store
    python benchmarks/plan.py --only batch=64 --only seed=0  # only these runs

Timed are the runs and the start of their workers, not the report, which a plan does not count either. A ratio above 1
means that it took longer than planned.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from carryclip_lab.commands.plan import default_workers, estimate
from carryclip_lab.commands.reproduce import restriction
from carryclip_lab.engine.calibration import calibrate
from carryclip_lab.engine.settings import Options
from carryclip_lab.engine.supervise import supervise
from carryclip_lab.grid import Study, load, matches


def planned(study: Study, wanted: Mapping[str, set[str]], workers: int) -> float:
    """Seconds by the plan, from rates that are measured now."""
    pairs = [pair for pair in zip(study.specs, study.typical, strict=True) if matches(pair[0], wanted)]
    return estimate(pairs, calibrate([spec for spec, _ in pairs], workers), workers)


def taken(study: Study, wanted: Mapping[str, set[str]], workers: int) -> float:
    """Seconds on the clock."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        code = supervise([study], Path(folder) / "runs.sqlite", Options(workers=workers), Console(stderr=True), wanted)
        if code:
            raise SystemExit(code)
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", action="append", default=[])
    given = parser.parse_args()
    study, workers = load("digits-smoke"), default_workers()
    try:
        wanted = restriction(given.only)
    except ValueError as error:
        parser.error(str(error))
    runs = sum(matches(spec, wanted) for spec in study.specs)
    if not runs:
        parser.error("No run is left by --only.")
    print(f"{runs} runs of {study.name} by {workers} worker(s)\nplanned    taken  ratio", flush=True)
    for _ in range(given.repeats):
        expected = planned(study, wanted, workers)
        seconds = taken(study, wanted, workers)
        print(f"{expected:5.1f} s  {seconds:5.1f} s  {seconds / expected:5.2f}", flush=True)


if __name__ == "__main__":
    main()
