from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.conversation import parts_of, runs_of
from p2prl.records import Segment

segments = st.lists(st.builds(Segment, st.integers(0, 3), st.integers(1, 5), st.booleans()), max_size=12)


@given(segments)
def test_runs_tell_each_token_as_its_segment_does(parts: list[Segment]) -> None:
    runs = runs_of(parts)
    assert all(runs[1:]), "only the first may be empty, where given tokens come first"
    flags = [part.drawn for part in parts for _ in range(part.num_tokens)]
    assert [number % 2 == 0 for number, length in enumerate(runs) for _ in range(length)] == flags


@given(segments)
def test_parts_in_their_order_are_all_tokens(parts: list[Segment]) -> None:
    token_ids = tuple(range(sum(part.num_tokens for part in parts)))
    drawn, given_ = parts_of(token_ids, runs_of(parts))
    assert len(drawn) - len(given_) in (0, 1)
    joined = [token for number in range(len(drawn) + len(given_)) for token in (drawn, given_)[number % 2][number // 2]]
    assert tuple(joined) == token_ids


def test_without_runs_all_was_drawn_in_one_turn() -> None:
    assert parts_of((4, 5, 6)) == ([(4, 5, 6)], [])
    assert runs_of([Segment(0, 2), Segment(1, 1)]) == (3,)
