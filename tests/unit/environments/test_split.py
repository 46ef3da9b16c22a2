from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.registry import HELD_OUT_FROM
from p2prl.environments.split import Split

TRAINING = st.integers(0, HELD_OUT_FROM - 1)


@given(st.lists(st.text(max_size=3), min_size=1, max_size=60), TRAINING)
def test_no_text_is_on_both_sides(texts: list[str], index: int) -> None:
    split = Split.by_text(texts)
    trained = {texts[place] for place in split.training}
    held_out = {texts[place] for place in split.evaluation}
    assert trained | held_out == set(texts)
    assert not trained & held_out or trained == held_out
    assert texts[split.place(index)] in trained
    assert texts[split.place(HELD_OUT_FROM + index)] in held_out


@given(st.integers(1, 200))
def test_the_tail_is_a_tenth(num_items: int) -> None:
    split = Split.tail(num_items)
    assert split.num_training == num_items - num_items // 10
    if num_items >= 10:
        assert not set(split.training) & set(split.evaluation)


def test_about_a_tenth_is_held_out() -> None:
    split = Split.by_text([f"question {number}" for number in range(5000)])
    assert 400 < len(split.evaluation) < 600
