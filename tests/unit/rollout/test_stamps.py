import itertools

from hypothesis import given
from hypothesis import strategies as st

from p2prl.records import Completion, Segment, Version
from p2prl.rollout.stamps import Stamps, of_group
from tests import factories

BEGUN = factories.version(0)
STEPS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=20)
ANSWERS = st.lists(st.lists(st.integers(0, 4), min_size=0, max_size=30), min_size=1, max_size=6)


def of_tokens(segments: tuple[Segment, ...], versions: tuple[Version, ...]) -> list[Version]:
    return [versions[part.version] for part in segments for _ in range(part.num_tokens)]


@given(STEPS, st.integers(0, 100))
def test_segments_say_of_each_token_which_version_drew_it(steps: list[tuple[int, int]], kept: int) -> None:
    versions = [BEGUN]
    stamps = Stamps(versions)
    expected: list[Version] = []
    for step, num_tokens in steps:
        stamps.add(factories.version(step), num_tokens)
        expected += [factories.version(step)] * num_tokens
    assert stamps.num_tokens == len(expected)
    kept = min(kept, len(expected))
    segments = stamps.segments(kept)
    assert of_tokens(segments, tuple(versions)) == expected[:kept]
    assert all(part.num_tokens > 0 for part in segments)
    assert all(one.version != two.version for one, two in itertools.pairwise(segments))
    assert versions[0] == BEGUN and len(set(versions)) == len(versions)


@given(ANSWERS)
def test_a_group_names_the_versions_that_drew_it_and_no_other(answers: list[list[int]]) -> None:
    versions = [BEGUN]
    completions, expected = [], []
    for later in answers:
        stamps = Stamps(versions)
        drawn = [BEGUN, *(factories.version(step) for step in later)]  # all begin under one version
        for version in drawn:
            stamps.add(version)
        completions.append(Completion((1,) * len(drawn), b"", stamps.segments(len(drawn)), "stop"))
        expected.append(drawn)
    for some in (completions, completions[:1]):
        used, stamped = of_group(versions, some)
        assert used[0] == BEGUN
        assert {part.version for completion in stamped for part in completion.segments} == set(range(len(used)))
        assert [of_tokens(c.segments, used) for c in stamped] == expected[: len(some)]


def test_what_was_given_stays_given_where_versions_are_counted_anew() -> None:
    versions = tuple(map(factories.version, (1, 2, 3)))
    segments = (Segment(1, 1), Segment(1, 1, drawn=False), Segment(2, 1))
    used, (answer,) = of_group(versions, [factories.completion(segments=segments)])
    assert used == versions[1:]
    assert answer.segments == (Segment(0, 1), Segment(0, 1, drawn=False), Segment(1, 1))
