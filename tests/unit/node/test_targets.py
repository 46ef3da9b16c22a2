"""Heads that peers told of: the leader's first, others in turn, liars ever later."""

from p2prl.node.targets import LONGEST_PAUSE_S, MAX_HOLDERS, Target, Targets


def head(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_the_leaders_newest_head_comes_first_then_the_longest_waiting() -> None:
    targets = Targets()
    targets.told(head(1), "a", "leader")
    targets.told(head(2), "b", "leader")
    targets.told(head(3), "leader", "leader")
    targets.told(head(4), "leader", "leader")
    order = [targets.next("leader", 0.0) for _ in range(4)]
    assert order == [Target(head(4), "leader"), Target(head(1), "a"), Target(head(2), "b"), None]


def test_who_fails_waits_longer_each_time_and_the_leader_a_second() -> None:
    targets, now, waits = Targets(), 0.0, []
    targets.told(head(1), "liar", "leader")
    for _ in range(12):
        target = targets.next("leader", now)
        assert target is not None
        targets.failed(target, "leader", now)
        wait_s = targets.wait_s(now)
        assert wait_s is not None
        assert targets.next("leader", now) is None and not targets.is_ready("liar", now)
        waits.append(wait_s)
        now += wait_s
    assert waits[:3] == [1.0, 2.0, 4.0] and waits[-1] == LONGEST_PAUSE_S
    for number in range(5):
        targets.failed(Target(head(number), "leader"), "leader", now)
        assert targets.is_ready("leader", now + 1.0)
    targets.done(Target(head(1), "liar"))
    assert targets.is_ready("liar", now)


def test_nobody_fills_the_table_for_others() -> None:
    targets = Targets()
    targets.told(head(0), "leader", "leader")
    for number in range(1000):
        targets.told(head(number), f"peer {number}", "leader")
    assert targets.next("leader", 0.0) == Target(head(0), "leader")
    found = []
    while (target := targets.next("leader", 0.0)) is not None:
        found.append(target.holder)
    assert len(found) == MAX_HOLDERS - 1 and found[-1] == "peer 999"
