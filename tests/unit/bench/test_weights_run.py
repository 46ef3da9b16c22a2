"""The states that are measured are those of real steps, one after the other."""

import json
from pathlib import Path

import msgspec
import torch

from p2prl.bench import weights_run
from p2prl.bench.deltas import Pair
from p2prl.bench.weights import PLAN, Plan
from p2prl.models.state import state_hash

TINY = Plan(recipe="addition", rates=(1e-4, 1e-2), num_steps=3, first_step=2, num_groups=2, answer_tokens=5)


async def test_the_last_steps_of_each_rate_are_measured(tmp_path: Path) -> None:
    (tmp_path / PLAN).write_bytes(msgspec.json.encode(TINY))
    found = msgspec.convert(json.loads(json.dumps(await weights_run.measure(tmp_path))), list[Pair])
    assert [(pair.rate, pair.step) for pair in found] == [(1e-4, 2), (1e-4, 3), (1e-2, 2), (1e-2, 3)]
    assert found[0].num_changed < found[2].num_changed <= found[2].num_parameters


def test_each_step_goes_from_the_state_of_the_one_before(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    parent, child = tmp_path / "parent", tmp_path / "child"
    hashes: list[tuple[bytes, bytes]] = []
    for _ in weights_run.Training(TINY, 1e-3, tmp_path).steps(parent, child):
        hashes.append((state_hash(parent), state_hash(child)))
    assert len({one for pair in hashes for one in pair}) == 4
    assert hashes[0][1] == hashes[1][0] and hashes[1][1] == hashes[2][0]
