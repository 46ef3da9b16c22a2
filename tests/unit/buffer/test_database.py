import contextlib
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
    assert database.run("PRAGMA user_version") == [(2,)]
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


def test_a_full_disk_is_a_store_error_and_loses_nothing(small_disk) -> None:
    disk = small_disk(4)
    database, _ = open_database(disk.path / "store.db", 1.0)
    insert = "INSERT INTO series VALUES (?, 1.0, 1.0)"
    database.run(insert, ("before",))
    disk.fill()
    with pytest.raises(StoreError, match="full.*free some disk space"):
        database.run_each(insert, [(f"{number}" * 100,) for number in range(20_000)])
    with database.durable(), pytest.raises(StoreError), database.transaction():
        database.run_each(insert, [(f"{number}" * 100,) for number in range(20_000)])
    assert database.run("SELECT name FROM series") == [("before",)]
    disk.free()
    database.run(insert, ("after",))
    database.close()
    database, notice = open_database(disk.path / "store.db", 2.0)
    assert notice == ""
    assert database.run("SELECT name FROM series ORDER BY rowid") == [("before",), ("after",)]
    database.close()


def test_a_file_on_a_full_disk_is_opened_or_left_alone(small_disk) -> None:
    """Never set aside: nothing is wrong with it."""
    disk = small_disk(4)
    path = disk.path / "store.db"
    database, _ = open_database(path, 1.0)
    database.run("INSERT INTO series VALUES ('kept', 1.0, 1.0)")
    database.close()
    disk.fill()
    with contextlib.suppress(StoreError):
        database, notice = open_database(path, 2.0)
        assert notice == ""
        database.close()
    disk.free()
    database, notice = open_database(path, 3.0)
    assert (notice, database.run("SELECT name FROM series")) == ("", [("kept",)])
    database.close()


def test_what_can_be_read_of_a_corrupt_file_is_kept(path: Path) -> None:
    """Manifests and addresses prove themselves when they are used; votes and counters don't."""
    database, _ = open_database(path, 1.0)
    for number in range(50):
        values = (bytes([number]) * 32, b"sealed" * 200, 1, number, b"")
        database.run("INSERT INTO manifests VALUES (?, ?, ?, ?, ?)", values)
    database.run("INSERT INTO addresses (address) VALUES ('/ip4/1.2.3.4/tcp/1')")
    database.run("INSERT INTO marks VALUES ('voted_term', 7)")
    database.run_each("INSERT INTO series VALUES ('x', ?, 1.0)", [(float(t),) for t in range(5000)])
    database.close()
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    path.write_bytes(content)
    database, notice = open_database(path, 2.0)
    ((count,),) = database.run("SELECT COUNT(*) FROM manifests")
    assert 0 < count <= 50
    assert "was corrupt" in notice
    assert database.run("SELECT address FROM addresses") == [("/ip4/1.2.3.4/tcp/1",)]
    assert database.run("SELECT * FROM marks") == []
    database.close()


def test_a_large_file_that_failed_in_use_is_checked_at_the_next_start(path: Path, monkeypatch) -> None:
    monkeypatch.setattr("p2prl.buffer.database.QUICK_CHECK_BYTES", 0)  # every file counts as large
    database, _ = open_database(path, 1.0)
    database.run_each("INSERT INTO series VALUES ('x', ?, 1.0)", [(float(t),) for t in range(5000)])
    database.close()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\xff" * (len(content) // 2))
    database, notice = open_database(path, 2.0)
    assert notice == ""
    with pytest.raises(StoreError, match="start again"):
        database.run("SELECT SUM(value) FROM series")
    database.close()
    database, notice = open_database(path, 3.0)
    assert "was corrupt" in notice
    database.close()
    assert open_database(path, 4.0)[1] == ""
