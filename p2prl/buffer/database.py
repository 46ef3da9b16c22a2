"""Opening the node's SQLite file: migrations, durability, a corrupt file set aside.

In: a path. Out: a connection whose failures are `StoreError`s.

Invariants: a file that can't be read is never deleted, it is renamed and a new one begun, with what can still be read
and proves itself (manifests are signed, addresses are dialled); a file of a newer release is left alone; one statement
outside `transaction` is one transaction; a file that failed while it was used is checked at the next start.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from p2prl.errors import StoreError

MEMORY = Path(":memory:")
QUICK_CHECK_BYTES = 64 * 2**20  # a larger file is read when it is used: checking it would hold up the start

BROKEN = ("malformed", "not a database", "disk I/O error")  # what sqlite says of a file that is not whole
SALVAGED = (("manifests", 5), ("addresses", 2))  # table, columns

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE groups (
        id BLOB NOT NULL UNIQUE, maker TEXT NOT NULL, counter INTEGER NOT NULL, term INTEGER NOT NULL,
        step INTEGER NOT NULL, hash BLOB NOT NULL, own INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
        reward_mean REAL NOT NULL, num_answers INTEGER NOT NULL, made_at REAL NOT NULL, updated_at REAL NOT NULL,
        content_bytes INTEGER NOT NULL, trained INTEGER NOT NULL, body BLOB NOT NULL
    );
    CREATE INDEX groups_maker ON groups (maker, counter);
    CREATE INDEX groups_state ON groups (trained, state, own);
    CREATE TABLE trained (number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB NOT NULL UNIQUE);
    CREATE TABLE manifests (id BLOB NOT NULL UNIQUE, sealed BLOB NOT NULL, term INTEGER, step INTEGER, parent BLOB);
    CREATE INDEX manifests_step ON manifests (step);
    CREATE TABLE marks (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE counters (name TEXT PRIMARY KEY, reserved INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE series (name TEXT NOT NULL, t REAL NOT NULL, value REAL NOT NULL);
    CREATE INDEX series_name ON series (name, t);
    CREATE TABLE addresses (number INTEGER PRIMARY KEY AUTOINCREMENT, address TEXT NOT NULL UNIQUE);
    CREATE TABLE standings (peer TEXT PRIMARY KEY, good REAL, bad REAL, at REAL) WITHOUT ROWID;
    """,
    # A sealed group is [kind, swarm, ...]: an array of 5, "Group" with its length, 32 bytes with theirs.
    """
    ALTER TABLE groups ADD COLUMN swarm BLOB NOT NULL DEFAULT x'';
    UPDATE groups SET swarm = substr(body, 10, 32);
    """,
)


class Database:
    """A connection that any thread may use, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        try:
            self._prepare()
        except BaseException:  # whatever it was goes on; the file must not stay open
            self._connection.close()
            raise

    def _prepare(self) -> None:
        """Raises sqlite3.DatabaseError for a file that is no database of ours."""
        run = self._connection.execute
        run("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table, else it has no effect
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        (version,) = run("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise StoreError(
                f"the store {self.path} was written by a newer p2prl (schema {version}, this one knows "
                f"{len(MIGRATIONS)}); update p2prl, or move the file away to begin a new one"
            )
        suspect = suspicion(self.path)
        if self.path != MEMORY and (suspect.exists() or self.path.stat().st_size <= QUICK_CHECK_BYTES):
            (verdict,) = run("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            suspect.unlink(missing_ok=True)
        for number, script in enumerate(MIGRATIONS[version:], version + 1):
            self._connection.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[tuple]:
        """One statement, its rows."""
        with self._failures():
            return self._connection.execute(sql, values).fetchall()

    def run_each(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for many rows, all or none."""
        with self.transaction(), self._failures():
            self._connection.executemany(sql, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block's statements or none."""
        with self._lock:
            if self._connection.in_transaction:  # inside another one: that decides
                yield
                return
            self.run("BEGIN IMMEDIATE")
            try:
                yield
                self.run("COMMIT")
            except BaseException:  # goes on, a cancellation too: half a transaction must not stay
                if self._connection.in_transaction:  # sqlite has ended it itself when the disk is full
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def durable(self) -> Iterator[None]:
        """What is written in the block has reached the disk when it ends; not inside a transaction."""
        with self._lock:
            self.run("PRAGMA synchronous = FULL")
            try:
                yield
            finally:
                self.run("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except sqlite3.Error as error:
            if self.path != MEMORY and any(word in str(error) for word in BROKEN):
                with contextlib.suppress(OSError):
                    suspicion(self.path).touch()
            raise StoreError(
                f"the store {self.path} can't be used: {error}; "
                "free some disk space and check the disk, then start again"
            ) from error


def open_database(path: Path, now: float) -> tuple[Database, str]:
    """The database and a notice for the owner, "" when all is well."""
    try:
        if path != MEMORY:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return Database(path), ""
        except sqlite3.OperationalError as error:  # locked, no rights, disk full: nothing is wrong with the file
            if not path.is_file() or "malformed" not in str(error):
                raise StoreError(f"can't open the store {path}: {error}; check the disk's space and rights") from error
            aside = _set_aside(path, now)
            why = str(error)
        except sqlite3.DatabaseError as error:
            aside = _set_aside(path, now)
            why = str(error)
        suspicion(path).unlink(missing_ok=True)
        database = Database(path)
        _salvage(aside, database)
        return database, _notice(path, aside, why)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"can't open the store {path}: {error}; check the disk's space and rights") from error


def suspicion(path: Path) -> Path:
    """There while the file is suspected to be corrupt."""
    return path.with_name(f"{path.name}.suspect")


def _set_aside(path: Path, now: float) -> Path:
    aside = path.with_name(f"{path.name}.corrupt-{int(now)}")
    number = 0
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.corrupt-{int(now)}-{number}")
    for suffix in ("-wal", "-shm"):
        companion = path.with_name(path.name + suffix)
        if companion.exists():
            companion.rename(aside.with_name(aside.name + suffix))
    path.rename(aside)
    return aside


def _salvage(aside: Path, database: Database) -> None:
    """What can still be read; what is wrong with its contents is found when it is used."""
    with contextlib.suppress(sqlite3.Error):
        with contextlib.closing(sqlite3.connect(aside)) as old:
            for table, num_columns in SALVAGED:
                marks = ", ".join("?" * num_columns)
                with contextlib.suppress(sqlite3.Error, StoreError):  # up to the first page that can't be read
                    for row in old.execute(f"SELECT * FROM {table}"):
                        database.run(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)


def _notice(path: Path, aside: Path, why: str) -> str:
    return (
        f"The store {path.name} was corrupt ({' '.join(why.split())[:120]}) and is now {aside.name}; a new one was "
        "begun. Groups that nobody had trained on yet are lost. Check the disk; delete the old file when you don't "
        "need it."
    )
