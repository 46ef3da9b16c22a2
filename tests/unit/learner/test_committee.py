import torch
from hypothesis import given
from hypothesis import strategies as st

from p2prl.learner.committee import Part, merge
from p2prl.objectives import EssState

numbers = st.integers(0, 1000)


@st.composite
def parts(draw: st.DrawFn) -> Part:
    if draw(st.booleans()):
        return Part([], EssState(), EssState(), 0, 0, 1)
    num = draw(st.integers(1, 9))
    gradient = [torch.tensor([float(draw(numbers))]), torch.full((2,), float(draw(numbers)))]
    ess = EssState.of(torch.zeros(num))
    return Part(gradient, ess, ess, num, draw(numbers), 1, {"loss": float(draw(numbers))}, {"age_max": float(num)})


@given(st.lists(parts(), min_size=1, max_size=5), st.randoms())
def test_the_order_of_parts_does_not_matter(some: list[Part], random) -> None:
    other = some.copy()
    random.shuffle(other)
    assert _plain(merge(some)) == _plain(merge(other))


@given(parts())
def test_a_committee_of_one_is_its_only_part(part: Part) -> None:
    assert _plain(merge([part])) == _plain(part)


def test_sums_add_and_maxima_stay() -> None:
    ess = EssState.of(torch.zeros(2))
    one = Part([torch.ones(1)], ess, ess, 2, 5, 1, {"loss": 1.0}, {"age_max": 3.0})
    two = Part([torch.ones(1)], ess, ess, 2, 6, 1, {"loss": 2.0}, {"age_max": 9.0}, ("broken",))
    whole = merge([one, two])
    assert whole.gradient[0].item() == 2.0
    assert (whole.num_answers, whole.num_tokens, whole.num_groups, whole.ess.n) == (4, 11, 2, 4)
    assert whole.sums == {"loss": 3.0} and whole.maxima == {"age_max": 9.0} and whole.faults == ("broken",)


def test_no_parts_are_an_empty_step() -> None:
    assert merge([]).num_answers == 0


def _plain(part: Part) -> tuple:
    return (
        [value.tolist() for value in part.gradient],
        part.ess,
        part.num_answers,
        part.num_tokens,
        part.num_groups,
        part.sums,
        part.maxima,
    )
