import sqlite3
from pathlib import Path

import pytest

from p2prl.buffer.database import Database, open_database
from p2prl.errors import StoreError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "store.db"


def test_a_new_file_is_made_in_a_new_folder(path: Path) -> None:
    database, notice = open_database(path, 1.0)
    assert notice == ""
    assert database.run("PRAGMA journal_mode") == [("wal",)]
    assert database.run("PRAGMA user_version") == [(1,)]
    database.close()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "overwritten"])
def test_a_corrupt_file_is_set_aside(path: Path, damage: str) -> None:
    database, _ = open_database(path, 1.0)
    database.run_each("INSERT INTO series VALUES ('x', ?, 1.0)", [(float(t),) for t in range(5000)])
    database.close()
    content = path.read_bytes()
    if damage == "garbage":
        broken = b"not a database " * 1000
    elif damage == "truncated":
        broken = content[: len(content) // 2]
    else:
        broken = content[:8192] + b"\xff" * (len(content) - 8192)
    path.write_bytes(broken)
    for _ in range(2):
        database, notice = open_database(path, 1234.0)
        assert "corrupt" in notice
        assert database.run("SELECT COUNT(*) FROM series") == [(0,)]
        database.close()
        path.write_bytes(broken)
    for name in ("store.db.corrupt-1234", "store.db.corrupt-1234-1"):
        # SQLite may count its visit in the file's header (100 bytes).
        assert (path.parent / name).read_bytes()[100:] == broken[100:]


def test_a_newer_file_is_left_alone(path: Path) -> None:
    open_database(path, 1.0)[0].close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="newer p2prl"):
        open_database(path, 1.0)
    assert sorted(item.name for item in path.parent.iterdir() if "corrupt" in item.name) == []


def test_a_place_that_can_not_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't open the store"):
        open_database(tmp_path / "file" / "store.db", 1.0)
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(StoreError, match="can't open the store"):
        open_database(tmp_path / "folder.db", 1.0)


def test_a_transaction_is_all_or_nothing(path: Path) -> None:
    database = Database(_made(path))
    with pytest.raises(StoreError):
        _insert_then_fail(database)
    with pytest.raises(StoreError), database.transaction():
        database.run_each("INSERT INTO series VALUES ('x', ?, 1.0)", [(1.0,), (None,)])
    assert database.run("SELECT * FROM series") == []
    with database.transaction():
        database.run("INSERT INTO series VALUES ('x', 1.0, 1.0)")
    assert database.run("SELECT * FROM series") == [("x", 1.0, 1.0)]
    database.close()


def _insert_then_fail(database: Database) -> None:
    with database.transaction():
        database.run("INSERT INTO series VALUES ('x', 1.0, 1.0)")
        database.run("no such statement")


def _made(path: Path) -> Path:
    path.parent.mkdir()
    return path
