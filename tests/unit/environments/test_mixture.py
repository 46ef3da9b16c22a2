from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.judge import Judge, RewardFailed
from p2prl.environments.messages import JudgeItem
from p2prl.environments.mixture import Mixture, own_index
from p2prl.environments.registry import HELD_OUT_FROM


class Named:
    """Tells its name and the index it was asked for."""

    def __init__(self, name: str, version: str = "tasks==1", num_prompts: int | None = None) -> None:
        self.name, self.version, self.num_prompts = name, version, num_prompts

    def prompt(self, index: int) -> str:
        return f"{self.name} {index}"

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        if answer == "raise":
            raise LookupError("broken")
        return float(answer == str(index)), "said"


class CodePoints:
    def encode_prompt(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_turn(self, text: str, last: int) -> list[int]:
        return self.encode_prompt(text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def mixture(*weights: float) -> Mixture:
    return Mixture([Named(f"m{place}") for place in range(len(weights))], weights)


def test_members_come_by_weight() -> None:
    mixed = mixture(1.0, 3.0, 0.5)
    drawn = Counter(mixed.member(index).name for index in range(9000))
    assert 1850 < drawn["m0"] < 2150
    assert 5800 < drawn["m1"] < 6200
    assert 900 < drawn["m2"] < 1100


def test_who_an_index_falls_to_is_pinned() -> None:
    """Another rule would be another swarm's."""
    drawn = "".join(mixture(1.0, 1.0, 2.0).member(index).name[1] for index in (*range(12), HELD_OUT_FROM))
    assert drawn == "2121122202222"


@given(st.integers(0, 2**53), st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8))
def test_an_index_has_one_member_whatever_was_asked_before(index: int, weights: list[float]) -> None:
    mixed = mixture(*weights)
    first = mixed.prompt(index)
    mixed.prompt(index + 1)
    assert mixed.prompt(index) == first


@given(st.integers(0, 2**50), st.integers(1, 1000))
def test_a_finite_member_wraps_training_indices_and_places_held_out_ones(index: int, count: int) -> None:
    own = own_index(Named("m", num_prompts=count), index)
    assert own == index if index >= HELD_OUT_FROM else 0 <= own < count


def test_versions_are_joined_and_a_long_list_is_hashed() -> None:
    two = Mixture([Named("a", "x==2"), Named("b", "x==1"), Named("c", "x==2")], [1, 1, 1])
    assert two.version == "x==1+x==2"
    many = Mixture([Named("a", f"a-long-package-name-{number}==1") for number in range(9)], [1.0] * 9)
    assert len(many.version) <= 128 and many.version.startswith("mixture==")


@pytest.mark.parametrize(("answer", "reward", "detail"), [("7", 1.0, "said"), ("raise", 0.0, "broken")])
def test_each_reward_names_the_member(answer: str, reward: float, detail: str) -> None:
    mixed = Mixture([Named("m0"), Named("m1")], [1.0, 1.0])
    name = mixed.member(7).name

    def guard(work):
        try:
            return work()
        except LookupError as error:
            raise RewardFailed(str(error)) from error

    ids = tuple(map(ord, answer))
    judged = Judge(mixed, CodePoints(), guard).check(JudgeItem(7, tuple(map(ord, f"{name} 7")), (ids,)))
    assert judged.prompt_ok
    assert judged.rewards == (reward,)
    assert judged.details[0].startswith(f"{name}: ") and detail in judged.details[0]
