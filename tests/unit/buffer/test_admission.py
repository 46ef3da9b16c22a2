import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2prl import codec, recipe
from p2prl.buffer.admission import (
    REASONS,
    AdmissionRules,
    conclude,
    examine,
    logprobs_ok,
    most_bytes,
    refusal,
    rules_of,
)
from p2prl.environments.conversation import TurnRules
from p2prl.environments.messages import Judgement
from p2prl.records import Completion, Group, Sampling, Segment, Trajectory
from tests import factories
from tests.factories import RULES, completion, group, knowledge, logprobs, version
from tests.strategies import wire

ID = bytes(range(32))
PEER = factories.identity(0).peer_id


def verdict_on(found: Group, **known: Any) -> str:
    return examine(found, ID, PEER, RULES, knowledge(**known))


def with_answer(answer: Completion, **over: Any) -> Group:
    return group(trajectories=(Trajectory(completion(), 1.0), Trajectory(answer, 0.0)), **over)


def test_an_honest_group_is_admitted() -> None:
    assert verdict_on(group()) == ""
    assert conclude(group(), ID, Judgement(True, (1.0, 0.0), ("", ""))).admitted


CASES: list[tuple[str, Group]] = [
    ("wrong_maker", group(maker=1)),
    ("wrong_environment", group(environment="subtraction")),
    ("wrong_tokenizer", group(tokenizer_hash=bytes(32))),
    ("wrong_sampling", group(sampling=Sampling(0.9, 1.0, 0, 5))),
    ("wrong_sampling", group(sampling=Sampling(float("nan"), 1.0, 0, 5))),
    ("wrong_size", group(rewards=(1.0,))),
    ("wrong_size", group(rewards=(1.0, 0.0, 0.0))),
    ("bad_clock", group(made_at=float("nan"))),
    ("bad_lottery", group(prompt_index=1)),
    ("bad_lottery", group(versions=(version(6),))),
    ("bad_lottery", msgspec.structs.replace(group(), counter=1)),
    ("bad_tokens", group(prompt_ids=(17,))),
    ("bad_tokens", group(prompt_ids=())),
    ("bad_tokens", with_answer(completion(3, 17, 1))),
    ("too_long", with_answer(completion(3, 3, 3, 3, 3, 1))),
    ("bad_finish", with_answer(completion(3, 1, 1))),
    ("bad_finish", with_answer(completion(3, 4, finish_reason="stop"))),
    ("bad_finish", with_answer(completion(3, 4, finish_reason="length"))),
    ("bad_finish", with_answer(completion(3, 4, 1, finish_reason="length"))),
    ("bad_finish", with_answer(completion(3, 4, 1, finish_reason="tired"))),
    ("bad_logprobs", with_answer(completion(logprobs=b""))),
    ("bad_logprobs", with_answer(completion(logprobs=logprobs(-1, -1)))),
    ("bad_logprobs", with_answer(completion(logprobs=logprobs(-1, -1, float("nan"))))),
    ("bad_logprobs", with_answer(completion(logprobs=logprobs(-1, -1, float("-inf"))))),
    ("bad_logprobs", with_answer(completion(logprobs=logprobs(-1, -1, 0.01)))),
    ("bad_segments", with_answer(completion(segments=()))),
    ("bad_segments", with_answer(completion(segments=(Segment(0, 2),)))),
    ("bad_segments", with_answer(completion(segments=(Segment(0, 4),)))),
    ("bad_segments", with_answer(completion(segments=(Segment(0, 1), Segment(1, 2))))),
    ("bad_segments", with_answer(completion(segments=(Segment(1, 3),)), versions=(version(5), version(6)))),
    ("bad_segments", group(versions=(version(5), version(6)))),
    ("bad_segments", with_answer(completion(segments=(Segment(0, 1), Segment(1, 2))), versions=(version(5),) * 2)),
    ("too_old", group(step=1)),
]


@pytest.mark.parametrize(("reason", "found"), CASES, ids=[f"{i}-{reason}" for i, (reason, _) in enumerate(CASES)])
def test_each_fault_has_its_reason(reason: str, found: Group) -> None:
    assert verdict_on(found) == reason


def test_an_answer_cut_at_the_longest_length_is_good() -> None:
    assert verdict_on(with_answer(completion(3, 3, 3, 3, 3, finish_reason="length"))) == ""


def test_a_group_whose_weights_changed_on_the_way_is_good_while_one_token_is_young() -> None:
    mixed = completion(segments=(Segment(0, 1), Segment(1, 2)))
    old = group(step=1)
    found = msgspec.structs.replace(
        old, versions=(version(1), version(4)), trajectories=(Trajectory(mixed, 1.0), Trajectory(completion(), 0.0))
    )
    assert verdict_on(found) == ""
    assert verdict_on(old) == "too_old"


def test_what_this_node_knows_counts() -> None:
    assert verdict_on(group(), age_of=lambda version: None) == "unknown_version"
    assert verdict_on(group(), seen=lambda group_id: group_id == ID) == "duplicate"
    assert verdict_on(group(), group_at=lambda maker, counter: bytes(32)) == "counter_reused"
    assert verdict_on(group(), group_at=lambda maker, counter: ID) == ""


def test_an_environment_version_is_enforced_where_the_recipe_names_one() -> None:
    strict = msgspec.structs.replace(RULES, environment_version="p2prl==9")
    assert examine(group(), ID, PEER, strict, knowledge()) == "wrong_environment"


@pytest.mark.parametrize(
    ("judgement", "reason"),
    [
        (Judgement(True, (1.0, 0.0), ("", "")), ""),
        (Judgement(True, (1.0, 0.5), ("", "")), "wrong_reward"),
        (Judgement(True, (1.0,), ("",)), "wrong_reward"),
        (Judgement(False, (0.0, 0.0), ("the prompt has other tokens",) * 2), "wrong_prompt"),
        (Judgement(False, (), ()), "wrong_prompt"),
    ],
)
def test_rewards_are_compared(judgement: Judgement, reason: str) -> None:
    verdict = conclude(group(), ID, judgement)
    assert (verdict.group_id, verdict.admitted, verdict.reason) == (ID, not reason, reason)
    assert bool(verdict.message) == bool(reason)


def test_a_reward_that_is_no_number_is_refused() -> None:
    found = group(rewards=(float("nan"), 0.0))
    assert conclude(found, ID, Judgement(True, (1.0, 0.0), ("", ""))).reason == "wrong_reward"


def test_every_reason_given_has_its_sentence() -> None:
    assert {reason for reason, _ in CASES} < set(REASONS)
    assert refusal(ID, "too_old").message == REASONS["too_old"]
    assert len(refusal(ID, "wrong_prompt", "x" * 1000).message) == 256


@given(st.lists(st.floats(-100, 0, width=32), max_size=20))
def test_real_logprobs_pass(values: list[float]) -> None:
    assert logprobs_ok(logprobs(*values), len(values))
    assert not logprobs_ok(logprobs(*values), len(values) + 1)


FIELDS = st.sampled_from(Group.__struct_fields__)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wire(Group), st.sets(FIELDS))
def test_a_mutated_group_never_crashes(other: Group, fields: set[str]) -> None:
    """Any fields of an honest group replaced by anything: a known reason, or it still is what an honest node makes."""
    found = msgspec.structs.replace(group(), **{field: getattr(other, field) for field in fields})
    reason = verdict_on(found)
    assert reason == "" or reason in REASONS
    if reason == "":
        changed = {field for field in fields if getattr(found, field) != getattr(group(), field)}
        assert changed <= {"environment_version", "engine", "made_at", "prompt_ids", "trajectories"}
        conclude(found, ID, Judgement(True, (0.0,) * RULES.group_size, ("",) * RULES.group_size))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wire(Completion))
def test_a_mutated_answer_is_admitted_only_when_the_learner_can_use_it(answer: Completion) -> None:
    if verdict_on(with_answer(answer)) == "":
        assert 0 < len(answer.token_ids) <= 5
        assert all(token < 17 for token in answer.token_ids)
        assert len(answer.logprobs) == 4 * len(answer.token_ids)


@given(st.randoms(use_true_random=False))
def test_verdicts_do_not_depend_on_the_order_of_arrival(source: random.Random) -> None:
    arriving = [group(counter=0), group(counter=1), group(counter=2, step=1), group(counter=3, made_at=float("inf"))]
    expected = {0: "", 1: "", 2: "too_old", 3: "bad_clock"}
    source.shuffle(arriving)
    held: dict[tuple[str, int], bytes] = {}
    given_ids: set[bytes] = set()
    for found in arriving:
        group_id, _ = factories.sealed(found)
        known = knowledge(seen=given_ids.__contains__, group_at=lambda maker, counter: held.get((maker, counter)))
        assert examine(found, group_id, PEER, RULES, known) == expected[found.counter]
        given_ids.add(group_id)
        held[found.maker, found.counter] = group_id


def test_rules_come_from_the_recipe() -> None:
    addition, _ = recipe.find("addition")
    rules = rules_of(addition, RULES.tokenizer_hash, (1,), None, 17)
    assert (rules.group_size, rules.max_age) == (addition.sampling.group_size, addition.learner.max_age)
    assert (rules.environment, rules.sampling) == ("addition", addition.sampling.record())
    assert (rules.stop_ids, rules.vocab_size, rules.num_prompts) == ({1}, 17, None)


def test_an_answer_may_end_by_a_stop_string_where_the_recipe_has_some() -> None:
    """Whether it does is found with the tokenizer, where rewards are recomputed."""
    sampling = msgspec.structs.replace(factories.SAMPLING, stop=("=",))
    rules = msgspec.structs.replace(RULES, sampling=sampling)

    def reason(*token_ids: int, finish_reason: str) -> str:
        found = with_answer(completion(*token_ids, finish_reason=finish_reason), sampling=sampling)
        return examine(found, ID, PEER, rules, knowledge())

    assert reason(3, 4, finish_reason="stop") == reason(3, 4, 1, finish_reason="stop") == ""
    assert reason(3, 3, 3, 3, 4, finish_reason="stop") == reason(3, 3, 3, 3, 4, finish_reason="length") == ""
    assert reason(3, 4, finish_reason="length") == reason(3, 4, 1, finish_reason="length") == "bad_finish"
    assert reason(3, 1, 4, finish_reason="stop") == reason(3, 4, finish_reason="tired") == "bad_finish"
    verdict = conclude(group(), ID, Judgement(True, (1.0, 0.0), ("", ""), bad_finish=1))
    assert verdict.reason == "bad_finish" and verdict.message.endswith("answer 1")


TURNS = msgspec.structs.replace(RULES, turns=TurnRules(max_turns=3, max_given_tokens=4))
DRAWN, GIVEN = Segment(0, 2), Segment(0, 2, drawn=False)
LOGPROBS = factories.logprobs(-0.5, -0.5, 0, 0, -0.5, -0.5)


def talk(**over: Any) -> Group:
    """Two turns of two tokens, and two given between them."""
    plain = completion(3, 1, 5, 1, 4, 1, segments=(DRAWN, GIVEN, DRAWN), logprobs=LOGPROBS)
    return with_answer(msgspec.structs.replace(plain, **over))


def of_turns(found: Group, rules: AdmissionRules = TURNS) -> str:
    return examine(found, ID, PEER, rules, knowledge())


def test_an_answer_may_have_turns_where_the_recipe_says_so() -> None:
    assert of_turns(talk()) == ""
    assert of_turns(talk(), RULES) == "bad_turns"
    assert of_turns(talk(), msgspec.structs.replace(RULES, turns=TurnRules(2, 1))) == "bad_turns"
    assert of_turns(group()) == ""


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ({"segments": (GIVEN, DRAWN, DRAWN)}, "bad_turns"),
        ({"segments": (DRAWN, DRAWN, GIVEN)}, "bad_turns"),
        ({"segments": (DRAWN, Segment(0, 1, drawn=False), Segment(0, 3))}, "bad_finish"),
        ({"logprobs": factories.logprobs(-0.5, -0.5, 0, -0.1, -0.5, -0.5)}, "bad_logprobs"),
        ({"logprobs": factories.logprobs(-0.5, -0.5, -0.0, 0, -0.5, -0.5)}, "bad_logprobs"),
        ({"token_ids": (3, 4, 5, 1, 4, 1)}, "bad_finish"),  # the first turn has no end
        ({"token_ids": (3, 1, 5, 1, 4, 4)}, "bad_finish"),
        ({"token_ids": (3, 1, 5, 17, 4, 1)}, "bad_tokens"),
        ({"token_ids": (3, 1, 5, 1, 4, 1, 1)}, "bad_segments"),
    ],
)
def test_given_tokens_stand_between_whole_turns(over: dict, reason: str) -> None:
    assert of_turns(talk(**over)) == reason


def test_more_turns_and_more_given_than_the_recipe_allows() -> None:
    three = completion(*[3, 1] * 5, segments=(DRAWN, GIVEN, DRAWN, GIVEN, DRAWN), logprobs=LOGPROBS + LOGPROBS[8:24])
    assert of_turns(with_answer(three)) == ""
    four = completion(*[3, 1] * 7, segments=(*[DRAWN, GIVEN] * 3, DRAWN), logprobs=LOGPROBS + LOGPROBS[8:24] * 2)
    assert of_turns(with_answer(four)) == "bad_turns"
    much = completion(*[3, 1], *[5] * 5, *[4, 1], segments=(DRAWN, Segment(0, 5, drawn=False), DRAWN))
    assert of_turns(with_answer(msgspec.structs.replace(much, logprobs=bytes(36)))) == "bad_turns"


def test_given_tokens_are_of_the_version_before_them() -> None:
    later = factories.version(6)
    segments = (DRAWN, Segment(1, 2, drawn=False), Segment(1, 2))
    made = talk(segments=segments)
    assert of_turns(msgspec.structs.replace(made, versions=(*made.versions, later))) == "bad_segments"
    honest = talk(segments=(DRAWN, GIVEN, Segment(1, 2)))
    assert of_turns(msgspec.structs.replace(honest, versions=(*honest.versions, later))) == ""


def test_turns_that_the_environment_does_not_give_are_refused() -> None:
    verdict = conclude(group(), ID, Judgement(True, (0.0, 0.0), ("answer 1: other", "answer 1: other"), bad_turns=1))
    assert verdict.reason == "wrong_turns" and verdict.message.endswith("answer 1: other")


def test_a_body_of_all_turns_fits() -> None:
    rules = msgspec.structs.replace(TURNS, turns=TurnRules(64, 65536), group_size=256)
    assert most_bytes(rules) == codec.limit_of(Group)
    assert most_bytes(TURNS) > most_bytes(RULES)
