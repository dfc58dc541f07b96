"""Runs on this machine, in processes of a pebble pool: one that is killed costs its run a new start, no more."""

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path

from pebble import CONSTS, ProcessExpired, ProcessPool

from carryclip_lab.engine import work
from carryclip_lab.engine.owners import Claims, free_the_dead
from carryclip_lab.engine.settings import Setting, limit_of
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import End, Outcome
from carryclip_lab.store.store import Store

Tick = Callable[[], None]
KILLS = 20
"""Times that a run may be killed from outside before it is given up."""
PATIENCE = 30.0
"""Seconds that a worker has to save its run when it is asked to stop."""
BREAKS = 5
"""Pools in a row that may break before one of their runs has ended."""
FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT, int(signal.SIGTERM)}
"""Exit codes of workers that someone stopped; pebble's leave with a positive one when asked politely."""
LEFT = 256
"""What stands for an exit code of 0, which no worker should have before the pool is closed."""


class _Worker(SpawnProcess):
    """A worker whose departure is noticed: pebble takes 0 for a good end, and the run would wait for ever."""

    @property
    def exitcode(self) -> int | None:
        code = super().exitcode
        return LEFT if code == 0 else code


class _Spawn(SpawnContext):
    Process = _Worker


class LocalEngine:
    """A pool of worker processes and the runs that are in it.

    Workers write to the store themselves: SQLite's locks are the kernel's, so a worker that is killed holds up nobody.

    Args:
        store: where runs come from and go to.
        owner: in whose name they are taken.
        setting: for the workers.
        workers: how many at a time.
    """

    def __init__(self, store: Store, owner: str, setting: Setting, workers: int) -> None:
        self.store, self.owner, self.setting, self.workers = store, owner, setting, workers
        self._flying: dict[Future[None], tuple[Spec, str]] = {}
        self._begun: dict[Future[None], float] = {}
        self._claims = Claims(store, owner)
        self._again: Counter[str] = Counter()
        self._landed = self._breaks = 0
        self._ooms, self._oom_seen = _kernel_ooms(), -math.inf

    def run(self, study: str, tick: Tick) -> None:
        """Work until no run of the study waits or runs, here or elsewhere."""
        while True:
            before = self._landed
            with self._pool() as pool:
                try:
                    self._work(pool, study, tick)
                    return
                except BrokenProcessPool:  # a worker was killed while it had nothing to do
                    self._flying.clear()
                    self._begun.clear()
                    self.store.give_back(self.owner)
            self._breaks = self._breaks + 1 if self._landed == before else 0
            if self._breaks >= BREAKS:
                raise RuntimeError(
                    "Worker processes do not start, or die at once. Is there memory for them? A script that calls "
                    'this needs the line: if __name__ == "__main__":'
                )

    def close(self) -> None:
        """Each study has had a pool of its own."""

    def _work(self, pool: ProcessPool, study: str, tick: Tick) -> None:
        while True:
            self._fill(pool, study)
            tick()
            self._look_at_memory()
            if self._flying:
                done, _ = wait(self._flying, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    self._begun.pop(future, None)
                    self._land(future.exception(), *self._flying.pop(future))
                self._stop_the_late()
            elif self.store.unfinished(study):
                time.sleep(0.5)  # others are at work on the rest; should they die, it is for us
                free_the_dead(self.store)
            else:
                return

    def _fill(self, pool: ProcessPool, study: str) -> None:
        while len(self._flying) < self.workers and (taken := self._claims.next(study)):
            spec, claim = taken
            arguments = (spec.canonical, str(self.store.path.resolve()), claim, self.setting)
            try:
                future = pool.schedule(work.run, args=arguments)
            except RuntimeError as error:  # what pebble says once its pool is broken
                raise BrokenProcessPool(str(error)) from None
            self._flying[future] = taken

    def _stop_the_late(self) -> None:
        """By a clock that cannot be set, as that of pebble's own limits can."""
        now = time.monotonic()
        for future in [future for future in self._flying if future.running()]:
            limit = limit_of(self._flying[future][0], self.setting.timeout)
            if limit is not None and now - self._begun.setdefault(future, now) > limit:
                future.cancel()
                del self._begun[future]
                said = f"Stopped after {limit:g} s, the limit for a run."
                self._end(*self._flying.pop(future), End("timeout", message=said))

    def _land(self, error: BaseException | None, spec: Spec, claim: str) -> None:
        """A worker is through with a run, or through with itself."""
        if isinstance(error, BrokenProcessPool):
            raise error
        if isinstance(error, ProcessExpired):
            self._expired(spec, claim, error.exitcode)
        elif error is not None:  # the store, not the run: training makes outcomes of its own errors
            self._once_more(spec, claim, f"{type(error).__name__}: {error}", "crashed")
        else:
            self._landed += 1
            if claim in self.store.owners():  # it ended without a word
                self._once_more(spec, claim, "The worker ended without a result.", "crashed")

    def _expired(self, spec: Spec, claim: str, code: int) -> None:
        name = _signal_name(-code) if code < 0 else f"exit code {code % LEFT}"
        self._look_at_memory()
        if code == -signal.SIGKILL and time.monotonic() - self._oom_seen < 5.0:
            said = "The system killed the worker because memory ran out; take fewer workers, or more memory."
            self._end(spec, claim, End("oom", message=said))
        elif code in FROM_OUTSIDE:
            self._once_more(spec, claim, f"The worker was killed {KILLS} times ({name}).", "oom")
        else:
            self._end(spec, claim, End("crashed", message=f"The worker process died of {name}."))

    def _once_more(self, spec: Spec, claim: str, why: str, otherwise: Outcome) -> None:
        """Let the run be taken again, unless it has been too often."""
        self._again[spec.id] += 1
        if self._again[spec.id] < KILLS:
            self.store.give_back(claim)
        else:
            self._end(spec, claim, End(otherwise, message=why))

    def _end(self, spec: Spec, claim: str, end: End) -> None:
        self._landed += 1
        work.write(self.store, claim, spec, end, work.environment(self.setting))

    def _look_at_memory(self) -> None:
        before, self._ooms = self._ooms, _kernel_ooms()
        if self._ooms > before:
            self._oom_seen = time.monotonic()

    @contextmanager
    def _pool(self) -> Iterator[ProcessPool]:
        CONSTS.term_timeout = PATIENCE
        pool = ProcessPool(self.workers, initializer=work.die_with_parent, initargs=(os.getpid(),), context=_Spawn())
        try:
            yield pool
            pool.close()
        finally:
            pool.stop()
            pool.join()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kernel_ooms(root: Path = Path("/")) -> int:
    """How often the kernel has killed for want of memory: in this process's control group, else on the machine."""
    for path in (*_memory_events(root), root / "proc/vmstat"):
        try:
            words = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
            return next(int(count) for name, count in words if name == "oom_kill")
        except (OSError, ValueError, StopIteration):
            continue
    return 0


def _memory_events(root: Path) -> list[Path]:
    """Where control groups (version 2) count such kills: this process's own, then those around it.

    A container may read the host's name of its group and have the group's files at the top, where the last one looks.
    """
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = next((top / line.removeprefix("0::/") for line in lines if line.startswith("0::/")), top)
    return [folder / "memory.events" for folder in (own, *own.parents) if folder.is_relative_to(top)]
