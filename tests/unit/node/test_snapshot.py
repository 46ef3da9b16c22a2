"""What the page and the command line show of weights."""

import math

import msgspec

from p2prl import codec
from p2prl.cli.client import decode
from p2prl.node.snapshot import MAX_VERSIONS, make_status, weights_report
from p2prl.node.state import NodeState
from p2prl.node.supervisor import Supervisor
from p2prl.node.weights_loop import step_row
from p2prl.records import PeerInfo, Version
from p2prl.status import Status, StepRow, encode
from p2prl.weights.pull import Progress
from tests import factories


def follow(state: NodeState, num: int, held: tuple[int, ...]) -> None:
    """A chain of `num` versions of anchors whose states of `held` are here."""
    before, parent = state.base, codec.ZERO_HASH
    for step in range(1, num + 1):
        version = Version(1, step, codec.content_hash(b"state %d" % step))
        content = factories.anchor(step)
        made = factories.manifest(step, version=version, parent=before, parent_id=parent, contents=(content,))
        parent, before = codec.content_hash(b"manifest %d" % step), version
        state.chain.add(parent, made)
        state.manifests[parent], state.head_id = made, parent
        if step in held:
            path = state.weights.state_path(version.hash)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(1000))
    state.weights.look()


def meet(state: NodeState, number: int, held: Version) -> str:
    key = factories.identity(number)
    info = PeerInfo(
        peer_id=key.peer_id, boot_id=b"otherone", sequence=1, name="other", role="full", addresses=(), held=held,
        can_learn=True, accelerator_bytes=0, software="", wire_schemas=(1,),
    )  # fmt: skip
    state.membership.record(info, state.now())
    return key.peer_id


def test_versions_with_what_is_here_and_who_has_them(make_state) -> None:
    state = make_state()
    state.base_path.write_bytes(bytes(3000))
    follow(state, 40, (2, 38, 40))
    ahead, behind = (
        meet(state, 1, state.head),
        meet(state, 2, state.manifests[state.chain.link(state.head_id).parent_id].version),
    )
    report = weights_report(state)
    assert (report.head, report.full_bytes, report.held_bytes) == (str(state.head), 3000, 3000)
    assert (report.newest, report.num_peers) == (1, 2)
    first, second = report.versions[:2]
    assert (first.step, first.state_bytes, first.kept, first.holders) == (40, 1000, "newest", (ahead,))
    assert (second.step, second.state_bytes, second.kept, second.holders) == (39, 0, "", (behind,))
    assert (first.ways[0].kind, first.ways[0].num_bytes, first.ways[0].held) == ("anchor", 1000, True)
    assert [row.step for row in report.versions] == [*range(40, 40 - MAX_VERSIONS, -1), 2]  # all that is here comes


def test_a_node_without_versions_has_a_report_too(make_state) -> None:
    report = weights_report(make_state())
    assert (report.versions, report.full_bytes, report.held_bytes) == ((), 0, 0)


def test_what_is_on_its_way_is_told(make_state) -> None:
    state = make_state()
    follow(state, 3, ())
    state.head_id = codec.ZERO_HASH  # a newcomer: it knows the chain alone
    anchor = next(m for m in state.manifests.values() if m.version.step == 3).contents[0]
    state.transfers[anchor.content_hash] = Progress(400, 1000, num_peers=2, bytes_per_s=50.0)
    state.transfers[bytes(32)] = Progress(1, 2)  # of no version that is known any more
    awaited = weights_report(state).awaited
    assert awaited is not None
    assert (awaited.num_files, awaited.whole_files, awaited.num_bytes, awaited.here_bytes) == (1, 0, 1000, 400)
    (fetch,) = make_status(state, Supervisor(state.clock, lambda *_: None), "", {}).fetches
    assert (fetch.version, fetch.kind) == (awaited.version, "anchor")
    assert (fetch.num_bytes, fetch.of_bytes, fetch.num_peers, fetch.bytes_per_s) == (400, 1000, 2, 50.0)
    state.transfers.clear()
    assert make_status(state, Supervisor(state.clock, lambda *_: None), "", {}).fetches == ()


async def test_rates_are_shown_with_their_caps(make_state) -> None:
    state = make_state()
    supervisor = Supervisor(state.clock, lambda *_: None)
    assert make_status(state, supervisor, "", {}).rates.up_cap_bytes_per_s is None
    state.transport.set_rates(5e6, None)
    rates = make_status(state, supervisor, "", {}).rates
    assert (rates.up_cap_bytes_per_s, rates.down_cap_bytes_per_s) == (5e6, None)


def test_metrics_that_are_no_numbers_keep_nobody_from_reading_the_status(make_state) -> None:
    """JSON has no word for them: null is no float to whoever decodes it. They are a learner's word, or it diverged."""
    state = make_state()
    follow(state, 1, (1,))
    manifest = state.manifests[state.head_id]
    metrics = {"age_p50": math.nan, "age_p95": math.inf, "wall_s": -math.inf, "loss": 0.5}
    state.manifests[state.head_id] = msgspec.structs.replace(manifest, metrics=metrics)
    for last in ({}, metrics):
        made = make_status(state, Supervisor(state.clock, lambda *_: None), "", last)
        shown = decode(encode(made), Status)
        assert (shown.training.last, shown.policy.staleness_p50, shown.policy.staleness_p95) == ({"loss": 0.5}, 0, 0)
    row = decode(encode(step_row(state.manifests[state.head_id])), StepRow)
    assert (row.metrics, row.wall_s) == ({"loss": 0.5}, 0.0)
