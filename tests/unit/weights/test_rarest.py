"""The decisions alone: simulated holders of any speed and fault, no network, no disk."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.records import PIECE_BYTES, Content
from p2prl.weights.holders import HolderRules, Holders, Remembered
from p2prl.weights.rarest import Ask, Board, Rules, Start, Stop

STEP_S = 0.1
RULES = Rules()


def content(num_pieces: int) -> Content:
    return Content("anchor", None, bytes(32), num_pieces * PIECE_BYTES - 5, (bytes(32),) * num_pieces)


class Peer(msgspec.Struct):
    have: frozenset[int]
    speed: float = 4.0  # pieces a second of one stream
    is_corrupt: bool = False
    dies_at: float = 1e9
    freezes_at: float = 1e9
    frozen_s: float = 10.0  # after which its streams fail
    refuses_until: float = 0.0


class Stream(msgspec.Struct):
    start: Start
    left: list[int]
    progress: float = 0.0
    has_head: bool = False
    sent: int = 0
    stalled_s: float = 0.0


class World:
    """Carries the board's actions out in steps of time and checks what must always hold."""

    def __init__(self, num_pieces: int, peers: dict[str, Peer], seed: int, rules: Rules = RULES) -> None:
        self.peers, self.now = peers, 0.0
        self.random = random.Random(seed)
        self.holders = Holders("me", num_pieces, Remembered().of(b"content"), rules.holders)
        self.board = Board(content(num_pieces), (), self.holders, rules, 0.0)
        self.streams: dict[int, Stream] = {}
        self.verified: set[int] = set()
        self.came: Counter[int] = Counter()  # whole pieces, right or wrong
        self.served: Counter[str] = Counter()
        self.first_order: list[int] = []
        self.ended_at = 0.0

    def run(self, until: float = 300.0) -> bool:
        """Whether all was fetched."""
        while self.now < until:
            if self.board.is_done:
                self.ended_at = self.now
                return True
            self.holders.offer(self.peers, self.now)
            for action in self.board.decide(self.now):
                self.do(action)
            self.check()
            if self.board.hopeless(self.now):
                return False
            self.now += STEP_S
            for number in list(self.streams):
                self.step(number)
        raise AssertionError(f"no end: {self.verified} of {self.came}")

    def do(self, action: Ask | Start | Stop) -> None:
        match action:
            case Ask(name):
                peer = self.peers[name]
                if self.now >= min(peer.dies_at, peer.freezes_at):
                    self.holders.failed(name, self.now)
                else:
                    self.board.answered(name, peer.have, self.now)
            case Start(number, name, indexes):
                assert set(indexes) <= self.peers[name].have and not set(indexes) & self.verified
                self.streams[number] = Stream(action, list(indexes))
            case Stop(number):
                if number in self.streams:
                    self.end(number, failed=False)

    def check(self) -> None:
        counts = Counter(stream.start.peer for stream in self.streams.values())
        assert len(self.streams) <= RULES.streams
        assert all(count <= RULES.streams_per_holder for count in counts.values())

    def end(self, number: int, *, failed: bool) -> None:
        del self.streams[number]
        self.board.ended(number, self.now, failed=failed)

    def step(self, number: int) -> None:
        stream = self.streams.get(number)
        if stream is None:
            return
        peer = self.peers[stream.start.peer]
        if self.now >= peer.dies_at:
            self.end(number, failed=True)
            return
        if self.now >= peer.freezes_at:
            stream.stalled_s += STEP_S
            if stream.stalled_s >= peer.frozen_s:
                self.end(number, failed=True)
            return
        stream.progress += peer.speed * STEP_S
        while number in self.streams and stream.left:
            index = stream.left[0]
            if not stream.has_head:
                if self.now < peer.refuses_until:
                    self.board.busy(number, stream.left.pop(0), (), self.now)
                    continue
                if not self.board.heads(number, index, self.now):
                    self.end(number, failed=False)
                    return
                stream.has_head = True
                self.first_order.append(index)
            sent = int(min(1.0, stream.progress) * PIECE_BYTES)
            self.board.moved(number, sent - stream.sent, self.now)
            stream.sent = sent
            if stream.progress < 1.0:
                return
            stream.progress -= 1.0
            stream.has_head, stream.sent = False, 0
            stream.left.pop(0)
            self.board.checking(number, self.now)
            self.came[index] += 1
            self.served[stream.start.peer] += 1
            if peer.is_corrupt:
                self.board.corrupt(stream.start.peer, index)
            else:
                assert index not in self.verified or self.came[index] <= RULES.streams_per_piece
                self.verified.add(index)
                self.board.verified(stream.start.peer, index, self.now)
        if number in self.streams and not stream.left:
            self.end(number, failed=self.board.expects(number))


def everything(num_pieces: int) -> frozenset[int]:
    return frozenset(range(num_pieces))


def test_the_rarest_come_first():
    rare = {3, 7}
    peers = {"all": Peer(everything(10)), "b": Peer(everything(10) - rare), "c": Peer(everything(10) - rare)}
    world = World(10, peers, 0)
    assert world.run()
    assert rare <= set(world.first_order[:6]), "each of the six streams begins, those of their only holder with them"


def test_one_holder_gets_two_long_streams():
    world = World(64, {"a": Peer(everything(64))}, 0)
    starts: list[Start] = []
    do = world.do
    world.do = lambda action: (starts.append(action) if isinstance(action, Start) else None, do(action))[1]  # type: ignore[method-assign]
    assert world.run()
    assert [len(start.indexes) for start in starts] == [32, 32]
    assert starts[0].indexes[:3] == (0, 2, 4) and starts[1].indexes[:3] == (1, 3, 5), (
        "the file grows from its beginning"
    )


def test_four_holders_take_a_quarter_of_the_time():
    times = {}
    for num in (1, 4):
        world = World(64, {f"p{number}": Peer(everything(64)) for number in range(num)}, 0)
        assert world.run() and sum(world.came.values()) <= 66
        times[num] = world.ended_at
    assert times[1] / times[4] > 3.3


def test_a_slow_holder_holds_nothing_up_and_is_left_out():
    peers = {f"p{number}": Peer(everything(32)) for number in range(3)} | {"slow": Peer(everything(32), speed=0.05)}
    world = World(32, peers, 0)
    assert world.run()
    fast = World(32, {name: peer for name, peer in peers.items() if name != "slow"}, 0)
    assert fast.run()
    assert world.ended_at < fast.ended_at + 2.0
    assert world.holders["slow"].num_slow >= 1


def test_a_slow_holder_serves_what_nobody_else_has():
    rules = Rules(holders=HolderRules(slow_strikes=1))
    peers = {"a": Peer(everything(20) - {4}), "slow": Peer(everything(20), speed=0.1)}
    world = World(20, peers, 0, rules)
    assert world.run()
    assert world.verified == everything(20)


def test_a_frozen_holder_is_relieved_before_its_streams_fail():
    peers = {f"p{number}": Peer(everything(32)) for number in range(3)} | {"f": Peer(everything(32), freezes_at=1.0)}
    world = World(32, peers, 0)
    assert world.run()
    assert world.ended_at < 6.0


def test_a_holder_that_never_begins_is_relieved_too():
    peers = {"a": Peer(everything(2)), "mute": Peer(everything(2), freezes_at=0.05)}
    world = World(2, peers, 0)
    world.holders.offer(peers, 0.0)
    world.holders.to_ask(0.0)
    for peer in peers:
        world.board.answered(peer, everything(2), 0.0)
    assert world.run()
    assert world.ended_at < 5.0


@pytest.mark.parametrize("freezes_at", [0.25, 0.35, 0.45, 0.55])
def test_a_piece_that_two_late_holders_have_is_taken_over_by_a_third(freezes_at: float):
    late = {name: Peer(everything(3), speed=2.0, freezes_at=freezes_at) for name in ("x", "y")}
    world = World(3, {**late, "a": Peer(everything(3), refuses_until=3.0)}, 0)
    assert world.run()
    assert world.ended_at < 7.0


def test_a_false_copy_that_comes_after_the_right_one_costs_nothing():
    holders = Holders("me", 1, Remembered().of(b"content"), HolderRules())
    board = Board(content(1), (), holders, RULES, 0.0)
    for peer in ("good", "bad"):
        holders.offer((peer,), 0.0)
        board.answered(peer, everything(1), 0.0)
    (first,) = (action for action in board.decide(1.0) if isinstance(action, Start))
    (second,) = (action for action in board.decide(1.0 + 2 * RULES.silent_s) if isinstance(action, Start))
    for start in (first, second):
        assert board.heads(start.stream, 0, 5.0)
        board.moved(start.stream, 5, 5.0)
    board.checking(first.stream, 6.0)
    board.checking(second.stream, 6.0)
    board.verified(first.peer, 0, 6.1)
    board.corrupt(second.peer, 0)
    assert board.is_done and holders[second.peer].is_corrupt


def test_a_corrupt_holder_is_asked_once():
    peers = {"bad": Peer(everything(16), is_corrupt=True, speed=8.0), "a": Peer(everything(16))}
    world = World(16, peers, 0)
    assert world.run()
    assert world.holders["bad"].is_corrupt
    assert world.served["bad"] <= 2, "what was on its way in its two streams"


def test_what_was_refused_is_asked_for_again():
    world = World(8, {"a": Peer(everything(8), refuses_until=5.0)}, 0)
    assert world.run()
    assert 5.0 < world.ended_at < 9.0


def test_nobody_has_it_and_who_is_dead_is_known_at_once():
    assert not World(4, {"a": Peer(everything(4), dies_at=0.0)}, 0).run(until=1.0)
    patient = World(4, {"a": Peer(frozenset())}, 0)
    assert not patient.run()
    assert RULES.patience_s < patient.now < RULES.patience_s + 1.0
    nobody = World(4, {}, 0)
    assert not nobody.run()


def test_the_holder_that_always_refuses_is_given_up():
    world = World(4, {"a": Peer(everything(4), refuses_until=1e9)}, 0)
    assert not world.run()
    assert RULES.longest_patience_s < world.now < RULES.longest_patience_s + 5.0


def test_faults_are_remembered_for_the_next_attempt():
    remembered = Remembered()
    first = Holders("me", 4, remembered.of(b"x"), RULES.holders)
    first.offer(["bad", "slow", "good", "me"], 0.0)
    assert first.to_ask(0.0) == ["bad", "slow", "good"]
    first["bad"].is_corrupt = True
    first["slow"].num_slow = 5
    second = Holders("me", 4, remembered.of(b"x"), RULES.holders)
    assert second.to_ask(0.0) == ["slow", "good"]
    assert second.is_slow(second["slow"]) and not second.is_slow(second["good"])
    remembered.forget(b"x")
    third = Holders("me", 4, remembered.of(b"x"), RULES.holders)
    third.offer(["bad"], 0.0)
    assert third.to_ask(0.0) == ["bad"]


def test_useless_peers_make_room_for_others():
    holders = Holders("me", 4, {}, HolderRules(tracked=3))
    crowd = [f"p{number}" for number in range(20)]
    asked: set[str] = set()
    for tick in range(60):
        holders.offer(crowd, float(tick))
        for peer in holders.to_ask(float(tick)):
            asked.add(peer)
            holders.answered(peer, frozenset(), float(tick), hungry=True)
        crowd = crowd[1:] + crowd[:1]
    assert asked == set(crowd)


def test_what_a_holder_does_counts_after_it_made_room():
    """Its calls failed, others came, and a stream of it still ran."""
    holders = Holders("me", 4, {}, HolderRules(tracked=1))
    board = Board(content(4), (), holders, RULES, 0.0)
    holders.offer(["old"], 0.0)
    assert holders.to_ask(0.0) == ["old"]
    board.answered("old", everything(4), 0.0)
    (start, *_) = [action for action in board.decide(0.5) if isinstance(action, Start)]
    first, second, third, *_ = start.indexes * 2
    assert board.heads(start.stream, first, 1.0)
    board.moved(start.stream, PIECE_BYTES, 1.0)
    for _ in range(2):
        holders.failed("old", 1.0)
    holders.offer(["new"], 40.0)
    assert holders.to_ask(40.0) == ["new"]
    board.checking(start.stream, 40.0)
    board.verified("old", first, 40.0)
    board.busy(start.stream, second, (), 40.0)
    board.corrupt("old", third)
    board.ended(start.stream, 41.0, failed=True)
    assert holders["old"].is_corrupt and "old" not in holders.to_ask(99.0)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_pieces = draw(st.integers(1, 24))
    honest = Peer(everything(num_pieces), speed=draw(st.sampled_from([0.5, 4.0, 16.0])))
    peers = {"honest": honest}
    for number in range(draw(st.integers(0, 5))):
        some = draw(st.frozensets(st.integers(0, num_pieces - 1)))
        peers[f"p{number}"] = Peer(
            have=draw(st.sampled_from([everything(num_pieces), some])),
            speed=draw(st.sampled_from([0.02, 1.0, 4.0, 40.0])),
            is_corrupt=draw(st.booleans()),
            dies_at=draw(st.sampled_from([0.0, 0.7, 3.0, 1e9])),
            freezes_at=draw(st.sampled_from([0.5, 2.0, 1e9])),
            refuses_until=draw(st.sampled_from([0.0, 2.0, 1e9])),
        )
    return World(num_pieces, peers, draw(st.integers(0, 9)))


@given(world=worlds())
@settings(max_examples=150, deadline=None)
def test_with_one_honest_holder_all_of_it_comes_whatever_the_others_do(world: World):
    assert world.run()
    assert world.verified == set(range(len(world.verified))) and world.board.is_done
    wrong = sum(world.served[name] for name, peer in world.peers.items() if peer.is_corrupt)
    assert sum(world.came.values()) - wrong <= 3 * len(world.verified)
