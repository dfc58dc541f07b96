"""The command behind ``carryclip reproduce STUDY``: take runs, have them done, survive what comes, say how it went."""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from carryclip.experiments.engine import work
from carryclip.experiments.engine.display import Display, tally
from carryclip.experiments.engine.owners import Heart, free_the_dead, new_owner
from carryclip.experiments.engine.settings import Options, Setting
from carryclip.experiments.grid import Study, matches
from carryclip.experiments.plan import hours
from carryclip.experiments.store import Store

FAULTS = ("oom", "timeout", "crashed")
"""Outcomes that say nothing about the method."""


def supervise(
    studies: Sequence[Study], path: Path, options: Options, console: Console, only: dict[str, Any] | None = None
) -> int:
    """Run studies to their end: 0 if all went well, 1 if runs failed, 130 if stopped."""
    owner = new_owner()
    begun = time.monotonic()
    with Store(path) as store, Heart(str(path), owner), _stoppable():
        try:
            for study in studies:
                store.add(study)
            free_the_dead(store)
            for study in studies:
                wanted = {spec.id for spec in study.specs if matches(spec, only)}
                store.restrict(wanted)
                with Display(console, store, study, wanted) as display:
                    engine(store, owner, options).run(study.name, display.tick)
        except KeyboardInterrupt:
            store.give_back(owner)
            console.print(
                f"\nStopped. What is done is in {path}; half-done runs go on from their last checkpoint.\n"
                f"To go on: [bold]the same command again[/bold]. To look: [bold]carryclip status --store {path}[/bold]",
                highlight=False,
            )
            return 130
        except BaseException:
            store.give_back(owner)
            raise
        failed: Counter[str] = Counter()
        for study in studies:
            progress = store.progress(study.name)
            failed.update({fault: progress[fault] for fault in FAULTS})
            console.print(f"{study.name}: {tally(progress)}; {hours(time.monotonic() - begun)}.", highlight=False)
    if sum(failed.values()):
        said = ", ".join(f"{count} {fault}" for fault, count in failed.items() if count)
        console.print(f"[red]Runs failed: {said}. See why: carryclip status --failed --store {path}", highlight=False)
        return 1
    return 0


def engine(store: Store, owner: str, options: Options) -> Any:
    """The engine of the options' choice."""
    setting = Setting(
        threads=options.threads,
        device=options.device,
        memory=options.memory,
        checkpoints=str(store.path.resolve().with_suffix(".checkpoints")),
        every=options.every,
        commit=work.commit(),
        paths=(str(Path.cwd()),),
    )
    if options.engine == "ray":
        from carryclip.experiments.engine.cluster import RayEngine

        return RayEngine(
            store,
            owner,
            setting,
            address=options.address,
            workers=options.workers,
            gpus=options.gpus,
            timeout=options.timeout,
        )
    from carryclip.experiments.engine.local import LocalEngine
    from carryclip.experiments.plan import default_workers

    workers = options.workers or default_workers(options.threads)
    return LocalEngine(store, owner, setting, workers=workers, timeout=options.timeout)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let a polite kill be like Ctrl-C."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
