"""Runs on a Ray cluster: workers tell, the driver alone writes, and a node that dies costs its runs a new start."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from carryclip_lab.engine import work
from carryclip_lab.engine.owners import Claims, free_the_dead
from carryclip_lab.engine.settings import Setting, limit_of
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import End, Epoch, Progress
from carryclip_lab.store.store import Store

DEATHS = 3
"""Workers that a run may lose on nodes that live on: a segfault cannot be told from a kill."""


def _train(canonical: str, setting: Setting) -> Iterator[tuple[Epoch | Progress | End | None, dict[str, Any]]]:
    """On a worker: what a run has to tell; nothing first, to say that it has begun."""
    told = work.environment(setting)
    yield None, told
    spec = Spec.from_canonical(canonical)
    for event in work.events(spec, setting):
        yield event, told
        if isinstance(event, End):
            work.clear(spec, setting, event)


class RayEngine:
    """Tasks of a Ray cluster and the runs that are in them.

    Args:
        store: where runs come from and go to, on the driver's disk.
        owner: in whose name they are taken.
        setting: for the workers; its folders are the nodes' own. Without an address a cluster is started here, which
            listens on this machine alone; without a number of workers it gets as many tasks as it has room for.
    """

    def __init__(self, store: Store, owner: str, setting: Setting) -> None:
        self.store, self.owner, self.setting = store, owner, setting
        address = setting.address
        if not ray.is_initialized():
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            ray.init(address=address, include_dashboard=False if address is None else None, **quiet)
        options = {"num_cpus": setting.threads, "num_gpus": setting.gpus, "max_retries": 0, "num_returns": "streaming"}
        self._task = ray.remote(_train).options(**options)
        self._check_room()
        self._flying: dict[Any, tuple[Spec, str]] = {}
        self._claims = Claims(store, owner)
        self._begun: dict[Any, float] = {}
        self._told: dict[Any, dict[str, Any]] = {}
        self._deaths: Counter[str] = Counter()

    def run(self, study: str, tick: Callable[[], None]) -> None:
        """Work until no run of the study waits or runs, here or elsewhere."""
        try:
            while True:
                self._fill(study)
                tick()
                if self._flying:
                    self._listen()
                elif self.store.unfinished(study):
                    time.sleep(0.5)  # others are at work on the rest; should they die, it is for us
                    free_the_dead(self.store)
                else:
                    return
        finally:
            for flight in self._flying:
                ray.cancel(flight, force=True)

    def close(self) -> None:
        """The cluster stays."""

    def _check_room(self) -> None:
        """A task that no node can ever run would wait for ever without a word."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        wanted = {"CPU": float(self.setting.threads), "GPU": self.setting.gpus}
        if not any(all(node.get(kind, 0.0) >= size for kind, size in wanted.items()) for node in nodes):
            raise ValueError(
                f"No node of the cluster has {self.setting.threads} CPUs and {self.setting.gpus:g} GPUs; "
                "take fewer --threads or --gpus, or start larger nodes."
            )

    def _room(self) -> int:
        """Tasks to have in flight: what the cluster can run now, and no queue that grows with the study."""
        if self.setting.workers is not None:
            return self.setting.workers
        total = ray.cluster_resources()
        room = total.get("CPU", 0.0) // self.setting.threads
        if self.setting.gpus:
            room = min(room, total.get("GPU", 0.0) // self.setting.gpus)
        return max(1, int(room))

    def _fill(self, study: str) -> None:
        room = self._room()
        while len(self._flying) < room and (taken := self._claims.next(study)):
            flight = self._task.remote(taken[0].canonical, self.setting)
            self._flying[flight] = taken

    def _listen(self) -> None:
        ready, _ = ray.wait(list(self._flying), num_returns=1, timeout=0.5)
        while ready:  # as much as there is to hear, or short epochs would pile up
            for flight in ready:
                self._hear(flight)
            flights = list(self._flying)
            ready = ray.wait(flights, num_returns=len(flights), timeout=0)[0] if flights else []
        for flight, begun in list(self._begun.items()):
            limit = limit_of(self._flying[flight][0], self.setting.timeout)
            if limit is not None and time.monotonic() - begun > limit:
                ray.cancel(flight, force=True)
                self._end(flight, End("timeout", message=f"Stopped after {limit:g} s, the limit for a run."))

    def _hear(self, flight: Any) -> None:
        """The next thing that a task tells, or why it tells nothing more."""
        try:
            event, told = ray.get(next(flight))
        except StopIteration:
            self._lost(flight, "The worker ended without a word.")
        except OutOfMemoryError as error:
            self._end(flight, End("oom", message=str(error)[-work.MESSAGE_LENGTH :]))
        except RayTaskError as error:
            self._end(flight, End("crashed", message=str(error)[-work.MESSAGE_LENGTH :]))
        except RayError as error:
            self._lost(flight, str(error))
        else:
            self._told[flight] = told
            self._begun.setdefault(flight, time.monotonic())
            if isinstance(event, End):
                self._end(flight, event)
            elif event is not None and not self._write(flight, event, told):
                ray.cancel(flight, force=True)
                self._forget(flight)

    def _lost(self, flight: Any, why: str) -> None:
        """A task died with its worker or its node: once more, unless the run itself seems to be the cause."""
        spec, claim = self._flying[flight]
        self._deaths[spec.id] += not _node_died(why)
        if self._deaths[spec.id] >= DEATHS:
            said = f"The worker died {DEATHS} times.\n{why}"[-work.MESSAGE_LENGTH :]
            self._end(flight, End("crashed", message=said))
        else:
            self.store.give_back(claim)
            self._forget(flight)

    def _end(self, flight: Any, end: End) -> None:
        told = self._told.get(flight) or work.environment(self.setting)
        self._write(flight, end, told)
        self._forget(flight)

    def _write(self, flight: Any, event: Epoch | Progress | End, told: dict[str, Any]) -> bool:
        spec, claim = self._flying[flight]
        return work.write(self.store, claim, spec, event, told)

    def _forget(self, flight: Any) -> None:
        for table in (self._flying, self._begun, self._told):
            table.pop(flight, None)


def _node_died(why: str) -> bool:
    return "node" in why.lower() and any(sign in why.lower() for sign in ("died", "dead", "terminated", "lost"))
