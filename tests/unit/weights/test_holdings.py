"""Why a file is here agrees with what would be collected."""

from hypothesis import given
from hypothesis import strategies as st

from p2prl.records import Content, Manifest
from p2prl.weights.chain import Held, Needs
from p2prl.weights.holdings import ANCHOR, CHAIN, GARBAGE, NEWEST, OLDER, PULLED, Part, Piled, holdings
from tests import factories

STATE = 1000
BASE = factories.version(0)


def delta(step: int, num_bytes: int = 10) -> Content:
    return factories.content(b"delta %d" % step, num_bytes, factories.version(step - 1))


def chain(length: int, anchors: frozenset[int]) -> list[Manifest]:
    """The newest first."""
    made = []
    for step in range(length, 0, -1):
        contents = (factories.anchor(step),) if step == 1 else (delta(step),)
        contents += (factories.anchor(step),) if step in anchors and step > 1 else ()
        made.append(factories.manifest(step, contents=contents))
    return made


def held(line: list[Manifest], states: tuple[int, ...]) -> Held:
    """All deltas, and the states of these steps."""
    deltas = {each.content_hash: each.content_bytes for one in line for each in one.contents if each.kind == "delta"}
    return Held({factories.version(step).hash: STATE for step in states}, deltas)


def test_each_says_why() -> None:
    line = chain(30, frozenset({1, 10, 20}))
    found = holdings(line, held(line, (1, 10, 20, 25, 30)), Needs(max_age=4, budget=10**9), BASE)
    kept = {each.version.step: each.kept for each in found.versions}
    assert (kept[30], kept[20], kept[10]) == (NEWEST, ANCHOR, ANCHOR)
    assert (kept[28], kept[21], kept[25], kept[5]) == (OLDER, CHAIN, CHAIN, GARBAGE)
    assert kept[1] == GARBAGE  # a third anchor
    first = found.versions[0]
    assert (first.state_bytes, first.held_bytes, first.parts[0].base_step) == (STATE, STATE + 10, 29)
    anchor = found.versions[10]
    assert anchor.held_bytes == STATE + 10  # the anchor is the state file
    assert [part.is_held for part in anchor.parts] == [True, True]


def test_what_is_of_no_version_here_is_counted() -> None:
    line = chain(2, frozenset({1}))
    found = holdings(line, Held({bytes(32): 7}, {bytes(32): 5}), Needs(4, 10**9), BASE)
    assert found.others == Piled(2, 12) and found.awaited is None and found.num_bytes == 12
    assert [each.kept for each in found.versions] == ["", ""]
    assert holdings([], Held({}, {}), Needs(4, 10**9), BASE).versions == ()


def test_what_a_newcomer_waits_for_is_told() -> None:
    """It has two deltas of the way, half of the anchor, and a file that nobody knows."""
    ahead = chain(30, frozenset({10, 20}))[:-1]  # nothing leads to the first
    deltas = {delta(step).content_hash: 10 for step in (21, 22, 3)}
    anchor = next(content for content in ahead[10].contents if content.kind == "anchor")
    here = Held({}, deltas | {bytes(32): 7}, {anchor.content_hash: anchor.content_bytes // 2})
    found = holdings([], here, Needs(4, 10**9), BASE, ahead)
    assert found.versions == () and found.others == Piled(1, 7)
    assert found.ahead == Piled(4, 30 + anchor.content_bytes // 2), "not of no version, though the newest is the base"
    awaited = found.awaited
    assert awaited is not None and awaited.version == ahead[0].version
    assert awaited.total == Piled(11, anchor.content_bytes + 100) and awaited.whole == Piled(2, 20)
    assert awaited.parts == (Part("anchor", None, anchor.content_bytes // 2, False),)
    assert awaited.part_totals == (anchor.content_bytes,)
    assert holdings(ahead[:1], here, Needs(4, 10**9), BASE, ahead[1:]).awaited is None, "the newest is here"


def test_what_a_peer_takes_is_kept_for_it() -> None:
    line = chain(30, frozenset({1, 10, 20}))
    needs = Needs(max_age=4, budget=10**9, pulled=frozenset({delta(5).content_hash}))
    kept = {each.version.step: each.kept for each in holdings(line, held(line, (10, 20, 30)), needs, BASE).versions}
    assert (kept[4], kept[5], kept[6], kept[20]) == (GARBAGE, PULLED, CHAIN, ANCHOR)


@given(
    length=st.integers(1, 40),
    anchors=st.frozensets(st.integers(1, 40)),
    states=st.sets(st.integers(1, 40)),
    max_age=st.integers(1, 50),
    budget=st.integers(0, 5000),
)
def test_the_reason_agrees_with_what_is_collected(length, anchors, states, max_age, budget) -> None:
    line = chain(length, anchors)
    here = held(line, tuple(sorted(step for step in states if step <= length)))
    found = holdings(line, here, Needs(max_age, budget), BASE)
    for each in found.versions:
        names = {delta(each.version.step).content_hash} & here.contents.keys()
        lost = (not each.state_bytes or each.version.hash in found.garbage.states) and names <= found.garbage.contents
        assert (each.kept in ("", GARBAGE)) == lost
