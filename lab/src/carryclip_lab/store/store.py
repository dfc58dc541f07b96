"""Where runs and results are kept: one SQLite file that several processes may work on and that a kill leaves whole.

A run waits, is taken by one owner for a while (a lease that the owner renews), and is done once. What an owner writes
after its lease went to another is refused, so that every run is accepted exactly once.
"""

import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from carryclip_lab.grid import Study
from carryclip_lab.spec import Spec
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.records import FAULTS, Epoch, Outcome
from carryclip_lab.store.results import COLUMNS, RECORD, RUNS, Results, belongs, some

LEASE = 60.0
"""Seconds for which a run belongs to whoever took it, unless renewed: by the machine's clock that nobody sets."""

LONGEST = 100
"""Letters of a study's name, which folders of the report are named after."""
_MINE = "(owner = :owner OR substr(owner, 1, length(:owner) + 1) = :owner || '/')"


class Store(Results):
    """A store on disk, made if it is not there. One object per thread."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        super().__init__(path, create=create)
        self._chosen = RUNS

    def add(self, study: Study) -> int:
        """Note the runs of a study; those that are there already are kept, whosever they are. How many are new.

        The study is what it is now: runs that its file no longer has leave it, and keep their results.
        """
        if len(study.name.encode()) > LONGEST:
            raise StoreError(f"The name of a study is at most {LONGEST} letters long: {study.name[:20]}...")
        rows = [(spec.id, spec.canonical) for spec in study.specs]
        with self._transaction() as db:
            known = dict(db.execute("SELECT id, spec FROM runs"))
            altered = {run: spec for run, spec in rows if known.get(run, spec) != spec and not belongs(run, known[run])}
            if altered:
                said = f"Specs had been altered in {self.path}, and are put right: {some([*altered])}."
                warnings.warn(said, stacklevel=2)
            db.execute("INSERT OR REPLACE INTO titles VALUES (?, ?, ?)", (study.name, study.title, study.tier))
            db.execute("DELETE FROM files WHERE study = ?", (study.name,))
            if study.file is not None:
                db.execute("INSERT INTO files VALUES (?, ?)", (study.name, study.file))
            db.executemany("INSERT OR IGNORE INTO runs (id, spec) VALUES (?, ?)", rows)
            db.executemany("UPDATE runs SET spec = ? WHERE id = ?", [(spec, run) for run, spec in altered.items()])
            db.execute("DELETE FROM studies WHERE name = ?", (study.name,))
            places = [(study.name, position, run) for position, (run, _) in enumerate(rows)]
            db.executemany("INSERT INTO studies (name, position, run) VALUES (?, ?, ?)", places)
            return len(dict(rows).keys() - known.keys())

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
        specs = {run: Spec.from_canonical(text) for run, text in rows if belongs(run, text)}
        left = [spec for run, spec in specs.items() if spec.id == run]
        for run in {run for run, _ in rows} - {spec.id for spec in left}:
            self.finish(run, owner, "crashed", message=f"Its spec was altered in {self.path}; --retry puts it right.")
        return left or (self.take(study, owner, limit=limit, lease=lease) if rows else [])

    def restrict(self, runs: Iterable[str] | None) -> None:
        """Take none but these from now on; None for all again. Other users of the file are not affected."""
        self._db.execute("CREATE TEMP TABLE IF NOT EXISTS wanted (run TEXT PRIMARY KEY)")
        with self._transaction() as db:
            db.execute("DELETE FROM wanted")
            db.executemany("INSERT INTO wanted VALUES (?)", [(run,) for run in runs or ()])
        self._chosen = RUNS if runs is None else f"{RUNS} AND runs.id IN (SELECT run FROM wanted)"

    def progress_of_chosen(self, study: str) -> Counter[str]:
        """The same as ``progress``, of the runs that may be taken."""
        query = f"SELECT coalesce(runs.outcome, runs.state), count(*) FROM {self._chosen} GROUP BY 1"
        return Counter(dict(self._db.execute(query, (study,))))

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
        row = {name: _storable(getattr(epoch, name)) for name in COLUMNS}
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

    def merge(self, other: "Store") -> tuple[int, int]:
        """Take over the studies, runs and results of another store: (runs new here, results new here).

        A result that is here already stays: runs are deterministic, and the first is as good as the second. A fault
        makes way for a result.
        """
        other.check()
        with self._transaction() as db:
            new = results = 0
            here = dict(db.execute("SELECT id, outcome FROM runs"))
            for run, spec, state, *end in other._db.execute(f"SELECT {RECORD} FROM runs").fetchall():
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
                for table, width in (("epochs", len(COLUMNS) + 1), ("measures", 3), ("digests", 2)):
                    db.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
                    marks = ", ".join("?" * width)
                    db.executemany(f"INSERT INTO {table} VALUES ({marks})", other._all_of(table, run))
            for row in other._db.execute("SELECT name, title, tier FROM titles").fetchall():
                db.execute("INSERT OR IGNORE INTO titles VALUES (?, ?, ?)", row)
            db.executemany("INSERT OR IGNORE INTO files VALUES (?, ?)", list(other.files().items()))
            for name, position, run in other._db.execute("SELECT name, position, run FROM studies").fetchall():
                db.execute("INSERT OR IGNORE INTO studies VALUES (?, ?, ?)", (name, position, run))
        return new, results


def _storable(value: Any) -> Any:
    """SQLite makes NULL of NaN without a word; here that is meant: what is not a number is not known."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
