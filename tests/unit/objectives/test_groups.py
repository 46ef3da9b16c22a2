import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.objectives.groups import all_equal, group_index, group_logsumexp, group_max, group_sd, group_sum

members = st.lists(st.tuples(st.integers(-3, 3), st.floats(-700, 700), st.booleans()), min_size=1, max_size=12)


@settings(deadline=None)
@given(members)
def test_statistics_are_those_of_each_group_alone(rows: list[tuple[int, float, bool]]) -> None:
    group = torch.tensor([row[0] for row in rows])
    value = torch.tensor([row[1] for row in rows], dtype=torch.float64)
    live = torch.tensor([row[2] for row in rows])
    number, index = group_index(group)
    assert number == len(set(group.tolist()))
    centred = (
        value
        - (
            group_sum(torch.where(live, value, 0.0), index, number)
            / group_sum(live.double(), index, number).clamp(min=1)
        )[index]
    )
    spread = group_sd(centred, live, index, number)
    for row in range(len(rows)):
        mine = value[(group == group[row]) & live]
        place = index[row]
        torch.testing.assert_close(group_sum(torch.where(live, value, 0.0), index, number)[place], mine.sum())
        torch.testing.assert_close(group_max(value, index, number)[place], value[group == group[row]].max())
        wanted = torch.logsumexp(mine, 0) if len(mine) else torch.zeros(())
        torch.testing.assert_close(group_logsumexp(value, live, index, number)[place], wanted, check_dtype=False)
        assert bool(all_equal(value, live, index, number)[place]) == (len(set(mine.tolist())) <= 1)
        if len(mine) > 1:
            torch.testing.assert_close(spread[place], mine.std(), rtol=1e-6, atol=1e-9)
        else:
            assert spread[place] == 0 or not live[row]
