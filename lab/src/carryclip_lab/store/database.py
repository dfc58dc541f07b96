"""The SQLite file behind a store: its tables, opening it whatever state it is in, and transactions."""

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from carryclip_lab.checks import UserError
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
CREATE TABLE IF NOT EXISTS files (study TEXT PRIMARY KEY, file TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS digests (run TEXT PRIMARY KEY REFERENCES runs (id), digest TEXT NOT NULL) STRICT;
"""
_TABLES = {"meta", "runs", "titles", "files", "studies", "epochs", "measures", "digests"}


class StoreError(UserError):
    """The file cannot be used as a store."""


class Database:
    """A file that several processes may write to and that a kill leaves whole; made if it is not there."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        self._files: dict[Path, tuple[int, int] | None] = {}
        if not create and not self.path.is_file():
            raise StoreError(f"There is no store {self.path}; carryclip reproduce makes one.")
        try:
            self._open(create)
        except sqlite3.Error as error:
            full = "disk is full" in str(error)
            raise StoreError(
                room(self.path) if full else f"{self.path} cannot be opened as a store: {error}."
            ) from None

    def _open(self, create: bool) -> None:
        if self.path.is_file() and not _writable(self.path):
            self._open_to_read()
            self._check_version(self._tables())
            return
        self._connect(self.path.absolute().as_uri())
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
        self._files = {file: _identity(file) for file in (self.path.absolute(), *self._beside()) if file.exists()}

    def _connect(self, uri: str) -> None:
        self._db = sqlite3.connect(uri, uri=True, timeout=60.0, isolation_level=None)
        self._db.text_factory = lambda text: text.decode(errors="replace")  # what is damaged is to be shown, too

    def _open_to_read(self) -> None:
        """From a copy, in a file that is nobody's, since someone else may write at any time.

        Beside a log it is read with that; without one as it is, and again if there is a log afterwards.
        """
        log = self._beside()[0]
        error: sqlite3.Error = sqlite3.OperationalError("someone begins to write to it again and again")
        self._connect("")
        for _ in range(100):
            way = "mode=ro" if log.exists() else "immutable=1"
            try:
                with contextlib.closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?{way}", uri=True)) as source:
                    source.backup(self._db)
                if way == "mode=ro" or not log.exists():
                    break
            except sqlite3.DatabaseError as failed:
                error = failed
            time.sleep(0.05)
        else:
            raise error
        self._db.execute("PRAGMA query_only = ON")

    def _beside(self) -> list[Path]:
        """What SQLite keeps beside the file while it is in use: its log, and an index to that."""
        return [self.path.absolute().with_name(self.path.name + ending) for ending in ("-wal", "-shm")]

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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
        if isinstance(error, sqlite3.Error):
            hint = " The file is damaged: go back to a copy of it (carryclip backup makes one)."
            damaged = any(sign in str(error) for sign in ("malformed", "not a database", "no such"))
            full = "disk is full" in str(error)
            said = room(self.path) if full else f"{self.path} cannot be used: {error}.{hint if damaged else ''}"
            raise StoreError(said) from None

    def backup(self, to: Path) -> None:
        """A copy in one file, whoever may be writing meanwhile."""
        if to.exists():
            raise StoreError(f"{to} is there already; choose another name.")
        aside = to.with_name(f"{to.name}.part")
        try:
            with contextlib.closing(sqlite3.connect(aside)) as copy:
                self._db.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
            aside.replace(to)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{to} cannot be written: {error}.") from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, and no other writer in between."""
        if any(_identity(file) != known for file, known in self._files.items()):
            raise StoreError(
                f"{self.path}, or a file that SQLite keeps beside it (-wal, -shm), was removed or replaced while in "
                "use; what was written last may be lost. Stop all commands that use it before you start one again."
            )
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def room(path: Path) -> str:
    """Which disk is full, and how to go on."""
    place = path.absolute().parent
    free = shutil.disk_usage(place).free
    return (
        f"{path} cannot be written: the disk that holds {place} is full ({free / 1e6:,.0f} MB free). Make room, then "
        "give the same command again: it goes on from what is done. Or move the store, and name it with --store."
    )


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
