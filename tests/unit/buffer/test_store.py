import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2prl.buffer.database import MIGRATIONS
from p2prl.buffer.store import RESERVED, Store
from p2prl.buffer.trust import Standing
from p2prl.errors import StoreError
from p2prl.records import Verdict
from tests import factories

NOW = factories.NOW


@pytest.fixture
def store() -> Iterator[Store]:
    opened = Store.open(":memory:", NOW)
    yield opened
    opened.close()


def keep(store: Store, counter: int, *, maker: int = 1, own: bool = False, now: float = NOW) -> bytes:
    group = factories.group(maker, counter)
    group_id, sealed = factories.sealed(group, maker)
    assert store.save_group(group, group_id, sealed, own=own, now=now)
    return group_id


def admit(store: Store, group_id: bytes) -> bytes:
    store.save_verdict(Verdict(group_id, True, ""), NOW)
    return group_id


def state(store: Store, group_id: bytes) -> str:
    found = store.group(group_id)
    assert found is not None
    return found.state


def test_a_group_is_kept_once_with_its_body(store: Store) -> None:
    group = factories.group(1, 7)
    group_id, sealed = factories.sealed(group, 1)
    assert store.save_group(group, group_id, sealed, own=False, now=NOW)
    assert not store.save_group(group, group_id, sealed, own=False, now=NOW)
    assert store.body(group_id) == sealed
    found = store.group(group_id)
    assert found is not None
    assert (found.maker, found.counter, found.version, found.state) == (group.maker, 7, group.versions[0], "held")
    assert (found.reward_mean, found.num_answers, found.content_bytes) == (0.5, 2, len(sealed))
    assert store.has_group(group_id) and not store.has_group(bytes(32))
    assert store.group_at(group.maker, 7) == group_id
    assert store.group_at(group.maker, 8) is None
    assert store.body(bytes(32)) is None and store.group(bytes(32)) is None


def test_what_waits_what_was_admitted_what_was_trained(store: Store) -> None:
    mine, judged_mine = keep(store, 0, maker=0, own=True), admit(store, keep(store, 1, maker=0, own=True))
    held, admitted, trained = keep(store, 0), admit(store, keep(store, 1)), admit(store, keep(store, 2))
    refused = keep(store, 3)
    store.save_verdict(Verdict(refused, False, "wrong_reward"), NOW)
    store.mark_trained([trained, bytes(32)])
    assert [found.id for found in store.own_waiting()] == [mine, judged_mine]
    assert [found.id for found in store.admitted_untrained()] == [judged_mine, admitted]
    assert [found.id for found in store.unjudged()] == [mine, held]
    assert store.num_groups() == {"own": 1, "held": 1, "admitted": 2, "trained": 1, "refused": 1}
    assert [found.id for found in store.newest_groups(1)] == [refused]
    assert store.group_at(factories.identity(1).peer_id, 3) is None  # a refused one doesn't hold its counter


def test_a_rollback_gives_groups_back(store: Store) -> None:
    mine, other = admit(store, keep(store, 0, maker=0, own=True)), admit(store, keep(store, 1))
    store.mark_trained([mine, other])
    assert (store.own_waiting(), store.admitted_untrained()) == ([], [])
    store.mark_trained([mine])
    store.unmark_trained([mine, other])
    assert [found.id for found in store.own_waiting()] == [mine]
    assert [found.id for found in store.admitted_untrained()] == [mine, other]


def test_a_manifest_may_come_before_the_groups_it_lists(store: Store) -> None:
    group_id, _ = factories.sealed(factories.group(1, 5), 1)
    store.mark_trained([group_id])
    assert store.has_group(group_id)
    keep(store, 5)
    assert state(store, group_id) == "trained"
    assert store.unjudged() == []


def test_dropped_and_forgotten_groups_wait_no_more(store: Store) -> None:
    mine, other = keep(store, 0, maker=0, own=True), keep(store, 1)
    store.drop([mine], "too_old", NOW)
    assert store.own_waiting() == []
    found = store.group(mine)
    assert found is not None and found.reason == "too_old"
    store.forget([other])
    assert not store.has_group(other)
    keep(store, 1)


def test_pruning_takes_what_nobody_needs_first(store: Store) -> None:
    mine = keep(store, 0, maker=0, own=True)
    trained, refused, held, admitted = keep(store, 1), keep(store, 2), keep(store, 3), admit(store, keep(store, 4))
    store.mark_trained([trained])
    store.save_verdict(Verdict(refused, False, "too_long"), NOW)
    found = store.group(mine)
    assert found is not None
    size = found.content_bytes
    assert store.prune(100 * size, NOW - 1) == 0
    for left in ([mine, refused, held, admitted], [mine, held, admitted], [mine, admitted], [mine], [mine]):
        store.prune(len(left) * size + 20, NOW - 1)
        assert sorted(found.id for found in store.newest_groups()) == sorted(left)
    assert store.has_group(trained)  # its id is remembered
    assert store.prune(0, NOW + 1) == 0


def test_pruning_by_age_leaves_what_is_not_done(store: Store) -> None:
    trained, held = keep(store, 1), keep(store, 2)
    store.mark_trained([trained], NOW + 500)
    assert store.prune(2**30, NOW + 1) == 0  # a losing branch may give it back, however long it waited for its step
    assert store.prune(2**30, NOW + 501) == 1
    assert [found.id for found in store.newest_groups()] == [held]


def test_manifests_come_back_parents_first(store: Store) -> None:
    for step in (3, 1, 2):
        store.save_manifest(bytes([step]) * 32, b"sealed %d" % step, 1, step)
    store.save_manifest(bytes([1]) * 32, b"again", 1, 1)
    assert [data for _, data in store.manifests()] == [b"sealed 1", b"sealed 2", b"sealed 3"]
    assert store.manifest(bytes([2]) * 32) == b"sealed 2"
    store.forget_manifests([bytes([2]) * 32])
    assert store.manifest(bytes([2]) * 32) is None
    assert store.head() == bytes(32)
    store.save_head(bytes([3]) * 32)
    assert store.head() == bytes([3]) * 32


def test_the_voted_term_never_falls(store: Store) -> None:
    assert store.voted_term() == 0
    store.save_voted_term(5)
    store.save_voted_term(3)
    assert store.voted_term() == 5


def test_series_are_in_order_and_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2prl.buffer.store.MAX_POINTS", 100)
    for t in range(1024):
        store.add_points({"loss": float(t), "reward": 1.0}, float(t))
    assert store.series("loss", 1000.0)[0] == (1000.0, 1000.0)
    assert len(store.series("loss")) <= 100 + 1024
    store.trim_series("loss", 10)
    assert store.series("loss") == [(float(t), float(t)) for t in range(1014, 1024)]
    assert store.series("nothing") == []


def test_addresses_and_standings_are_kept(store: Store) -> None:
    store.save_good_addresses([f"/ip4/10.0.0.1/tcp/{port}" for port in range(300)])
    store.save_good_addresses(["/ip4/10.0.0.1/tcp/200"])
    known = store.good_addresses()
    assert (len(known), known[0], known[1]) == (256, "/ip4/10.0.0.1/tcp/200", "/ip4/10.0.0.1/tcp/299")
    store.save_standings({"peer": Standing(1.0, 2.0, 3.0)})
    store.save_standings({"peer": Standing(4.0, 2.0, 3.0)})
    assert store.standings() == {"peer": Standing(4.0, 2.0, 3.0)}


def test_counters_rise_by_one_and_never_come_again(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    given: list[int] = []
    for _ in range(3):
        store = Store.open(path, NOW)
        fresh = store.next_counters(RESERVED + 5)
        assert fresh == tuple(range(fresh[0], fresh[0] + RESERVED + 5))
        given += fresh
        store.close()  # as after a kill: what was reserved is lost
    assert len(set(given)) == len(given) and given == sorted(given)
    path.unlink()
    store = Store.open(path, NOW + 60)
    assert store.next_counter() > max(given)  # the file was lost, the key was not
    assert store.next_counter("other") < 2**53
    store.close()


KILLED = """
import sys, os, signal
from p2prl.buffer.store import Store
store = Store.open(sys.argv[1], 1000.0)
store.save_voted_term(9)
store.save_head(b"h" * 32)
print(*store.next_counters(3), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_nothing_that_was_said(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    store = Store.open(path, 1000.0)
    assert (store.notice, store.voted_term(), store.head()) == ("", 9, b"h" * 32)
    assert store.next_counter() > max(map(int, ended.stdout.split()))
    store.close()


FILLED = """
import resource, signal, sys
from p2prl.buffer.store import Store
from p2prl.errors import StoreError
store = Store.open(sys.argv[1], 1000.0)
store.save_voted_term(2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
try:
    for step in range(1000):
        store.save_manifest(step.to_bytes(32, "big"), bytes(10_000), 1, step)
except StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
store.save_voted_term(3)
print(len(store.manifests()), step)
"""


def test_a_full_disk_is_a_store_error_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    command = [sys.executable, "-c", FILLED, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LANG": "C"})
    assert ended.returncode == 0, ended.stderr
    message, counts = ended.stdout.splitlines()
    assert "free some disk space" in message
    kept, tried = map(int, counts.split())
    assert kept == tried > 0
    store = Store.open(path, 1000.0)
    assert (len(store.manifests()), store.voted_term()) == (kept, 3)
    store.close()


def test_a_corrupt_file_is_said_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(b"garbage" * 2000)
    store = Store.open(path, NOW)
    assert "corrupt" in store.notice
    keep(store, 0)
    store.close()


def test_a_store_that_fails_later_is_a_store_error(store: Store) -> None:
    store.close()
    with pytest.raises(StoreError, match="can't be used"):
        store.save_head(bytes(32))


def test_a_store_that_rots_keeps_its_manifests(tmp_path: Path) -> None:
    path = tmp_path / "node.db"
    store = Store.open(path, 1.0)
    for number in range(20):
        store.save_manifest(bytes([number]) * 32, b"sealed" * 50, 1, number)
        store.save_manifest(bytes([number]) * 32, b"sealed" * 50, 1, number)
    kept = store.manifests()
    assert len(kept) == 20
    store.close()
    path.write_bytes(b"not a database" * 1000)
    store = Store.open(path, 2.0)
    assert store.manifests() == kept
    assert "was corrupt" in store.notice and "It has 20 versions of the old one" in store.notice
    store.close()


def test_swarms_of_one_file_have_groups_votes_and_heads_of_their_own(tmp_path: Path) -> None:
    """Else a node that tries another recipe gives up what waits in the first one."""
    path, (one, other) = tmp_path / "node.db", (b"1" * 32, b"2" * 32)
    store = Store.open(path, NOW, one)
    waiting, admitted, held = keep(store, 1, own=True), admit(store, keep(store, 2)), keep(store, 3)
    store.save_voted_term(5)
    store.save_head(b"h" * 32)
    store.close()
    store = Store.open(path, NOW, other)
    assert (store.own_waiting(), store.admitted_untrained(), store.unjudged(), store.newest_groups()) == ([],) * 4
    assert (store.voted_term(), store.head()) == (0, bytes(32))
    assert store.group(held) is None and store.group_at(factories.group(1, 1).maker, 1) is None
    keep(store, 4, own=True)
    store.save_voted_term(2)
    store.close()
    store = Store.open(path, NOW, one)
    assert [row.id for row in store.own_waiting()] == [waiting]
    assert [row.id for row in store.admitted_untrained()] == [admitted]
    assert (store.voted_term(), store.head()) == (5, b"h" * 32)
    store.close()


def test_a_file_of_an_older_release_is_sorted_by_swarm(tmp_path: Path) -> None:
    """It had no such column, one head and one vote for all: the vote holds everywhere."""
    path, swarm = tmp_path / "node.db", factories.SWARM
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.executescript(f"{MIGRATIONS[0]}; PRAGMA user_version = 1;")
        group = factories.group(1, 1)
        group_id, sealed = factories.sealed(group, 1)
        row = (group_id, group.maker, 1, 0, 0, bytes(32), 1, "own", "", 0.5, 2, NOW, NOW, len(sealed), 0, sealed)
        old.execute(f"INSERT INTO groups VALUES ({', '.join('?' * len(row))})", row)
        old.execute("INSERT INTO marks VALUES ('voted_term', 7)")
        old.execute("INSERT INTO marks VALUES ('head', ?)", (b"h" * 32,))
        old.commit()
    store = Store.open(path, NOW, swarm)
    assert [row.id for row in store.own_waiting()] == [group_id]
    assert (store.voted_term(), store.head()) == (7, b"h" * 32)
    store.save_voted_term(6)
    assert store.voted_term() == 7
    store.save_head(b"i" * 32)
    assert store.head() == b"i" * 32
    store.close()
    store = Store.open(path, NOW, b"2" * 32)
    assert (store.own_waiting(), store.voted_term()) == ([], 7)
    store.close()
