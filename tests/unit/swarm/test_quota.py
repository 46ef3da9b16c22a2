"""Serve, slow, ignore: by peer."""

from p2prl.swarm.quota import Quota, QuotaRules, Ruled

RULES = QuotaRules(requests_per_s=10.0, bytes_per_s=1000.0, burst_s=1.0, max_wait_s=2.0)


def test_within_its_share_a_peer_is_served_at_once():
    quota = Quota(RULES)
    assert {quota.ask("a", 10, now / 10).kind for now in range(100)} == {Ruled.SERVE}


def test_too_many_requests_are_slowed_then_ignored_with_the_reason():
    quota = Quota(RULES)
    rulings = [quota.ask("a", 1, 0.0) for _ in range(40)]
    kinds = [ruling.kind for ruling in rulings]
    assert kinds == [Ruled.SERVE] * 10 + [Ruled.SLOW] * 20 + [Ruled.IGNORE] * 10
    assert "10 requests a second" in rulings[10].reason and "ask less often" in rulings[-1].reason
    assert quota.ask("b", 1, 0.0).kind is Ruled.SERVE


def test_too_many_bytes_are_slowed_then_ignored():
    quota = Quota(RULES)
    assert quota.ask("a", 1000, 0.0).kind is Ruled.SERVE
    slowed = quota.ask("a", 1500, 0.0)
    assert (slowed.kind, slowed.wait_s) == (Ruled.SLOW, 1.5) and "MiB a second" in slowed.reason
    assert quota.ask("a", 1000, 0.0).kind is Ruled.IGNORE


def test_an_ignored_request_costs_nothing():
    quota = Quota(RULES)
    for _ in range(1000):
        quota.ask("a", 1, 0.0)
    assert quota.ask("a", 1, 3.0).kind is Ruled.SERVE


def test_the_table_is_bounded():
    quota = Quota(QuotaRules(max_peers=5))
    for i in range(50):
        quota.ask(f"p{i}", 1, 0.0)
    assert len(quota) == 5
