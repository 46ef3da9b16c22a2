"""The tree of versions: what is refused, which head is followed, ages, rollbacks, rewards."""

import itertools
import random
import time

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import BadRecord
from p2prl.records import Manifest, Version
from p2prl.swarm.head import BASE_ID, Chain, MissingParent, order_key

LEARNER = "12D3KooW" + "a" * 38
BASE = Version(0, 0, bytes(32))


def h(*parts: object) -> bytes:
    return blake3(repr(parts).encode()).digest()


def manifest(
    chain: Chain, parent_id: bytes, groups: list[bytes], *, term: int = 1, salt: object = 0, **over
) -> Manifest:
    parent = chain.link(parent_id)
    version = Version(term, parent.version.step + 1, h("weights", parent_id, term, salt))
    given = {
        "version": version,
        "parent": parent.version,
        "parent_id": parent_id,
        "learner": LEARNER,
        "contents": (),
        "group_ids": tuple(groups),
        "group_rewards": (0.5,) * len(groups),
        "group_answers": (8,) * len(groups),
        "num_groups": parent.num_groups + len(groups),
        "rho_on": 0.0,
        "votes": (),
        "metrics": {},
        "published_at": 0.0,
    }
    return Manifest(**{**given, **over})


def grow(chain: Chain, parent_id: bytes, groups: list[bytes], **over) -> bytes:
    record = manifest(chain, parent_id, groups, **over)
    manifest_id = h("manifest", msgspec.msgpack.encode(record))
    assert chain.add(manifest_id, record)
    assert not chain.add(manifest_id, record)
    return manifest_id


def groups(name: str, num: int = 2) -> list[bytes]:
    return [h(name, i) for i in range(num)]


def fork() -> tuple[Chain, dict[str, bytes]]:
    """base - a1 - a2 - a3, and b2 - b3 - b4 - b5 from a1."""
    chain, ids = Chain(BASE), {"base": BASE_ID}
    ids["a1"] = grow(chain, BASE_ID, groups("a1"))
    ids["a2"] = grow(chain, ids["a1"], groups("a2"))
    ids["a3"] = grow(chain, ids["a2"], groups("a3"))
    before = ids["a1"]
    for name in ("b2", "b3", "b4", "b5"):
        before = ids[name] = grow(chain, before, groups(name), term=2)
    return chain, ids


@pytest.mark.parametrize(
    "over, fault",
    [
        ({"version": Version(1, 2, bytes(32))}, "one step after"),
        ({"version": Version(0, 1, bytes(32)), "parent": Version(0, 0, h("x"))}, "names parent"),
        ({"num_groups": 3}, "counts its groups"),
        ({"group_rewards": (0.5,)}, "one reward"),
        ({"group_answers": (8, 8, 8)}, "one reward"),
        ({"group_rewards": (0.5, float("nan"))}, "finite"),
        ({"group_answers": (8, 0)}, "without answers"),
        ({"group_ids": (h("x"), h("x"))}, "twice"),
        ({"group_ids": (), "group_rewards": (), "group_answers": (), "num_groups": 0}, "allowed are 1 to 4"),
    ],
)
def test_what_breaks_a_rule_is_refused(over, fault):
    chain = Chain(BASE, max_batch=4)
    with pytest.raises(BadRecord, match=fault) as caught:
        chain.add(h("id"), manifest(chain, BASE_ID, groups("g"), **over))
    assert caught.value.peer == LEARNER and len(chain) == 1


def test_over_the_batch_lower_terms_and_groups_used_before_are_refused():
    chain = Chain(BASE, max_batch=4)
    with pytest.raises(BadRecord, match="5 groups"):
        chain.add(h(1), manifest(chain, BASE_ID, groups("g", 5)))
    first = grow(chain, BASE_ID, groups("g"), term=3)
    with pytest.raises(BadRecord, match="lower term"):
        chain.add(h(1), manifest(chain, first, groups("x"), term=2))
    second = grow(chain, first, groups("y"), term=3)
    with pytest.raises(BadRecord, match="already used"):
        chain.add(h(1), manifest(chain, second, [groups("g")[0]], term=3))


@pytest.mark.parametrize("focus", ["base", "a1", "a2", "a3", "b2", "b5"])
def test_a_group_is_free_on_a_branch_that_did_not_use_it_whatever_head_was_asked_about(focus):
    chain, ids = fork()
    chain.trained(ids[focus])
    with pytest.raises(BadRecord, match="already used"):
        chain.add(h(1), manifest(chain, ids["a3"], groups("a1"), term=2))
    with pytest.raises(BadRecord, match="already used"):
        chain.add(h(1), manifest(chain, ids["b3"], groups("b3"), term=2))
    grow(chain, ids["a3"], groups("b5"), term=2)
    grow(chain, ids["b5"], groups("a3"), term=2)


def test_an_unknown_parent_is_named():
    chain, ids = fork()
    orphan = manifest(chain, ids["a3"], groups("x"))
    with pytest.raises(MissingParent) as caught:
        Chain(BASE).add(h(1), orphan)
    assert caught.value.parent_id == ids["a3"]


def test_chain_order_is_groups_then_term_then_step_then_the_smaller_hash():
    low, high = bytes(32), bytes([255]) * 32
    ordered = [
        (10, Version(1, 5, high)),
        (10, Version(1, 5, low)),
        (10, Version(1, 6, high)),
        (10, Version(2, 1, high)),
        (11, Version(0, 0, high)),
    ]
    keys = [order_key(*one) for one in ordered]
    assert keys == sorted(keys) and len(set(keys)) == 5


def test_best_of_candidates():
    chain, ids = fork()
    assert chain.best([ids["a3"], ids["b5"], ids["b2"]]) == ids["b5"]
    assert chain.best([]) == BASE_ID


def test_ages_on_and_off_the_chain():
    chain, ids = fork()

    def age(head: str, name: str) -> int | None:
        return chain.age(ids[head], chain.link(ids[name]).version)

    assert [age("b5", name) for name in ("b5", "b3", "a1", "base")] == [0, 2, 4, 5]
    assert age("b5", "a3") == (5 - 1) + (3 - 1)
    assert age("a3", "b2") == (3 - 1) + (2 - 1)
    assert age("a1", "a3") == 2
    assert chain.age(ids["b5"], Version(9, 9, bytes(32))) is None


def test_ancestors_and_branches():
    chain, ids = fork()
    assert chain.common_ancestor(ids["a3"], ids["b5"]) == ids["a1"]
    assert chain.common_ancestor(ids["a3"], BASE_ID) == BASE_ID
    assert list(chain.ancestors(ids["a2"])) == [ids["a2"], ids["a1"], BASE_ID]
    assert chain.branch(ids["a1"], ids["a3"]) == (ids["a2"], ids["a3"])
    assert chain.is_on_chain(ids["b5"], ids["a1"]) and not chain.is_on_chain(ids["b5"], ids["a2"])
    assert not chain.is_on_chain(ids["b5"], h("unknown"))
    assert chain.find(chain.link(ids["b4"]).version) == ids["b4"]


def test_rollback_gives_back_what_the_winner_did_not_train_on():
    chain, ids = fork()
    assert chain.rollback(ids["a3"], ids["b5"]) == (*groups("a2"), *groups("a3"))
    assert chain.rollback(ids["a1"], ids["b5"]) == ()
    shared = grow(chain, ids["b5"], groups("a2"), term=2)
    assert chain.rollback(ids["a3"], shared) == tuple(groups("a3"))


def test_first_and_last_rewards_count_answers():
    chain = Chain(BASE)
    assert chain.first_last_rewards(BASE_ID) is None
    one = grow(chain, BASE_ID, groups("g1"), group_rewards=(0.0, 1.0), group_answers=(8, 4))
    assert chain.first_last_rewards(one, 8) == (0.0, 0.5)
    two = grow(chain, one, groups("g2"), group_rewards=(1.0, 0.5), group_answers=(8, 8))
    assert chain.first_last_rewards(two, 10) == (0.2, (0.5 * 8 + 1.0 * 2) / 10)
    assert chain.first_last_rewards(two, 10_000) == (16 / 28, 16 / 28)
    assert chain.first_last_rewards(one, 8) == (0.0, 0.5)


def test_prune_drops_old_side_branches_only():
    chain, ids = fork()
    stub = grow(chain, ids["b5"], groups("stub"), term=2, salt=1)
    head = grow(chain, ids["b5"], groups("head"), term=3)
    assert set(chain.prune(head, 3)) == {ids["a2"], ids["a3"]}
    assert stub in chain and ids["a1"] in chain and chain.age(head, Version(1, 2, bytes(32))) is None
    assert chain.prune(head, 3) == ()


def test_what_was_dropped_may_come_again():
    chain, ids = fork()
    head = grow(chain, ids["b5"], groups("head"), term=3)
    made = manifest(chain, ids["a2"], groups("again"), term=1)
    assert chain.best([head, *ids.values()]) == head and chain.trained(head)
    chain.drop([ids["a3"]])
    assert ids["a3"] not in chain and ids["a2"] in chain and chain.find(made.version) is None
    again = h("again")
    assert chain.add(again, made) and chain.find(made.version) == again


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False))
def test_caches_agree_with_the_slow_way(rng: random.Random):
    chain, ids = Chain(BASE), [BASE_ID]
    for i in range(12):
        ids.append(grow(chain, rng.choice(ids), groups(f"g{i}"), salt=i))
    for _ in range(20):
        head, other = rng.choice(ids), rng.choice(ids)
        line = list(chain.ancestors(head))
        assert chain.trained(head) == {g for i in line for g in chain.link(i).group_ids}
        shared = next(i for i in chain.ancestors(other) if i in line)
        assert chain.common_ancestor(head, other) == shared
        step = {i: chain.link(i).version.step for i in ids}
        assert chain.age(head, chain.link(other).version) == step[head] + step[other] - 2 * step[shared]


def test_thousands_of_versions_are_fast():
    chain, tip = Chain(BASE), BASE_ID
    records = []
    for i in range(4000):
        record = manifest(chain, tip, groups(f"g{i}", 4))
        records.append(record)
        tip = h("manifest", i)
        chain.add(tip, record)
        chain.trained(tip)
    began = time.process_time()
    for record, _ in itertools.product(records[::10], range(5)):
        assert chain.age(tip, record.version) is not None
    side = grow(chain, chain.branch(BASE_ID, tip)[-3], groups("side"), salt=1)
    for _ in range(200):
        chain.trained(side)
        chain.trained(tip)
    assert time.process_time() - began < 2.0  # about 0.03 here; quadratic work would take minutes


def test_a_long_branch_beside_the_head_is_checked_in_time_that_grows_with_its_length():
    """A node that joins or restarts takes up thousands of versions at once, on its event loop."""
    chain, tip = Chain(BASE), BASE_ID
    began = time.process_time()
    for step in range(5000):
        tip = grow(chain, tip, groups(f"long {step}", 4))
    assert time.process_time() - began < 4.0  # 0.3 s here; it took 15 with every link looking back to the fork
    with pytest.raises(BadRecord, match="already used"):
        chain.add(h("twice"), manifest(chain, tip, groups("long 17", 4)))
    other = grow(chain, BASE_ID, groups("other", 4))
    assert chain.add(h("again"), manifest(chain, other, groups("long 17", 4)))
    assert len(chain.trained(tip)) == 20_000 and len(chain.trained(other)) == 4
