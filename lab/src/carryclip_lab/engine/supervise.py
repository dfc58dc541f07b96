"""The command behind ``carryclip reproduce STUDY``: take runs, have them done, survive what comes, say how it went."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from carryclip_lab.commands.output import complain
from carryclip_lab.engine import work
from carryclip_lab.engine.display import Display, tally
from carryclip_lab.engine.owners import Heart, free_the_dead, new_owner
from carryclip_lab.engine.settings import Options, Setting
from carryclip_lab.grid import Study, matches
from carryclip_lab.store.records import FAULTS, duration
from carryclip_lab.store.store import Store


def supervise(
    studies: Sequence[Study],
    path: Path,
    options: Options,
    console: Console,
    only: Mapping[str, Collection[str]] | None = None,
    *,
    retry: bool = False,
    team: Any = None,
) -> int:
    """Run studies to their end: 0 if all went well, 1 if runs failed or were left to others, 130 if stopped.

    Args:
        studies: one after the other.
        path: of the store.
        options: how to run them.
        console: where to say how far it is.
        only: field → values of the runs that are wanted.
        retry: do runs again that failed for reasons of their own.
        team: the processes that torchrun has started, of which this one leads.
    """
    owner = new_owner()
    begun = time.monotonic()
    wanted = {study.name: {spec.id for spec in study.specs if matches(spec, only)} for study in studies}
    with Store(path) as store, Heart(str(path.resolve()), owner):
        for study in studies:
            store.add(study)
            store.restrict(wanted[study.name])
            if retry:
                store.retry(study.name, FAULTS)
        free_the_dead(store)
        engine = _engine(store, owner, options, team)
        try:
            with _stoppable():  # after the engine, since Ray takes the signals for itself
                for study in studies:
                    store.restrict(wanted[study.name])
                    with Display(console, store, study, wanted[study.name]) as display:
                        engine.run(study.name, display.tick)
                engine.close()
        except KeyboardInterrupt:
            store.give_back(owner)
            console.print(
                f"\nStopped. What is done is in {path}; half-done runs go on from their last checkpoint.\n"
                f"To go on: the same command again. To look: carryclip status --store {path}\n"
                f"For a report of what is there: carryclip report --store {path}",
                highlight=False,
                markup=False,
            )
            return 130
        except BaseException:
            store.give_back(owner)
            raise
        _sweep(store)
        return _conclude(store, studies, wanted, console, time.monotonic() - begun)


def _conclude(
    store: Store, studies: Sequence[Study], wanted: Mapping[str, set[str]], console: Console, spent: float
) -> int:
    failed: Counter[str] = Counter()
    for study in studies:
        records = store.records(study.name, FAULTS)
        failed.update(str(record.outcome) for record in records if record.spec.id in wanted[study.name])
        store.restrict(wanted[study.name])
        said = tally(store.progress_of_chosen(study.name))
        if (rest := len(study.specs) - len(wanted[study.name])) > 0:
            said += f" (the study has {rest:,} more)"
        console.print(f"{study.name}: {said}; {duration(spent)}.", highlight=False, markup=False)
    if undone := len(set().union(*wanted.values()) - store.done()):
        complain(
            console,
            f"{undone} runs are not done: another command has taken them, or has put another study of the same name "
            f"into {store.path}. The same command again does what is left.",
        )
    if not failed:
        return 1 if undone else 0
    said = ", ".join(f"{count} {fault}" for fault, count in failed.items())
    complain(
        console,
        f"Runs failed: {said}. See why: carryclip status --failed --store {store.path}\n"
        "Once the cause is gone: the same command with --retry",
    )
    return 1


def _sweep(store: Store) -> None:
    """Remove checkpoints of runs that are done, except those that failed and may be tried again."""
    from carryclip_lab.store import checkpoints

    done = store.done(but=FAULTS)
    for left in checkpoints.folder(store.path).glob("*.pt*"):
        if left.name.partition(".")[0] in done:
            left.unlink(missing_ok=True)


def setting_of(path: Path, options: Options) -> Setting:
    """What workers are told."""
    told = options if isinstance(options, Setting) else Setting(**vars(options))
    paths = (str(Path.cwd()), *told.paths)
    return replace(told, store=str(path.resolve()), commit=work.commit(), paths=paths)


def _engine(store: Store, owner: str, options: Options, team: Any) -> Any:
    """The engine of the options' choice, or the one for processes that work together."""
    setting = setting_of(store.path, options)
    if team is not None:
        from carryclip_lab.engine.together import TogetherEngine

        return TogetherEngine(store, owner, setting, team)
    if options.engine == "ray":
        if options.address is None and "RAY_ADDRESS" not in os.environ:
            # Before ray is imported: ports of one that is started here are for this machine, and for who has its token.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        from carryclip_lab.engine.cluster import RayEngine

        return RayEngine(store, owner, setting)
    from carryclip_lab.commands.plan import default_workers
    from carryclip_lab.engine.local import LocalEngine

    workers = options.workers or default_workers(options.threads, options.device)
    return LocalEngine(store, owner, setting, workers)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let a polite kill be like Ctrl-C."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # What is ignored already, as under nohup, stays so.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
