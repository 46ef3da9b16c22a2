import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl import codec
from p2prl.environments.messages import Judgement
from p2prl.errors import EngineError
from p2prl.records import Prompt
from p2prl.rollout import worker
from p2prl.rollout.lottery import prompt_index
from tests import factories

MAKER = factories.identity(0).peer_id
ORIGIN = worker.Origin(MAKER, "addition", "p2prl==0.1.0", bytes(32), factories.SAMPLING, "scripted 1")
ANSWERS = (factories.completion(), factories.completion(5, 1))
JUDGED = Judgement(True, (1.0, 0.25), ("right", "nearly"))


def draw_and_prompt() -> tuple[worker.Draw, Prompt]:
    (draw,) = worker.next_batch(MAKER, factories.version(3), [7], None)
    return draw, Prompt(draw.prompt_index, "1+2=", (3, 12, 4, 14))


@given(st.integers(0, 10**6), st.integers(1, 10**5))
def test_no_more_than_max_in_flight_ever_wait(waiting: int, most: int) -> None:
    more = worker.allowed(waiting, most)
    assert more >= 0
    assert waiting + more == max(waiting, most)


def test_draws_follow_the_lottery() -> None:
    draws = worker.next_batch(MAKER, factories.version(3), [4, 5, 9], 100)
    assert [draw.counter for draw in draws] == [4, 5, 9]
    assert [draw.prompt_index for draw in draws] == [
        prompt_index(MAKER, factories.version(3), counter, 100) for counter in (4, 5, 9)
    ]


def test_a_group_says_what_was_drawn() -> None:
    draw, prompt = draw_and_prompt()
    group = worker.make_group(ORIGIN, draw, prompt, ANSWERS, (factories.version(3),), JUDGED, 12.0)
    assert (group.maker, group.counter, group.prompt_index) == (MAKER, 7, draw.prompt_index)
    assert group.versions == (factories.version(3),)
    assert [(t.completion, t.reward, t.detail) for t in group.trajectories] == [
        (ANSWERS[0], 1.0, "right"),
        (ANSWERS[1], 0.25, "nearly"),
    ]
    assert worker.judge_group(group) == worker.judge_item(prompt, ANSWERS)
    header = worker.header(group, codec.content_hash(b"x"), 321)
    assert (header.version, header.num_answers, header.reward_mean) == (factories.version(3), 2, 0.625)


@pytest.mark.parametrize(
    "judgement", [Judgement(False, (0.0, 0.0), ("", "")), Judgement(True, (1.0,), ("right",))], ids=["prompt", "number"]
)
def test_parts_that_do_not_fit_make_no_group(judgement: Judgement) -> None:
    draw, prompt = draw_and_prompt()
    with pytest.raises(EngineError, match="restart"):
        worker.make_group(ORIGIN, draw, prompt, ANSWERS, (factories.version(3),), judgement, 12.0)


def test_seeds_differ_between_starts_and_calls() -> None:
    seeds = {worker.call_seed(boot, counter) for boot in (b"a" * 8, b"b" * 8) for counter in range(50)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_error_of_an_evaluation_is_that_of_its_prompts() -> None:
    mean, error = worker.mean_and_error([(1.0, 1.0), (0.0, 0.0), (1.0, 0.0)])
    assert mean == pytest.approx(0.5)
    assert error == pytest.approx(0.5 / 3**0.5)
    assert worker.mean_and_error([(1.0, 0.0)]) == (0.5, 0.0)
    assert worker.mean_and_error([(1.0,)] * 3) == (1.0, 0.0)


@pytest.mark.parametrize(("batch_s", "at_once"), [(0.0, 2), (0.49, 2), (0.5, 1), (30.0, 1), (float("inf"), 1)])
def test_only_short_batches_are_in_work_two_at_once(batch_s: float, at_once: int) -> None:
    assert worker.draws_at_once(batch_s) == at_once
