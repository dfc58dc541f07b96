"""Who has taken a run: a name that tells whether its bearer can still be alive, and a heart that keeps leases."""

import contextlib
import itertools
import os
import socket
import sqlite3
import threading
import uuid
from pathlib import Path

from carryclip_lab.spec import Spec
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.store import LEASE, Store


def new_owner() -> str:
    """A name for this process that no other has."""
    return f"{_here()}/{os.getpid()}/{uuid.uuid4().hex[:12]}"


def _here() -> str:
    """This machine since it was started, or the container on it: where process ids mean something to us."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        names = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        names = "-/-"
    return f"{socket.gethostname()}/{names}"


def is_dead(owner: str) -> bool:
    """True if the owner was a process of this machine that is no more; of others nothing is known."""
    here = f"{_here()}/"
    pid = owner.removeprefix(here).partition("/")[0]
    if not owner.startswith(here) or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def free_the_dead(store: Store) -> int:
    """Give back at once what processes of this machine held when they were killed; how many runs that are."""
    return sum(store.give_back(owner) for owner in store.owners() if is_dead(owner))


class Claims:
    """Takes runs in an owner's name, each under a name of its own.

    So a worker whose run was lost and taken again, even by us, cannot write any more.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store, self._owner = store, owner
        self._numbers = itertools.count()

    def next(self, study: str) -> tuple[Spec, str] | None:
        """A run and the name under which it is ours; None if none is to be had."""
        self._store.renew(self._owner)  # after a pause our leases may have passed, and we would take our own runs
        claim = f"{self._owner}/{next(self._numbers)}"
        taken = self._store.take(study, claim)
        return (taken[0], claim) if taken else None


class Heart:
    """Renews the leases of an owner in the background, as long as it beats."""

    def __init__(self, path: str, owner: str, lease: float = LEASE) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(path, owner, lease), daemon=True)

    def __enter__(self) -> "Heart":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self, path: str, owner: str, lease: float) -> None:
        while not self._stop.wait(lease / 4):
            # A disk that is full or slow for a moment is no reason to stop; if it lasts, the lease passes.
            with contextlib.suppress(sqlite3.Error, StoreError), Store(path, create=False) as store:
                store.renew(owner, lease)
