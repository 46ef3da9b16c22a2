"""Rank of candidates and choice of the electorate."""

from hypothesis import given
from hypothesis import strategies as st

from p2prl.swarm.rank import electorate, memory_class, rank

SWARM = bytes(32)
GIB = 2**30


class Ability:
    def __init__(self, can_learn: bool, accelerator_bytes: int = 0) -> None:
        self.can_learn = can_learn
        self.accelerator_bytes = accelerator_bytes


def test_more_accelerator_memory_ranks_first_and_who_cant_learn_not_at_all():
    peers = {
        "cpu": Ability(True),
        "big": Ability(True, 80 * GIB),
        "small": Ability(True, 8 * GIB),
        "no": Ability(False),
    }
    assert rank(peers, SWARM) == ("big", "small", "cpu")


def test_like_memory_ranks_by_a_hash_that_differs_between_swarms():
    peers = {f"p{i}": Ability(True, 24 * GIB + i) for i in range(6)}
    orders = {rank(peers, bytes([i]) * 32) for i in range(10)}
    assert len(orders) > 1


@given(st.permutations([f"p{i}" for i in range(8)]))
def test_the_order_of_meeting_does_not_matter(order):
    sizes = {f"p{i}": i % 3 * 20 * GIB for i in range(8)}
    assert rank({p: Ability(True, sizes[p]) for p in order}, SWARM) == rank(
        {p: Ability(True, sizes[p]) for p in sorted(order)}, SWARM
    )


def test_memory_classes_are_doublings():
    assert [memory_class(n * GIB) for n in (0, 2, 4, 7, 8, 24, 80)] == [0, 0, 1, 1, 2, 3, 5]


def test_electorates_move_with_the_term():
    members = [f"p{i}" for i in range(30)]
    assert len({electorate(SWARM, term, members, 7) for term in range(20)}) > 10
