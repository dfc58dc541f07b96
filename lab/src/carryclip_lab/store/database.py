"""The SQLite file behind a store: its tables, opening it whatever state it is in, and transactions."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from carryclip_lab.store.records import OUTCOMES

VERSION = 1
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
CREATE TABLE IF NOT EXISTS measures (
    run TEXT NOT NULL REFERENCES runs (id), epoch INTEGER NOT NULL, metrics TEXT NOT NULL, PRIMARY KEY (run, epoch)
) STRICT, WITHOUT ROWID;
"""
_TABLES = {"meta", "runs", "titles", "studies", "epochs", "measures"}


class StoreError(RuntimeError):
    """The file cannot be used as a store."""


class Database:
    """A file that several processes may write to and that a kill leaves whole; made if it is not there."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
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
        if not tables >= _TABLES:  # a new file, or one from before a table was added
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

    def __enter__(self) -> Self:
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


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
