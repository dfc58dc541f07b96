"""Where runs and results are kept: one SQLite file that several processes may work on and that a kill leaves whole.

A run waits, is taken by one owner for a while (a lease that the owner renews), and is done once. What an owner writes
after its lease went to another is refused, so that every run is accepted exactly once.
"""

import contextlib
import hashlib
import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from carryclip_lab.grid import Study
from carryclip_lab.spec import Spec
from carryclip_lab.store.database import Database, StoreError
from carryclip_lab.store.records import FAULTS, Epoch, Outcome, Record

LEASE = 60.0
"""Seconds for which a run belongs to whoever took it, unless renewed: by the machine's clock that nobody sets."""

_EPOCH = [field.name for field in fields(Epoch) if field.name != "metrics"]
"""What every epoch has, by columns."""
LONGEST = 100
"""Letters of a study's name, which folders of the report are named after."""
_RECORD = "runs.id, runs.spec, state, outcome, reached, seconds, message, environment"
_MINE = "(owner = :owner OR substr(owner, 1, length(:owner) + 1) = :owner || '/')"
_RUNS = "studies JOIN runs ON runs.id = studies.run WHERE studies.name = ?"


class Store(Database):
    """A store on disk, made if it is not there. One object per thread."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        super().__init__(path, create=create)
        self._chosen = _RUNS

    # ------------------------------------------------------------------ taking and finishing runs

    def add(self, study: Study) -> int:
        """Note the runs of a study; those that are there already are kept, whosever they are. How many are new.

        The study is what it is now: runs that its file no longer has leave it, and keep their results.
        """
        if len(study.name.encode()) > LONGEST:
            raise StoreError(f"The name of a study is at most {LONGEST} letters long: {study.name[:20]}...")
        rows = [(spec.id, spec.canonical) for spec in study.specs]
        with self._transaction() as db:
            known = dict(db.execute("SELECT id, spec FROM runs"))
            altered = {run: spec for run, spec in rows if known.get(run, spec) != spec and not _spec(run, known[run])}
            if altered:
                said = f"Specs had been altered in {self.path}, and are put right: {_some([*altered])}."
                warnings.warn(said, stacklevel=2)
            db.execute("INSERT OR REPLACE INTO titles VALUES (?, ?, ?)", (study.name, study.title, study.tier))
            before = db.execute("SELECT count(*) FROM runs").fetchone()[0]
            db.executemany("INSERT OR IGNORE INTO runs (id, spec) VALUES (?, ?)", rows)
            db.executemany("UPDATE runs SET spec = ? WHERE id = ?", [(spec, run) for run, spec in altered.items()])
            db.execute("DELETE FROM studies WHERE name = ?", (study.name,))
            places = [(study.name, position, run) for position, (run, _) in enumerate(rows)]
            db.executemany("INSERT INTO studies (name, position, run) VALUES (?, ?, ?)", places)
            return db.execute("SELECT count(*) FROM runs").fetchone()[0] - before

    def take(self, study: str, owner: str, *, limit: int = 1, lease: float = LEASE) -> list[Spec]:
        """Take runs that wait, or whose owner let its lease pass, in the study's order."""
        with self._transaction() as db:
            now = time.monotonic()  # in here, so that nobody else has a later one
            rows = db.execute(
                f"SELECT runs.id, runs.spec FROM {self._chosen} AND "
                "(runs.state = 'waiting' OR (runs.state = 'running' AND runs.lease NOT BETWEEN ? AND ?)) "
                "ORDER BY studies.position LIMIT ?",
                (study, now, now + LEASE, limit),  # one of a later time is from before the machine was started
            ).fetchall()
            mine = [(owner, now + lease, run) for run, _ in rows]
            query = "UPDATE runs SET state = 'running', owner = ?, lease = ?, message = NULL WHERE id = ?"
            db.executemany(query, mine)
        found = {run: _spec(run, text) for run, text in rows}
        for run in [run for run, spec in found.items() if spec is None or spec.id != run]:
            self.finish(run, owner, "crashed", message=f"Its spec was altered in {self.path}; --retry puts it right.")
            del found[run]
        left = [spec for spec in found.values() if spec is not None]
        return left or (self.take(study, owner, limit=limit, lease=lease) if rows else [])

    def restrict(self, runs: Iterable[str] | None) -> None:
        """Take none but these from now on; None for all again. Other users of the file are not affected."""
        self._db.execute("CREATE TEMP TABLE IF NOT EXISTS wanted (run TEXT PRIMARY KEY)")
        with self._transaction() as db:
            db.execute("DELETE FROM wanted")
            db.executemany("INSERT INTO wanted VALUES (?)", [(run,) for run in runs or ()])
        self._chosen = _RUNS if runs is None else f"{_RUNS} AND runs.id IN (SELECT run FROM wanted)"

    def unfinished(self, study: str) -> int:
        """How many runs that may be taken wait or run."""
        return self._db.execute(f"SELECT count(*) FROM {self._chosen} AND runs.state != 'done'", (study,)).fetchone()[0]

    def retry(self, study: str, outcomes: Sequence[Outcome]) -> int:
        """Let runs that may be taken wait again if they ended so, or are damaged; how many that are."""
        runs = {*self.damaged(study), *(self.done() - self.done(but=outcomes))}
        with self._transaction() as db:
            query = (
                "UPDATE runs SET state = 'waiting', outcome = NULL, reached = NULL, seconds = NULL, message = NULL, "
                "environment = NULL WHERE id = ?"
            )
            again = [row for row in db.execute(f"SELECT runs.id FROM {self._chosen}", (study,)) if row[0] in runs]
            db.executemany(query, again)
            db.executemany("DELETE FROM digests WHERE run = ?", again)
            return len(again)

    def owners(self) -> list[str]:
        """All that have taken runs and not finished them."""
        rows = self._db.execute("SELECT DISTINCT owner FROM runs WHERE state = 'running'")
        return [owner for (owner,) in rows]

    def renew(self, owner: str, lease: float = LEASE) -> int:
        """Keep what ``owner``, or ``owner/...``, has taken; how many runs that are."""
        with self._transaction() as db:
            query = f"UPDATE runs SET lease = :lease WHERE {_MINE} AND state = 'running'"
            return db.execute(query, {"lease": time.monotonic() + lease, "owner": owner}).rowcount

    def give_back(self, owner: str) -> int:
        """Let others have what ``owner``, or ``owner/...``, has taken and not finished; how many runs that are."""
        with self._transaction() as db:
            query = (
                "UPDATE runs SET state = 'waiting', owner = NULL, lease = NULL, message = NULL "
                f"WHERE {_MINE} AND state = 'running'"
            )
            return db.execute(query, {"owner": owner}).rowcount

    def begin(self, run: str, owner: str) -> bool:
        """A run is told from its start, maybe not for the first time: forget what was written; False if it is not ours.

        One that goes on from a checkpoint tells of the epochs before it again.
        """
        with self._transaction() as db:
            if not self._owns(run, owner):
                return False
            for table in ("epochs", "measures"):
                db.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
            return True

    def record(self, run: str, owner: str, epoch: Epoch) -> bool:
        """Write one epoch; False, and nothing written, if the run is not the owner's."""
        row = {name: _storable(getattr(epoch, name)) for name in _EPOCH}
        names = ", ".join(row)
        marks = ", ".join(f":{name}" for name in row)
        with self._transaction() as db:
            if not self._owns(run, owner):
                return False
            db.execute(f"INSERT OR REPLACE INTO epochs (run, {names}) VALUES (:run, {marks})", {"run": run, **row})
            if epoch.metrics:
                told = json.dumps({name: _storable(value) for name, value in epoch.metrics.items()}, sort_keys=True)
                db.execute("INSERT OR REPLACE INTO measures VALUES (?, ?, ?)", (run, epoch.epoch, told))
            return True

    def note(self, run: str, owner: str, text: str) -> bool:
        """Write how far a run is; False, and nothing written, if the run is not the owner's."""
        with self._transaction() as db:
            if not self._owns(run, owner):
                return False
            db.execute("UPDATE runs SET message = ? WHERE id = ?", (text, run))
            return True

    def finish(
        self,
        run: str,
        owner: str,
        outcome: Outcome,
        *,
        reached: int | None = None,
        message: str | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> bool:
        """Write how a run ended, which is final; False, and nothing written, if the run is not the owner's."""
        told = json.dumps(dict(environment or {}), sort_keys=True)
        with self._transaction() as db:
            if not self._owns(run, owner):
                return False
            db.execute(
                "UPDATE runs SET state = 'done', outcome = ?, reached = ?, message = ?, environment = ?, owner = NULL, "
                "lease = NULL, seconds = (SELECT sum(seconds) FROM epochs WHERE run = runs.id) WHERE id = ?",
                (outcome, reached, message, told, run),
            )
            db.execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", (run, self._digest(run)))
            return True

    def _owns(self, run: str, owner: str) -> bool:
        row = self._db.execute("SELECT owner, state FROM runs WHERE id = ?", (run,)).fetchone()
        return row == (owner, "running")

    # ------------------------------------------------------------------ reading

    def studies(self) -> list[str]:
        """Names of all studies."""
        return [name for (name,) in self._db.execute("SELECT DISTINCT name FROM studies ORDER BY name")]

    def title(self, study: str) -> tuple[str, str]:
        """Title and tier of a study."""
        row = self._db.execute("SELECT title, tier FROM titles WHERE name = ?", (study,)).fetchone()
        if row is None:
            known = ", ".join(self.studies()) or "none yet"
            raise StoreError(f"{self.path} has no study {study!r}; it has {known}.")
        return row

    def progress(self, study: str) -> Counter[str]:
        """How many runs wait, run, and ended in which way."""
        query = (
            "SELECT coalesce(runs.outcome, runs.state), count(*) FROM studies JOIN runs ON runs.id = studies.run "
            "WHERE studies.name = ? GROUP BY 1"
        )
        return Counter(dict(self._db.execute(query, (study,))))

    def done(self, but: Sequence[Outcome] = ()) -> set[str]:
        """Ids of all runs that are done, except those that ended so."""
        rows = self._db.execute("SELECT id, outcome FROM runs WHERE state = 'done'")
        return {run for run, outcome in rows if outcome not in but}

    def under_way(self) -> dict[str, tuple[int, str]]:
        """How many epochs each run that is running has behind it, and what it says about the present one."""
        query = (
            "SELECT runs.id, coalesce((SELECT max(epoch) FROM epochs WHERE run = runs.id), 0), coalesce(message, '') "
            "FROM runs WHERE state = 'running'"
        )
        return {run: (epochs, said) for run, epochs, said in self._db.execute(query)}

    def records(self, study: str, outcomes: Sequence[Outcome] | None = None) -> Iterator[Record]:
        """The runs of a study in its order: all, or those that ended so."""
        wanted = "" if outcomes is None else f" AND outcome IN ({', '.join('?' * len(outcomes))})"
        query = f"SELECT {_RECORD} FROM {_RUNS}{wanted} ORDER BY studies.position"
        for row in self._db.execute(query, (study, *(outcomes or ()))):
            yield _read(row)

    def record_of(self, run: str) -> Record:
        """One run by its id."""
        return _read(self._db.execute(f"SELECT {_RECORD} FROM runs WHERE id = ?", (run,)).fetchone())

    def find(self, start: str) -> list[str]:
        """Ids that start so."""
        query = "SELECT id FROM runs WHERE substr(id, 1, length(?)) = ? ORDER BY id"
        return [run for (run,) in self._db.execute(query, (start, start))]

    def epochs(self, run: str) -> list[Epoch]:
        """What was written of a run, epoch by epoch."""
        query = f"SELECT {', '.join(_EPOCH)} FROM epochs WHERE run = ? ORDER BY epoch"
        more = {epoch: metrics for _, epoch, metrics in self._all_of("measures", run)}
        with _readable(run):
            return [Epoch(*row, metrics=json.loads(more.get(row[0], "{}"))) for row in self._db.execute(query, (run,))]

    def _all_of(self, table: str, run: str) -> list[tuple[Any, ...]]:
        """All rows of a run; none if the table is not there, as in an old file that cannot be written."""
        if table not in self._tables():
            return []
        return self._db.execute(f"SELECT * FROM {table} WHERE run = ?", (run,)).fetchall()

    # ------------------------------------------------------------------ what a disk may do

    def check(self, name: str | None = None) -> None:
        """Complain about damage to the runs of a study, to the run with an id, or to all.

        Raises:
            StoreError: runs are no longer what was written when they were done; the message names them.
        """
        if damaged := self.damaged(name):
            raise StoreError(
                f"{self.path} is damaged: {_some(damaged)} no longer what was written. Go back to a copy of the file, "
                "or have that done again: carryclip reproduce with --retry"
            )

    def damaged(self, name: str | None = None) -> list[str]:
        """Ids of such runs. Those that were done before there were digests have only their specs to be checked."""
        digest = "(SELECT digest FROM digests WHERE run = id)" if "digests" in self._tables() else "NULL"
        query = f"SELECT id, spec, {digest} FROM runs"
        if name is not None:
            query += " WHERE id = :name OR id IN (SELECT run FROM studies WHERE name = :name)"
        rows = self._db.execute(query, {"name": name}).fetchall()
        return [run for run, spec, told in rows if _spec(run, spec) is None or told not in (None, self._digest(run))]

    def _digest(self, run: str) -> str:
        """Of all that is kept of a run that is done, but its spec, which the id is a digest of."""
        end = "SELECT state, outcome, reached, seconds, message, environment FROM runs WHERE id = ?"
        seen = [self._db.execute(end, (run,)).fetchall(), self._all_of("epochs", run), self._all_of("measures", run)]
        return hashlib.sha256(json.dumps(seen, default=repr).encode()).hexdigest()

    # ------------------------------------------------------------------ together

    def merge(self, other: "Store") -> tuple[int, int]:
        """Take over the studies, runs and results of another store: (runs new here, results new here).

        A result that is here already stays: runs are deterministic, and the first is as good as the second. A fault
        makes way for a result.
        """
        other.check()
        with self._transaction() as db:
            new = results = 0
            here = dict(db.execute("SELECT id, outcome FROM runs"))
            for run, spec, state, *end in other._db.execute(f"SELECT {_RECORD} FROM runs").fetchall():
                new += db.execute("INSERT OR IGNORE INTO runs (id, spec) VALUES (?, ?)", (run, spec)).rowcount
                kept = here.get(run)
                if state != "done" or (kept is not None and (kept not in FAULTS or end[0] in FAULTS)):
                    continue
                results += 1
                db.execute(
                    "UPDATE runs SET state = 'done', outcome = ?, reached = ?, seconds = ?, message = ?, "
                    "environment = ?, owner = NULL, lease = NULL WHERE id = ?",
                    (*end, run),
                )
                for table, width in (("epochs", len(_EPOCH) + 1), ("measures", 3), ("digests", 2)):
                    db.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
                    marks = ", ".join("?" * width)
                    db.executemany(f"INSERT INTO {table} VALUES ({marks})", other._all_of(table, run))
            for row in other._db.execute("SELECT name, title, tier FROM titles").fetchall():
                db.execute("INSERT OR IGNORE INTO titles VALUES (?, ?, ?)", row)
            for name, position, run in other._db.execute("SELECT name, position, run FROM studies").fetchall():
                db.execute("INSERT OR IGNORE INTO studies VALUES (?, ?, ?)", (name, position, run))
        return new, results


def _read(row: Sequence[Any]) -> Record:
    run, spec, state, outcome, reached, seconds, message, environment = row
    with _readable(run):
        told = json.loads(environment or "{}")
        return Record(Spec.from_canonical(spec), state, outcome, reached, seconds, message, told)


@contextlib.contextmanager
def _readable(run: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise StoreError(
            f"Run {run} cannot be read: {error} See what else is damaged: carryclip status --check"
        ) from None


def _spec(run: str, text: str) -> Spec | None:
    """The spec of a run; None if it cannot be: the id follows from it, as it is written there or as it is read."""
    with contextlib.suppress(StoreError), _readable(run):
        spec = Spec.from_canonical(text)
        return spec if run in (spec.id, hashlib.sha256(text.encode()).hexdigest()[:16]) else None
    return None


def _some(runs: Sequence[str]) -> str:
    """The first few by name."""
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    return f"run{'s' if len(runs) > 1 else ''} {', '.join(runs[:3])}{more}"


def _storable(value: Any) -> Any:
    """SQLite makes NULL of NaN without a word; here that is meant: what is not a number is not known."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
