from hypothesis import given
from hypothesis import strategies as st

from p2prl.buffer.admission import REASONS
from p2prl.buffer.trust import GRAVE, HALF_LIFE_S, INNOCENT, Standing, judged, quarantined, score


def after(*reasons: str, each_s: float = 1.0) -> tuple[Standing, float]:
    standing, now = Standing(), 0.0
    for reason in reasons:
        now += each_s
        standing = judged(standing, not reason, reason, now)
    return standing, now


def test_a_stranger_is_heard() -> None:
    assert score(Standing(), 0.0) == 0.8
    assert not quarantined(Standing(), 0.0)


def test_forgers_are_shut_out_soon_and_forgiven_slowly() -> None:
    standing, now = after(*["wrong_reward"] * 3)
    assert quarantined(standing, now)
    assert not quarantined(standing, now + 10 * HALF_LIFE_S)


def test_one_fault_does_not_shut_out_a_good_peer() -> None:
    standing, now = after(*[""] * 30, "wrong_reward", *[""] * 30)
    assert score(standing, now) > 0.9


def test_lateness_is_no_fault() -> None:
    standing, now = after(*["too_old", "unknown_version", "duplicate"] * 100)
    assert score(standing, now) == 0.8


def test_the_sets_name_real_reasons() -> None:
    assert set(REASONS) >= GRAVE | INNOCENT
    assert not GRAVE & INNOCENT


@given(st.lists(st.tuples(st.sampled_from(["", *REASONS]), st.floats(-10, 1e6)), max_size=50))
def test_a_score_is_always_a_share(verdicts: list[tuple[str, float]]) -> None:
    standing = Standing()
    for reason, now in verdicts:
        standing = judged(standing, not reason, reason, now)
        assert 0.0 < score(standing, now) < 1.0
