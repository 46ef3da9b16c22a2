import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.extract import RULES, checked_rule, extract
from p2prl.errors import ConfigError


@pytest.mark.parametrize(
    ("rule", "answer", "part"),
    [
        ("all", " a b ", "a b"), ("tag", "<answer>1</answer> <answer> 2\n</answer>", "2"), ("tag", "<answer>1", None),
        ("boxed", r"\boxed{\frac{1}{2}}, no", r"\frac{1}{2}"), ("boxed", r"\boxed{1", None), ("boxed", "1", None),
        ("last_line", "first\n\nlast \n\n", "last"), ("last_line", "", ""),
    ],
)  # fmt: skip
def test_which_part_counts(rule: str, answer: str, part: str | None) -> None:
    assert extract(rule, answer) == part


@given(st.sampled_from(RULES), st.text())
def test_any_text_has_a_part_or_none(rule: str, answer: str) -> None:
    part = extract(rule, answer)
    assert part is None or part.strip() in answer


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(ConfigError, match="extract = 'tags' is unknown; use one of all, tag"):
        checked_rule("tags", "environment x")


@pytest.mark.parametrize("part", ["<answer>", "</answer>", "\\boxed{", "\n", "<answer>}"])
@pytest.mark.parametrize("rule", RULES)
def test_no_answer_takes_long(rule: str, part: str) -> None:
    started = time.perf_counter()
    extract(rule, part * 30_000)
    assert time.perf_counter() - started < 0.5


def test_the_last_tag_ends_at_its_own_end() -> None:
    assert extract("tag", "<answer>1</answer> or <answer>2</answer></answer> <answer>") == "2"
    assert extract("tag", "</answer><answer>") is None
    assert extract("tag", "<answer>1<answer>2</answer>") == "2"
