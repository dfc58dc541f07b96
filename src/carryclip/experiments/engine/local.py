"""Runs on this machine, in processes of a pebble pool: one that is killed costs its run a new start, no more."""

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from pebble import ProcessExpired, ProcessPool

from carryclip.experiments.engine import work
from carryclip.experiments.engine.owners import free_the_dead
from carryclip.experiments.engine.settings import Setting
from carryclip.experiments.spec import Spec
from carryclip.experiments.store import Store

Tick = Callable[[], None]
KILLS = 20
"""Times that a run may be killed from outside before it is given up."""
FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT}


class LocalEngine:
    """A pool of worker processes and the runs that are in it.

    Workers write to the store themselves: SQLite's locks are the kernel's, so a worker that is killed holds up nobody.

    Args:
        store: where runs come from and go to.
        owner: in whose name they are taken.
        setting: for the workers.
        workers: how many at a time.
        timeout: seconds that a run may take; None for no limit.
    """

    def __init__(self, store: Store, owner: str, setting: Setting, *, workers: int, timeout: float | None) -> None:
        self.store, self.owner, self.setting = store, owner, setting
        self.workers, self.timeout = workers, timeout
        self._flying: dict[Future[None], Spec] = {}
        self._kills: Counter[str] = Counter()

    def run(self, study: str, tick: Tick) -> None:
        """Work until no run of the study waits or runs, here or elsewhere."""
        while True:
            with self._pool() as pool:
                try:
                    self._work(pool, study, tick)
                    return
                except BrokenProcessPool:  # a worker was killed while it had nothing to do
                    self._flying.clear()
                    self.store.give_back(self.owner)

    def _work(self, pool: ProcessPool, study: str, tick: Tick) -> None:
        while True:
            self._fill(pool, study)
            tick()
            if self._flying:
                done, _ = wait(self._flying, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    self._land(future, self._flying.pop(future))
            elif self.store.unfinished(study):
                time.sleep(0.5)  # others are at work on the rest; should they die, it is for us
                free_the_dead(self.store)
            else:
                return

    def _fill(self, pool: ProcessPool, study: str) -> None:
        while len(self._flying) < self.workers and (taken := self.store.take(study, self.owner)):
            spec = taken[0]
            arguments = (spec.canonical, str(self.store.path), self.owner, self.setting)
            self._flying[pool.schedule(work.run, args=arguments, timeout=self.timeout)] = spec

    def _land(self, future: Future[None], spec: Spec) -> None:
        """A worker is through with a run, or through with itself."""
        told = work.environment(self.setting)
        try:
            future.result()
        except TimeoutError:
            message = f"Stopped after {self.timeout:g} s, the limit for a run."
            self.store.finish(spec.id, self.owner, "timeout", message=message, environment=told)
        except CancelledError:
            self.store.give_back(self.owner, spec.id)
        except ProcessExpired as error:
            self._expired(spec, error.exitcode)

    def _expired(self, spec: Spec, code: int) -> None:
        told = work.environment(self.setting)
        self._kills[spec.id] += 1
        if code in FROM_OUTSIDE and not self._memory_ran_out() and self._kills[spec.id] < KILLS:
            self.store.give_back(self.owner, spec.id)
            return
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            said = "The worker was killed, as the system does when memory runs out; take fewer workers, or more memory."
            self.store.finish(spec.id, self.owner, "oom", message=said, environment=told)
        else:
            said = f"The worker process died of {name}."
            self.store.finish(spec.id, self.owner, "crashed", message=said, environment=told)

    def _memory_ran_out(self) -> bool:
        before, self._ooms = self._ooms, _kernel_ooms()
        return self._ooms > before

    @contextmanager
    def _pool(self) -> Iterator[ProcessPool]:
        self._ooms = _kernel_ooms()
        context = multiprocessing.get_context("spawn")
        pool = ProcessPool(self.workers, initializer=work.die_with_parent, initargs=(os.getpid(),), context=context)
        try:
            yield pool
            pool.close()
        finally:
            pool.stop()
            pool.join()


def _kernel_ooms() -> int:
    """How often the kernel has killed for want of memory, here or in this container."""
    total = 0
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        try:
            for line in Path(path).read_text(encoding="ascii").splitlines():
                total += int(line.split()[1]) if line.startswith("oom_kill ") else 0
        except (OSError, ValueError):
            continue
    return total
