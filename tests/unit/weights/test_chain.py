"""The cheapest path is one, and the cheapest; what is kept suffices and fits."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.codec import content_hash
from p2prl.records import Content, Manifest, Version
from p2prl.weights import chain
from p2prl.weights.chain import Garbage, Held, Needs, Path, Wanted, Way
from tests import factories
from tests.factories import BASE, version

STATE_BYTES = 1000
EVERYTHING = Needs(max_age=0, budget=2**60)


def content(name: str, num_bytes: int, base: Version | None = None) -> Content:
    return factories.content(name.encode(), num_bytes, base)


def delta(step: int, num_bytes: int = 100, base: int | None = None) -> Content:
    since = step - 1 if base is None else base
    return content(f"delta {since} {step}", num_bytes, version(since))


def anchor(step: int, num_bytes: int = STATE_BYTES) -> Content:
    return content(f"anchor {step}", num_bytes)


def line(*contents: tuple[Content, ...]) -> list[Manifest]:
    """Versions 1, 2 ... with these ways; the newest first, as rooms walk a chain."""
    return [factories.manifest(step, contents=ways) for step, ways in enumerate(contents, 1)][::-1]


def path_to(step: int, manifests: list[Manifest], *states: int, contents=(), without=()) -> Path | None:
    names = {content.content_hash for content in contents}, {content.content_hash for content in without}
    return chain.cheapest(version(step), chain.ways_of(manifests), {version(s).hash for s in states}, *names)


# -- the cheapest path ----------------------------------------------------------------------------------------------


def test_a_follower_takes_the_delta_and_a_newcomer_the_anchor_and_what_came_since() -> None:
    manifests = line((anchor(1),), (delta(2),), (delta(3), anchor(3)), (delta(4),), (delta(5),))
    assert path_to(5, manifests, 4) == Path(
        version(4), (Way(version(5), delta(5), factories.identity(0).peer_id),), 100
    )
    joining = path_to(5, manifests)
    assert joining is not None
    assert [way.content for way in joining.ways] == [anchor(3), delta(4), delta(5)]
    assert (joining.base, joining.num_bytes) == (None, STATE_BYTES + 200)


def test_a_cumulative_delta_is_taken_where_it_is_cheaper() -> None:
    manifests = line((anchor(1),), (delta(2),), (delta(3),), (delta(4), delta(4, 150, base=1)), (delta(5),))
    behind = path_to(5, manifests, 1)
    assert behind is not None
    assert [way.content for way in behind.ways] == [delta(4, 150, base=1), delta(5)]
    near = path_to(5, manifests, 1, 3)
    assert near is not None
    assert [way.content for way in near.ways] == [delta(4), delta(5)]


def test_what_is_held_costs_nothing_and_what_failed_is_not_used() -> None:
    manifests = line((anchor(1),), (delta(2),), (delta(3), anchor(3)))
    held = path_to(3, manifests, 1, contents=[delta(2), delta(3)])
    assert held is not None and held.num_bytes == 0 and held.base == version(1)
    other = path_to(3, manifests, 1, without=[delta(3)])
    assert other is not None and [way.content for way in other.ways] == [anchor(3)]
    assert path_to(3, manifests, 1, without=[delta(2), anchor(3)]) is None
    assert path_to(3, manifests, 3) == Path(version(3), (), 0)
    assert path_to(9, manifests, 1) is None


def test_half_an_anchor_costs_the_other_half() -> None:
    manifests = line((anchor(1),), (delta(2, 300),), (delta(3, 300), anchor(3)))
    ways, parts = chain.ways_of(manifests), {anchor(1).content_hash: 700}
    fresh, begun = chain.cheapest(version(3), ways, set()), chain.cheapest(version(3), ways, set(), parts=parts)
    assert fresh is not None and begun is not None
    assert ([way.content for way in fresh.ways], fresh.num_bytes) == ([anchor(3)], STATE_BYTES)
    assert [way.content for way in begun.ways] == [anchor(1), delta(2, 300), delta(3, 300)]
    assert begun.num_bytes == STATE_BYTES - 700 + 600


def test_a_wrong_way_bars_its_content_there_alone() -> None:
    shared = delta(3, base=1)
    manifests = line((anchor(1),), (delta(2),), (shared,))
    ways = chain.ways_of(manifests)
    (way,) = ways[version(3)]
    other = msgspec.structs.replace(way, version=version(9))
    ways[version(9)] = (other,)
    states = {version(1).hash}
    assert chain.cheapest(version(9), ways, states, wrong={other.id}) is None
    found = chain.cheapest(version(3), ways, states, wrong={other.id})
    assert found is not None and found.ways == (way,)


def test_another_version_of_the_same_weights_is_held_with_them() -> None:
    same = msgspec.structs.replace(version(2), term=7)
    found = chain.cheapest(same, {}, {version(2).hash}, frozenset())
    assert found == Path(same, (), 0)


@st.composite
def webs(draw: st.DrawFn) -> tuple[list[Manifest], set[int], set[int]]:
    """Versions with any ways, also to bases that nobody has; states and contents that are held."""
    num = draw(st.integers(1, 7))
    manifests = []
    for step in range(1, num + 1):
        bases = draw(st.lists(st.none() | st.integers(0, step - 1), min_size=1, max_size=3, unique=True))
        sizes = [draw(st.integers(1, 50)) for _ in bases]
        pairs = zip(bases, sizes, strict=True)
        ways = [anchor(step, size) if base is None else delta(step, size, base) for base, size in pairs]
        manifests.append(factories.manifest(step, contents=tuple(ways)))
    steps = st.sets(st.integers(0, num))
    return manifests, draw(steps), draw(steps)


def all_costs(target: Version, ways: dict[Version, tuple[Way, ...]], states: set[bytes], contents: set[bytes]):
    """Of every path, by walking all of them."""
    if target.hash in states:
        yield 0
        return
    for way in ways.get(target, ()):
        cost = 0 if way.content.content_hash in contents else way.content.content_bytes
        rest = [0] if way.content.base is None else all_costs(way.content.base, ways, states, contents)
        yield from (cost + more for more in rest)


@given(webs())
def test_no_path_is_cheaper_and_it_is_one(web) -> None:
    manifests, held_steps, fetched = web
    ways, target = chain.ways_of(manifests), manifests[-1].version
    states = {version(step).hash for step in held_steps}
    contents = {m.contents[0].content_hash for m in manifests if m.version.step in fetched}
    found = chain.cheapest(target, ways, states, contents)
    costs = list(all_costs(target, ways, states, contents))
    if found is None:
        assert costs == []
        return
    assert found.num_bytes == min(costs)
    assert found.num_bytes == sum(w.content.content_bytes for w in found.ways if w.content.content_hash not in contents)
    if found.base is not None:
        assert found.base.hash in states
    ends = [found.base, *(way.version for way in found.ways)]
    assert [way.content.base for way in found.ways] == ends[:-1]
    assert ends[-1] == target


def test_a_long_chain_takes_no_time() -> None:
    manifests = line(*[(delta(step),) for step in range(1, 3001)])
    found = path_to(3000, manifests, 0)
    assert found is not None and len(found.ways) == 3000


# -- what to publish ------------------------------------------------------------------------------------------------


def test_anchors_and_cumulative_deltas_come_when_they_are_due() -> None:
    manifests: list[Manifest] = []
    seen = []
    for step in range(1, 80):
        wanted = chain.to_publish(manifests, BASE, STATE_BYTES)
        assert wanted.bases[0] == version(step - 1)
        seen.append((step, wanted.anchor, wanted.bases[1:]))
        ways = [delta(step, 10), *([anchor(step)] if wanted.anchor else [])]
        manifests = [factories.manifest(step, contents=tuple(ways)), *manifests]
    assert [step for step, due, _ in seen if due] == [27, 54]  # more than a quarter of 1000 bytes since the last
    assert [(step, bases) for step, _, bases in seen if bases] == [
        (16, (BASE,)),
        (43, (version(27),)),
        (70, (version(54),)),
    ]


def test_the_first_version_is_a_delta_from_the_base() -> None:
    assert chain.to_publish([], BASE, STATE_BYTES) == Wanted((BASE,), anchor=False)


# -- what to collect ------------------------------------------------------------------------------------------------


def held_of(states: dict[int, int], contents: list[Content]) -> Held:
    return Held(
        {version(step).hash: size for step, size in states.items()},
        {content.content_hash: content.content_bytes for content in contents},
    )


def test_the_head_two_anchors_and_the_deltas_between_are_kept() -> None:
    ways = [(delta(step, 10), *([anchor(step)] if step % 10 == 0 else [])) for step in range(1, 36)]
    manifests = line(*ways)
    held = held_of(dict.fromkeys(range(1, 36), STATE_BYTES), [way[0] for way in ways])
    garbage = chain.to_collect(manifests, held, EVERYTHING)
    assert garbage.states == {version(step).hash for step in range(1, 36)} - {version(s).hash for s in (20, 30, 35)}
    assert garbage.contents == {delta(step, 10).content_hash for step in range(1, 20)}


def test_deltas_within_the_max_age_stay_and_so_does_what_is_in_use() -> None:
    ways = [(delta(step, 10), anchor(step)) for step in range(1, 31)]
    held = held_of(dict.fromkeys(range(1, 31), STATE_BYTES), [way[0] for way in ways])
    needs = Needs(12, 2**60, frozenset({version(3).hash}), frozenset({delta(4, 10).content_hash}))
    garbage = chain.to_collect(line(*ways), held, needs)
    assert set(held.states) - garbage.states == {version(step).hash for step in (3, 29, 30)}
    assert set(held.contents) - garbage.contents == {delta(s, 10).content_hash for s in (4, *range(18, 31))}


def test_anchors_that_are_too_far_for_their_deltas_to_pay_go() -> None:
    ways = [(delta(step, 300), *([anchor(step)] if step == 1 else [])) for step in range(1, 10)]
    held = held_of({1: STATE_BYTES, 9: STATE_BYTES}, [way[0] for way in ways])
    assert chain.to_collect(line(*ways), held, EVERYTHING).states == {version(1).hash}


def test_what_lies_beside_the_chain_may_still_be_followed() -> None:
    manifests = line((delta(1),), (delta(2),))
    other = factories.manifest(2, contents=(content("side", 90, version(1)), anchor(2)))
    beside = [msgspec.structs.replace(other, version=msgspec.structs.replace(version(7), step=2))]
    held = held_of({2: STATE_BYTES, 7: STATE_BYTES}, [delta(1), delta(2), content("side", 90, version(1)), delta(9)])
    assert chain.to_collect(manifests, held, EVERYTHING, beside) == Garbage(
        frozenset(), frozenset({delta(9).content_hash})
    )


@st.composite
def homes(draw: st.DrawFn) -> tuple[list[Manifest], Held, Needs]:
    num = draw(st.integers(1, 20))
    ways = []
    for step in range(1, num + 1):
        more = [anchor(step)] if draw(st.booleans()) else []
        ways.append((delta(step, draw(st.integers(1, 400))), *more))
    strange = {content_hash(b"strange %d" % number): 7 for number in range(draw(st.integers(0, 3)))}
    states = {version(step).hash: STATE_BYTES for step in {num, *draw(st.sets(st.integers(1, num)))}}
    contents = {w[0].content_hash: w[0].content_bytes for w in ways if draw(st.booleans())}
    names = st.sets(st.sampled_from(sorted([*states, *contents, bytes(32)])))
    everything = sorted(each.content_hash for way in ways for each in way)
    pulled, parts = draw(st.sets(st.sampled_from(everything))), draw(st.sets(st.sampled_from(everything)))
    needs = Needs(
        draw(st.integers(0, 10)),
        draw(st.integers(0, 8000)),
        states=frozenset(draw(names)),
        contents=frozenset(draw(names)),
        pulled=frozenset(pulled),
    )
    return line(*ways), Held(states | strange, contents | strange, dict.fromkeys(parts, 5)), needs


@given(homes())
def test_what_is_kept_fits_and_what_is_needed_is_kept(home) -> None:
    manifests, held, needs = home
    garbage = chain.to_collect(manifests, held, needs)
    head = manifests[0]
    assert garbage.states <= held.states.keys() and garbage.contents <= held.contents.keys()
    fixed_states = ({head.version.hash} | needs.states) & held.states.keys()
    fixed_contents = ({way.content_hash for way in head.contents} | needs.contents) & held.contents.keys()
    assert not garbage.states & fixed_states
    assert not garbage.contents & fixed_contents
    states, contents = held.states.keys() - garbage.states, held.contents.keys() - garbage.contents
    kept = sum(held.states[name] for name in states) + sum(held.contents[name] for name in contents)
    least = sum(held.states[n] for n in fixed_states) + sum(held.contents[n] for n in fixed_contents)
    assert kept <= max(needs.budget, least)
    again = Held({n: held.states[n] for n in states}, {n: held.contents[n] for n in contents})
    assert chain.to_collect(manifests, again, needs) == Garbage(frozenset(), frozenset())
    assert garbage.parts == held.parts.keys() - needs.contents, "what is on our chain is not on its way"


def test_what_peers_take_is_kept_with_all_since_and_within_the_budget_it_goes_last() -> None:
    """A slow peer has half of the anchor of 10; 30 and 20 are the newest."""
    ways = [(delta(step, 10), *([anchor(step)] if step % 10 == 0 else [])) for step in range(1, 36)]
    manifests, states = line(*ways), {step: STATE_BYTES for step in (10, 20, 30, 35)}
    held = held_of(states, [way[0] for way in ways])
    pulled = frozenset({anchor(10).content_hash})
    garbage = chain.to_collect(manifests, held, Needs(0, 2**60, pulled=pulled))
    assert garbage.states == frozenset()
    assert garbage.contents == {delta(step, 10).content_hash for step in range(1, 10)}
    small = chain.to_collect(manifests, held, Needs(0, int(2.25 * STATE_BYTES) + 300, pulled=pulled))
    assert small.states == {version(20).hash, version(30).hash}
    assert small.contents == garbage.contents
    smallest = chain.to_collect(manifests, held, Needs(0, STATE_BYTES + 300, pulled=pulled))
    assert smallest.states == {version(step).hash for step in (10, 20, 30)}, "the owner's budget comes first"


def test_who_takes_old_deltas_drives_out_no_anchor() -> None:
    """Else one peer that asks every holder for them now and then would keep all newcomers out."""
    ways = [(delta(step, 10), *([anchor(step)] if step % 10 == 0 else [])) for step in range(1, 36)]
    held = held_of({step: STATE_BYTES for step in (20, 30, 35)}, [way[0] for way in ways])
    needs = Needs(0, 2 * STATE_BYTES + 200, pulled=frozenset({delta(5, 10).content_hash}))
    garbage = chain.to_collect(line(*ways), held, needs)
    assert garbage.states == {version(20).hash}
    assert garbage.contents == {delta(step, 10).content_hash for step in range(1, 16)}


def test_who_takes_only_the_delta_of_an_anchor_takes_no_anchor() -> None:
    ways = [(delta(step, 10), *([anchor(step)] if step % 10 == 0 else [])) for step in range(1, 36)]
    held = held_of({step: STATE_BYTES for step in (20, 30, 35)}, [way[0] for way in ways])
    needs = Needs(0, 2 * STATE_BYTES + 200, pulled=frozenset({delta(20, 10).content_hash}))
    assert chain.to_collect(line(*ways), held, needs).states == {version(20).hash}


@pytest.mark.parametrize(
    ("every", "num_bytes", "budget"),
    [(3, 80, 2300), (3, 80, 3300), (3, 120, 2900), (20, 10, 2300), (20, 10, 3300), (40, 10, 3300)],
)
@pytest.mark.parametrize("oldest", [1, -12])
def test_who_takes_an_old_anchor_for_ever_leaves_an_anchor_to_newcomers(
    every: int, num_bytes: int, budget: int, oldest: int
) -> None:
    """`oldest` -12: all anchors of the last 12 versions, in turn."""
    manifests: list[Manifest] = []
    states, contents, names = {}, {}, {}
    for step in range(1, 100):
        ways = (delta(step, num_bytes), *([anchor(step)] if step % every == 1 else []))
        manifests.insert(0, factories.manifest(step, contents=ways))
        states[version(step).hash], contents[ways[0].content_hash] = STATE_BYTES, num_bytes
        names |= {version(step).hash: ways[1].content_hash} if len(ways) > 1 else {}
        taken = [1] if oldest == 1 else range(max(1, step + oldest), step)
        pulled = frozenset(anchor(each).content_hash for each in taken)
        garbage = chain.to_collect(manifests, Held(states, contents), Needs(2, budget, pulled=pulled))
        states = {name: size for name, size in states.items() if name not in garbage.states}
        contents = {name: size for name, size in contents.items() if name not in garbage.contents}
        here = {*contents, *(names[name] for name in states if name in names)}
        ways_here = chain.ways_of(manifests)
        lost = frozenset(way.content.content_hash for each in ways_here.values() for way in each) - here
        assert chain.cheapest(version(step), ways_here, set(), without=lost) is not None, f"after step {step}"


def test_nobody_makes_us_keep_all_anchors() -> None:
    ways = [(delta(step, 10), anchor(step)) for step in range(1, 31)]
    held = held_of(dict.fromkeys(range(1, 31), STATE_BYTES), [])
    pulled = frozenset(way[1].content_hash for way in ways)
    kept = held.states.keys() - chain.to_collect(line(*ways), held, Needs(0, 2**60, pulled=pulled)).states
    assert kept == {version(step).hash for step in range(30, 30 - chain.KEEP_PULLED, -1)}


def test_what_came_of_a_better_version_outlives_old_ones() -> None:
    manifests = line((delta(1, 10), anchor(1)), (delta(2, 10),))
    beside = [factories.manifest(3, contents=(anchor(3),))]
    states = held_of({1: STATE_BYTES, 2: STATE_BYTES}, [])
    parts = {anchor(3).content_hash: 600, anchor(9).content_hash: 500}
    held = Held(states.states, {}, parts)
    wide = chain.to_collect(manifests, held, EVERYTHING, beside)
    assert wide == Garbage(frozenset(), frozenset(), frozenset({anchor(9).content_hash}))
    tight = chain.to_collect(manifests, held, Needs(0, STATE_BYTES + 700), beside)
    assert tight.states == {version(1).hash} and tight.parts == {anchor(9).content_hash}
