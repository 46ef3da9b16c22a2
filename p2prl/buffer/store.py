"""What a node must not forget: groups and their fate, manifests, its vote, its counters, figures for plots.

In: sealed groups and manifests, verdicts, points of series. Out: what waits, what was admitted, bodies by id.

Invariants: a counter is never given twice, whatever kills the process; the voted term is on the disk before
`save_voted_term` returns; a group that a step trained on is remembered by its id, also when its body was pruned or
never came; groups of ours that wait for the learner are never pruned. Recipes of one home share the file: groups and
marks are their swarm's own, so no node gives up what waits in another swarm. Sync: call it from one thread.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from p2prl.buffer.database import MEMORY, Database, open_database
from p2prl.buffer.journal import Journal, Row
from p2prl.buffer.trust import Standing
from p2prl.records import Group, GroupHeader, Verdict, Version

RESERVED = 64  # counters reserved by one write to the disk
MAX_ADDRESSES = 256
MAX_POINTS = 20_000  # of one series
MAX_TRAINED = 500_000  # ids remembered
# An older release had one head for all recipes: what it says is looked at where the swarm has none of its own.
HEAD = "SELECT value FROM marks WHERE name IN (?, 'head') ORDER BY name = 'head' LIMIT 1"
_STATES = ("own", "held", "admitted", "refused", "dropped", "trained")
_STATE = "CASE WHEN trained THEN 'trained' ELSE state END"
_COLUMNS = (
    f"id, maker, counter, term, step, hash, own, {_STATE}, reason, reward_mean, num_answers, made_at, content_bytes, "
    "updated_at"
)


def mark(name: str, swarm: bytes) -> str:
    """What a swarm's own mark is called."""
    return f"{name} {swarm.hex()}" if swarm else name


class StoredGroup(msgspec.Struct, frozen=True):
    """A group without its body. `state`: own (waits, unjudged here), held, admitted, trained, dropped or refused."""

    id: bytes
    maker: str
    counter: int
    version: Version
    own: bool
    state: str
    reason: str
    reward_mean: float
    num_answers: int
    made_at: float
    content_bytes: int
    updated_at: float  # when it came, was judged, dropped or trained on

    @property
    def header(self) -> GroupHeader:
        return GroupHeader(self.id, self.content_bytes, self.version, self.num_answers, self.reward_mean)


class Store:
    """`notice` is for the owner: what was wrong with the file, "" when nothing was."""

    def __init__(
        self,
        database: Database,
        notice: str = "",
        first_counter: int = 0,
        journal: Journal | None = None,
        swarm: bytes = b"",
    ) -> None:
        self._db, self.notice, self._swarm = database, notice, swarm
        self._first_counter, self._journal = first_counter, journal
        self._counters: dict[str, tuple[int, int]] = {}  # name -> next, end of what is reserved
        self._num_points = 0

    @classmethod
    def open(cls, path: Path | str, now: float, swarm: bytes = b"") -> "Store":
        """`path` ":memory:" keeps all in memory. `now` is unix seconds, `swarm` whose groups count. Raises StoreError.

        A new file's counters begin at a number that follows from the time, so that a node whose store was lost but
        whose key was not never uses a counter again.
        """
        path = Path(path)
        database, notice = open_database(path, now)
        if path == MEMORY:
            return cls(database, notice, swarm=swarm)
        store = cls(database, notice, int(now) << 16, Journal(path.with_name(f"{path.stem}.manifests")), swarm)
        if notice:
            store._take_from_journal()
        return store

    def _take_from_journal(self) -> None:
        assert self._journal is not None
        for row in self._journal.rows():
            self._insert_manifest(row)
        self.notice += f" It has {self._count('manifests')} versions of the old one."

    def close(self) -> None:
        self._db.close()

    # -- groups -----------------------------------------------------------------------------------------------------

    def save_group(self, group: Group, group_id: bytes, sealed: bytes, *, own: bool, now: float) -> bool:
        """Keep a group, as "own" or "held"; False when it was there."""
        version = group.versions[0]
        mean = sum(trajectory.reward for trajectory in group.trajectories) / len(group.trajectories)
        state = "own" if own else "held"
        with self._db.transaction():
            if self._db.run("SELECT 1 FROM groups WHERE id = ?", (group_id,)):
                return False
            trained = len(self._db.run("SELECT 1 FROM trained WHERE id = ?", (group_id,)))
            values = (
                group_id, group.maker, group.counter, version.term, version.step, version.hash, own, state, "",
                mean, len(group.trajectories), group.made_at, now, len(sealed), trained, sealed, self._swarm,
            )  # fmt: skip
            self._db.run(f"INSERT INTO groups VALUES ({', '.join('?' * len(values))})", values)
        return True

    def save_verdict(self, verdict: Verdict, now: float) -> None:
        """What admission here decided on a group that we keep."""
        self.set_state([verdict.group_id], "admitted" if verdict.admitted else "refused", verdict.reason, now)

    def drop(self, group_ids: Iterable[bytes], reason: str, now: float) -> None:
        """Past max age, or refused by those who train: nothing waits for it any more."""
        self.set_state(group_ids, "dropped", reason, now)

    def set_state(self, group_ids: Iterable[bytes], state: str, reason: str, now: float) -> None:
        assert state in _STATES[:-1], "trained is a mark of its own: mark_trained"
        rows = [(state, reason, now, group_id) for group_id in group_ids]
        self._db.run_each("UPDATE groups SET state = ?, reason = ?, updated_at = ? WHERE id = ?", rows)

    def forget(self, group_ids: Iterable[bytes]) -> None:
        """As if it had never come: it may come again."""
        self._db.run_each("DELETE FROM groups WHERE id = ?", [(group_id,) for group_id in group_ids])

    def mark_trained(self, group_ids: Iterable[bytes], now: float = 0.0) -> None:
        """A manifest on our chain lists them; also ids that we don't hold. Their bodies stay a while from `now` on."""
        rows = [(group_id,) for group_id in group_ids]
        with self._db.transaction():
            self._db.run_each("INSERT OR IGNORE INTO trained (id) VALUES (?)", rows)
            marked = "UPDATE groups SET trained = 1, updated_at = MAX(updated_at, ?2) WHERE id = ?1 AND trained = 0"
            self._db.run_each(marked, [(*row, now) for row in rows])

    def unmark_trained(self, group_ids: Iterable[bytes]) -> None:
        """A rollback: they are again what they were before."""
        rows = [(group_id,) for group_id in group_ids]
        with self._db.transaction():
            self._db.run_each("DELETE FROM trained WHERE id = ?", rows)
            self._db.run_each("UPDATE groups SET trained = 0 WHERE id = ?", rows)

    def has_group(self, group_id: bytes) -> bool:
        """Kept here, or trained on."""
        sql = (
            "SELECT 1 WHERE EXISTS (SELECT 1 FROM groups WHERE id = ?1) OR EXISTS (SELECT 1 FROM trained WHERE id = ?1)"
        )
        return bool(self._db.run(sql, (group_id,)))

    def group_at(self, maker: str, counter: int) -> bytes | None:
        """The id of the group kept under this counter of the maker, but for refused ones."""
        kept = "maker = ? AND counter = ? AND state != 'refused' AND swarm = ?"
        sql = f"SELECT id FROM groups WHERE {kept} ORDER BY rowid LIMIT 1"
        rows = self._db.run(sql, (maker, counter, self._swarm))
        return rows[0][0] if rows else None

    def group(self, group_id: bytes) -> StoredGroup | None:
        found = self._groups("id = ?", (group_id,))
        return found[0] if found else None

    def body(self, group_id: bytes) -> bytes | None:
        """The sealed group."""
        rows = self._db.run("SELECT body FROM groups WHERE id = ?", (group_id,))
        return rows[0][0] if rows else None

    def own_waiting(self) -> list[StoredGroup]:
        """Our groups that no manifest on our chain lists and that were not given up, the oldest first."""
        return self._groups("own = 1 AND trained = 0 AND state IN ('own', 'admitted') ORDER BY rowid")

    def admitted_untrained(self) -> list[StoredGroup]:
        """What a step may use, ours too, the oldest first."""
        return self._groups("state = 'admitted' AND trained = 0 ORDER BY rowid")

    def unjudged(self, limit: int = 256) -> list[StoredGroup]:
        """Not yet examined here, ours too, the oldest first."""
        return self._groups("state IN ('own', 'held') AND trained = 0 ORDER BY rowid LIMIT ?", (limit,))

    def newest_groups(self, limit: int = 100) -> list[StoredGroup]:
        """For people."""
        return self._groups("TRUE ORDER BY rowid DESC LIMIT ?", (limit,))

    def num_groups(self) -> dict[str, int]:
        """How many are kept, by state."""
        return dict(self._db.run(f"SELECT {_STATE} AS s, COUNT(*) FROM groups GROUP BY s"))

    def _groups(self, clause: str, values: tuple = ()) -> list[StoredGroup]:
        rows = self._db.run(f"SELECT {_COLUMNS} FROM groups WHERE swarm = ? AND {clause}", (self._swarm, *values))
        return [
            StoredGroup(row[0], row[1], row[2], Version(row[3], row[4], row[5]), bool(row[6]), *row[7:]) for row in rows
        ]

    def prune(self, max_bytes: int, older_than: float) -> int:
        """Drop bodies that nobody needs: done with before `older_than`, then down to `max_bytes`; how many went.

        In this order: trained, refused and dropped, held, admitted; the oldest first. Ours that wait stay.
        """
        done = "trained = 1 OR state IN ('refused', 'dropped')"
        with self._db.transaction():
            before = self._count("groups")
            old = f"SELECT rowid FROM groups WHERE ({done}) AND updated_at < ?"
            self._db.run(f"DELETE FROM groups WHERE rowid IN ({old})", (older_than,))
            ((held_bytes,),) = self._db.run("SELECT COALESCE(SUM(content_bytes), 0) FROM groups")
            order = f"CASE WHEN trained = 1 THEN 0 WHEN {done} THEN 1 WHEN state = 'held' THEN 2 ELSE 3 END"
            candidates = f"SELECT rowid, content_bytes FROM groups WHERE ({done}) OR own = 0 ORDER BY {order}, rowid"
            going: list[tuple[int]] = []
            if held_bytes > max_bytes:
                for rowid, content_bytes in self._db.run(candidates):
                    if held_bytes <= max_bytes:
                        break
                    held_bytes -= content_bytes
                    going.append((rowid,))
            self._db.run_each("DELETE FROM groups WHERE rowid = ?", going)
            newest = "SELECT COALESCE(MAX(number), 0) FROM trained"
            self._db.run(f"DELETE FROM trained WHERE number <= ({newest}) - ?", (MAX_TRAINED,))
            pruned = before - self._count("groups")
        self._db.run("PRAGMA incremental_vacuum")
        return pruned

    def _count(self, table: str) -> int:
        ((count,),) = self._db.run(f"SELECT COUNT(*) FROM {table}")
        return count

    # -- versions and votes -----------------------------------------------------------------------------------------

    def save_manifest(self, manifest_id: bytes, sealed: bytes, term: int, step: int, parent: bytes = b"") -> None:
        """The journal comes first: what the table has, it has."""
        if self.manifest(manifest_id) is None:
            row = Row(manifest_id, sealed, term, step, parent)
            if self._journal is not None:
                self._journal.append(row)
            self._insert_manifest(row)

    def _insert_manifest(self, row: Row) -> None:
        values = msgspec.structs.astuple(row)
        self._db.run("INSERT OR IGNORE INTO manifests VALUES (?, ?, ?, ?, ?)", values)

    def manifests(self) -> list[tuple[bytes, bytes]]:
        """(id, sealed) of all, parents before children."""
        return [(row[0], row[1]) for row in self._db.run("SELECT id, sealed FROM manifests ORDER BY step, term, id")]

    def manifest(self, manifest_id: bytes) -> bytes | None:
        rows = self._db.run("SELECT sealed FROM manifests WHERE id = ?", (manifest_id,))
        return rows[0][0] if rows else None

    def forget_manifests(self, manifest_ids: Iterable[bytes]) -> None:
        self._db.run_each("DELETE FROM manifests WHERE id = ?", [(manifest_id,) for manifest_id in manifest_ids])

    def save_head(self, manifest_id: bytes) -> None:
        self._db.run("INSERT OR REPLACE INTO marks VALUES (?, ?)", (mark("head", self._swarm), manifest_id))

    def head(self) -> bytes:
        """The manifest id that was saved last; 32 zero bytes for the base."""
        rows = self._db.run(HEAD, (mark("head", self._swarm),))
        return rows[0][0] if rows else bytes(32)

    def save_voted_term(self, term: int) -> None:
        """On the disk when this returns; never lowers it."""
        with self._db.durable():
            sql = "INSERT INTO marks VALUES (?1, ?2) ON CONFLICT DO UPDATE SET value = MAX(value, ?2)"
            self._db.run(sql, (mark("voted_term", self._swarm), term))

    def voted_term(self) -> int:
        sql = "SELECT MAX(value) FROM marks WHERE name IN (?, 'voted_term')"
        return self._db.run(sql, (mark("voted_term", self._swarm),))[0][0] or 0

    # -- counters ---------------------------------------------------------------------------------------------------

    def next_counter(self, name: str = "groups") -> int:
        """A number that was never given before under this name; rises by 1, with gaps after a restart."""
        following, end = self._counters.get(name, (0, 0))
        if following >= end:
            following, end = self._reserve(name)
        self._counters[name] = following + 1, end
        return following

    def next_counters(self, num: int, name: str = "groups") -> tuple[int, ...]:
        return tuple(self.next_counter(name) for _ in range(num))

    def _reserve(self, name: str) -> tuple[int, int]:
        with self._db.durable(), self._db.transaction():
            rows = self._db.run("SELECT reserved FROM counters WHERE name = ?", (name,))
            start = rows[0][0] if rows else self._first_counter
            self._db.run("INSERT OR REPLACE INTO counters VALUES (?, ?)", (name, start + RESERVED))
        return start, start + RESERVED

    # -- figures, addresses, trust ----------------------------------------------------------------------------------

    def add_points(self, values: Mapping[str, float], t: float) -> None:
        """One point for each series; the oldest beyond MAX_POINTS go."""
        self._db.run_each("INSERT INTO series VALUES (?, ?, ?)", [(name, t, value) for name, value in values.items()])
        self._num_points += len(values)
        if self._num_points >= 1024:
            self._num_points = 0
            for (name,) in self._db.run("SELECT DISTINCT name FROM series"):
                self.trim_series(name, MAX_POINTS)

    def trim_series(self, name: str, keep: int) -> None:
        kept = "SELECT rowid FROM series WHERE name = ?1 ORDER BY t DESC, rowid DESC LIMIT ?2"
        self._db.run(f"DELETE FROM series WHERE name = ?1 AND rowid NOT IN ({kept})", (name, keep))

    def series(self, name: str, since: float = 0.0) -> list[tuple[float, float]]:
        """(t, value), in order of time."""
        sql = "SELECT t, value FROM series WHERE name = ? AND t >= ? ORDER BY t, rowid"
        return [(row[0], row[1]) for row in self._db.run(sql, (name, since))]

    def save_good_addresses(self, addresses: Iterable[str]) -> None:
        """Where peers answered lately; the newest MAX_ADDRESSES are kept."""
        with self._db.transaction():
            rows = [(address,) for address in addresses]
            self._db.run_each("INSERT OR REPLACE INTO addresses (address) VALUES (?)", rows)
            kept = "SELECT number FROM addresses ORDER BY number DESC LIMIT ?"
            self._db.run(f"DELETE FROM addresses WHERE number NOT IN ({kept})", (MAX_ADDRESSES,))

    def good_addresses(self) -> tuple[str, ...]:
        """The newest first."""
        return tuple(row[0] for row in self._db.run("SELECT address FROM addresses ORDER BY number DESC"))

    def save_standings(self, standings: Mapping[str, Standing]) -> None:
        rows = [(peer, standing.good, standing.bad, standing.at) for peer, standing in standings.items()]
        self._db.run_each("INSERT OR REPLACE INTO standings VALUES (?, ?, ?, ?)", rows)

    def standings(self) -> dict[str, Standing]:
        return {row[0]: Standing(*row[1:]) for row in self._db.run("SELECT peer, good, bad, at FROM standings")}
