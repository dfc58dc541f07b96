"""Where runs and results are kept: one SQLite file that several processes may work on and that a kill leaves whole.

A run waits, is taken by one owner for a while (a lease that the owner renews), and is done once. What an owner writes
after its lease went to another is refused, so that every run is accepted exactly once.
"""

import contextlib
import json
import math
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from carryclip.experiments.grid import Study
from carryclip.experiments.spec import Spec

Outcome = Literal["reached", "not_reached", "diverged", "oom", "timeout", "crashed"]
OUTCOMES: tuple[Outcome, ...] = ("reached", "not_reached", "diverged", "oom", "timeout", "crashed")
FAULTS: tuple[Outcome, ...] = ("oom", "timeout", "crashed")
"""Those that say nothing about the method."""
VERSION = 1
LEASE = 60.0
"""Seconds for which a run belongs to whoever took it, unless renewed."""

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY,
    spec TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'running', 'done')),
    owner TEXT,
    lease REAL,
    outcome TEXT CHECK (outcome IN ({", ".join(f"'{outcome}'" for outcome in OUTCOMES)})),
    reached INTEGER,
    seconds REAL,
    message TEXT,
    environment TEXT
) STRICT;
CREATE INDEX IF NOT EXISTS runs_by_state ON runs (state);
CREATE TABLE IF NOT EXISTS titles (name TEXT PRIMARY KEY, title TEXT NOT NULL, tier TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS studies (
    name TEXT NOT NULL, position INTEGER NOT NULL, run TEXT NOT NULL REFERENCES runs (id),
    PRIMARY KEY (name, run)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS studies_by_position ON studies (name, position);
CREATE TABLE IF NOT EXISTS epochs (
    run TEXT NOT NULL REFERENCES runs (id), epoch INTEGER NOT NULL,
    loss REAL, running_accuracy REAL, train_accuracy REAL, test_accuracy REAL,
    grad_norm REAL, carry_norm REAL, radius_norm REAL, clipped_fraction REAL, carry_feed REAL, seconds REAL,
    PRIMARY KEY (run, epoch)
) STRICT, WITHOUT ROWID;
"""

_RECORD = "runs.spec, state, outcome, reached, seconds, message, environment"
_MINE = "(owner = :owner OR substr(owner, 1, length(:owner) + 1) = :owner || '/')"
_RUNS = "studies JOIN runs ON runs.id = studies.run WHERE studies.name = ?"


@dataclass(frozen=True)
class Epoch:
    """What is known of a run after one epoch; None for what there is not, such as a carry without clipping."""

    epoch: int
    loss: float | None = None
    running_accuracy: float | None = None
    train_accuracy: float | None = None
    test_accuracy: float | None = None
    grad_norm: float | None = None
    carry_norm: float | None = None
    radius_norm: float | None = None
    clipped_fraction: float | None = None
    carry_feed: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class End:
    """How a run ended."""

    outcome: Outcome
    reached: int | None = None
    """The first epoch at the target."""
    message: str | None = None


@dataclass(frozen=True)
class Record:
    """A run as the store has it."""

    spec: Spec
    state: str
    outcome: Outcome | None
    reached: int | None
    """The first epoch at the target."""
    seconds: float | None
    message: str | None
    environment: dict[str, Any]


class StoreError(RuntimeError):
    """The file cannot be used as a store."""


class Store:
    """A store on disk, made if it is not there. One object per thread."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        self._chosen = _RUNS
        if not create and not self.path.is_file():
            raise StoreError(f"There is no store {self.path}; carryclip reproduce makes one.")
        try:
            self._open(create)
        except sqlite3.Error as error:
            raise StoreError(f"{self.path} cannot be opened as a store: {error}.") from None

    def _open(self, create: bool) -> None:
        if self.path.is_file() and not _writable(self.path):
            # For reading only: without its write-ahead log, which a store that was closed does not have.
            self._db = sqlite3.connect(f"{self.path.absolute().as_uri()}?immutable=1", uri=True, isolation_level=None)
            self._check_version(self._tables())
            return
        self._db = sqlite3.connect(self.path, timeout=60.0, isolation_level=None)
        tables = self._tables()
        if tables:
            self._check_version(tables)
        elif not create:
            raise sqlite3.DatabaseError("it is empty")
        self._with_patience("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if not tables:
            with self._transaction():
                for statement in _SCHEMA.split(";\n"):
                    if statement.strip():
                        self._db.execute(statement)
                self._db.execute("INSERT OR IGNORE INTO meta VALUES ('version', ?)", (str(VERSION),))

    def _tables(self) -> set[str]:
        return {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def _check_version(self, tables: set[str]) -> None:
        if not {"meta", "runs", "epochs"} <= tables:
            raise sqlite3.DatabaseError("it is a database of something else")
        (found,) = self._db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone() or ("?",)
        if found != str(VERSION):
            raise sqlite3.DatabaseError(f"another version of carryclip wrote it (store {found}, here {VERSION})")

    def _with_patience(self, statement: str) -> None:
        """SQLite does not wait for a lock where it changes the journal's mode, so this does."""
        for _ in range(100):
            try:
                self._db.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
                time.sleep(0.1)
        self._db.execute(statement)

    def close(self) -> None:
        """Let the file go."""
        self._db.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and no other writer in between."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    # ------------------------------------------------------------------ taking and finishing runs

    def add(self, study: Study) -> int:
        """Note the runs of a study; those that are there already are kept, whosever they are. How many are new.

        The study is what it is now: runs that its file no longer has leave it, and keep their results.
        """
        rows = [(spec.id, spec.canonical) for spec in study.specs]
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO titles VALUES (?, ?, ?)", (study.name, study.title, study.tier))
            before = db.execute("SELECT count(*) FROM runs").fetchone()[0]
            db.executemany("INSERT OR IGNORE INTO runs (id, spec) VALUES (?, ?)", rows)
            db.execute("DELETE FROM studies WHERE name = ?", (study.name,))
            places = [(study.name, position, run) for position, (run, _) in enumerate(rows)]
            db.executemany("INSERT INTO studies (name, position, run) VALUES (?, ?, ?)", places)
            return db.execute("SELECT count(*) FROM runs").fetchone()[0] - before

    def take(self, study: str, owner: str, *, limit: int = 1, lease: float = LEASE) -> list[Spec]:
        """Take runs that wait, or whose owner let its lease pass, in the study's order."""
        now = time.time()
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT runs.id, runs.spec FROM {self._chosen} AND "
                "(runs.state = 'waiting' OR (runs.state = 'running' AND runs.lease < ?)) "
                "ORDER BY studies.position LIMIT ?",
                (study, now, limit),
            ).fetchall()
            mine = [(owner, now + lease, run) for run, _ in rows]
            db.executemany("UPDATE runs SET state = 'running', owner = ?, lease = ? WHERE id = ?", mine)
        return [Spec.from_canonical(spec) for _, spec in rows]

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
        """Let runs that may be taken wait again if they ended so; how many that are."""
        marks = ", ".join("?" * len(outcomes))
        with self._transaction() as db:
            query = (
                "UPDATE runs SET state = 'waiting', outcome = NULL, reached = NULL, seconds = NULL, message = NULL, "
                f"environment = NULL WHERE outcome IN ({marks}) AND id IN (SELECT runs.id FROM {self._chosen})"
            )
            return db.execute(query, (*outcomes, study)).rowcount

    def owners(self) -> list[str]:
        """All that have taken runs and not finished them."""
        rows = self._db.execute("SELECT DISTINCT owner FROM runs WHERE state = 'running'")
        return [owner for (owner,) in rows]

    def renew(self, owner: str, lease: float = LEASE) -> int:
        """Keep what ``owner``, or ``owner/...``, has taken; how many runs that are."""
        with self._transaction() as db:
            query = f"UPDATE runs SET lease = :lease WHERE {_MINE} AND state = 'running'"
            return db.execute(query, {"lease": time.time() + lease, "owner": owner}).rowcount

    def give_back(self, owner: str) -> int:
        """Let others have what ``owner``, or ``owner/...``, has taken and not finished; how many runs that are."""
        with self._transaction() as db:
            query = f"UPDATE runs SET state = 'waiting', owner = NULL, lease = NULL WHERE {_MINE} AND state = 'running'"
            return db.execute(query, {"owner": owner}).rowcount

    def begin(self, run: str, owner: str) -> bool:
        """A run is told from its start, maybe not for the first time: forget what was written; False if it is not ours.

        One that goes on from a checkpoint tells of the epochs before it again.
        """
        with self._transaction() as db:
            if not self._owns(run, owner):
                return False
            db.execute("DELETE FROM epochs WHERE run = ?", (run,))
            return True

    def record(self, run: str, owner: str, epoch: Epoch) -> bool:
        """Write one epoch; False, and nothing written, if the run is not the owner's."""
        row = {name: _storable(value) for name, value in asdict(epoch).items()}
        names = ", ".join(row)
        marks = ", ".join(f":{name}" for name in row)
        with self._transaction() as db:
            if not self._owns(run, owner):
                return False
            db.execute(f"INSERT OR REPLACE INTO epochs (run, {names}) VALUES (:run, {marks})", {"run": run, **row})
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

    def done(self) -> set[str]:
        """Ids of all runs that are done."""
        return {run for (run,) in self._db.execute("SELECT id FROM runs WHERE state = 'done'")}

    def under_way(self) -> dict[str, int]:
        """How many epochs each run that is running has behind it."""
        query = (
            "SELECT runs.id, coalesce((SELECT max(epoch) FROM epochs WHERE run = runs.id), 0) "
            "FROM runs WHERE state = 'running'"
        )
        return dict(self._db.execute(query))

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
        names = ", ".join(field.name for field in fields(Epoch))
        return [
            Epoch(*row) for row in self._db.execute(f"SELECT {names} FROM epochs WHERE run = ? ORDER BY epoch", (run,))
        ]

    # ------------------------------------------------------------------ together

    def merge(self, other: "Store") -> tuple[int, int]:
        """Take over the studies, runs and results of another store: (runs new here, results new here).

        A result that is here already stays: runs are deterministic, and the first is as good as the second.
        """
        with self._transaction() as db:
            new = results = 0
            for run, *row in other._db.execute(
                "SELECT id, spec, state, outcome, reached, seconds, message, environment FROM runs"
            ).fetchall():
                new += db.execute("INSERT OR IGNORE INTO runs (id, spec) VALUES (?, ?)", (run, row[0])).rowcount
                if (
                    row[1] != "done"
                    or db.execute("SELECT state FROM runs WHERE id = ?", (run,)).fetchone()[0] == "done"
                ):
                    continue
                results += 1
                db.execute(
                    "UPDATE runs SET state = 'done', outcome = ?, reached = ?, seconds = ?, message = ?, "
                    "environment = ?, owner = NULL, lease = NULL WHERE id = ?",
                    (*row[2:], run),
                )
                db.execute("DELETE FROM epochs WHERE run = ?", (run,))
                lines = other._db.execute("SELECT * FROM epochs WHERE run = ?", (run,)).fetchall()
                db.executemany(f"INSERT INTO epochs VALUES ({', '.join('?' * 12)})", lines)
            for row in other._db.execute("SELECT name, title, tier FROM titles").fetchall():
                db.execute("INSERT OR IGNORE INTO titles VALUES (?, ?, ?)", row)
            for name, position, run in other._db.execute("SELECT name, position, run FROM studies").fetchall():
                db.execute("INSERT OR IGNORE INTO studies VALUES (?, ?, ?)", (name, position, run))
        return new, results


def _read(row: Sequence[Any]) -> Record:
    spec, state, outcome, reached, seconds, message, environment = row
    told = json.loads(environment or "{}")
    return Record(Spec.from_canonical(spec), state, outcome, reached, seconds, message, told)


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _storable(value: Any) -> Any:
    """SQLite makes NULL of NaN without a word; here that is meant: what is not a number is not known."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
