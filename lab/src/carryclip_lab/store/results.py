"""Reading a store: studies, runs and epochs, and whether they are still what was written."""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from carryclip_lab.spec import Spec
from carryclip_lab.store.database import Database, StoreError
from carryclip_lab.store.records import Epoch, Outcome, Record

COLUMNS = [field.name for field in fields(Epoch) if field.name != "metrics"]
"""What every epoch has."""
RECORD = "runs.id, runs.spec, state, outcome, reached, seconds, message, environment"
RUNS = "studies JOIN runs ON runs.id = studies.run WHERE studies.name = ?"


class Results(Database):
    """What a store has to tell."""

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

    def files(self) -> dict[str, str]:
        """The file of each study of one's own, as it was named; of none in a store from before that was kept."""
        if "files" not in self._tables():
            return {}
        return dict(self._db.execute("SELECT study, file FROM files"))

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
        query = f"SELECT {RECORD} FROM {RUNS}{wanted} ORDER BY studies.position"
        for row in self._db.execute(query, (study, *(outcomes or ()))):
            yield _read(row)

    def record_of(self, run: str) -> Record:
        """One run by its id."""
        return _read(self._db.execute(f"SELECT {RECORD} FROM runs WHERE id = ?", (run,)).fetchone())

    def find(self, start: str) -> list[str]:
        """Ids that start so."""
        query = "SELECT id FROM runs WHERE substr(id, 1, length(?)) = ? ORDER BY id"
        return [run for (run,) in self._db.execute(query, (start, start))]

    def epochs(self, run: str) -> list[Epoch]:
        """What was written of a run, epoch by epoch."""
        query = f"SELECT {', '.join(COLUMNS)} FROM epochs WHERE run = ? ORDER BY epoch"
        more = {epoch: metrics for _, epoch, metrics in self._all_of("measures", run)}
        with _readable(run):
            return [Epoch(*row, metrics=json.loads(more.get(row[0], "{}"))) for row in self._db.execute(query, (run,))]

    def _all_of(self, table: str, run: str) -> list[tuple[Any, ...]]:
        """All rows of a run; none if the table is not there, as in an old file that cannot be written."""
        if table not in self._tables():
            return []
        return self._db.execute(f"SELECT * FROM {table} WHERE run = ?", (run,)).fetchall()

    def check(self, name: str | None = None) -> None:
        """Complain about damage to the runs of a study, to the run with an id, or to all.

        Raises:
            StoreError: runs are no longer what was written when they were done; the message names them.
        """
        if damaged := self.damaged(name):
            raise StoreError(
                f"{self.path} is damaged; no longer what was written: {some(damaged)}. Go back to a copy of the "
                "file, or have that done again: carryclip reproduce with --retry"
            )

    def damaged(self, name: str | None = None) -> list[str]:
        """Ids of such runs. Those that were done before there were digests have only their specs to be checked."""
        digest = "(SELECT digest FROM digests WHERE run = id)" if "digests" in self._tables() else "NULL"
        query = f"SELECT id, spec, {digest} FROM runs"
        if name is not None:
            query += " WHERE id = :name OR id IN (SELECT run FROM studies WHERE name = :name)"
        rows = self._db.execute(query, {"name": name}).fetchall()
        return [run for run, spec, told in rows if not belongs(run, spec) or (told and told != self._digest(run))]

    def _digest(self, run: str) -> str:
        """Of all that is kept of a run that is done, but its spec, which the id is a digest of."""
        end = "SELECT state, outcome, reached, seconds, message, environment FROM runs WHERE id = ?"
        seen = [self._db.execute(end, (run,)).fetchall(), self._all_of("epochs", run), self._all_of("measures", run)]
        return hashlib.sha256(json.dumps(seen, default=repr).encode()).hexdigest()


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


def belongs(run: str, text: str) -> bool:
    """Whether a run's id follows from its spec, as that is written or as it is read."""
    if hashlib.sha256(text.encode()).hexdigest()[:16] == run:
        return True
    with contextlib.suppress(StoreError), _readable(run):
        return Spec.from_canonical(text).id == run
    return False


def some(runs: Sequence[str]) -> str:
    """The first few by name."""
    more = f" and {len(runs) - 3} more" if len(runs) > 3 else ""
    return f"run{'s' if len(runs) > 1 else ''} {', '.join(runs[:3])}{more}"
