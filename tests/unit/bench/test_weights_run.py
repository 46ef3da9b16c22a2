"""The states that are measured are those of real steps, one after the other."""

import json
from pathlib import Path

import msgspec
import torch

from p2prl.bench import weights_run
from p2prl.bench.deltas import Pair
from p2prl.bench.generation import Prompts
from p2prl.bench.staleness_sampler import Sampler
from p2prl.bench.weights import PLAN, Plan
from p2prl.models.builtin import WEIGHTS
from p2prl.models.state import state_hash
from p2prl.recipe import find
from p2prl.records import Version

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


MIX = """[environment]
[[environment.mix]]
name = "addition"
[[environment.mix]]
name = "addition"
params = { digits = 1 }

"""


def mixed(folder: Path) -> Path:
    """The recipe addition over two kinds of addition, with a stop string."""
    _, text = find("addition")
    head, _, tail = text.partition("[environment]")
    path = folder / "mixed.toml"
    sections = MIX + tail[tail.index("[") :]
    path.write_text(head + sections.replace("[sampling]\n", '[sampling]\nstop = ["1"]\n'))
    return path


def test_a_mixture_of_environments_is_trained_on_too(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plan = msgspec.structs.replace(TINY, recipe=str(mixed(tmp_path)))
    training = weights_run.Training(plan, 1e-3, tmp_path)
    assert [*training.steps(tmp_path / "parent", tmp_path / "child")] == [1, 2, 3]


def test_the_lotterys_prompts_come_from_each_member_of_a_mixture(tmp_path: Path) -> None:
    recipe, _ = find(str(mixed(tmp_path)))
    batches = Prompts(recipe, tmp_path).batches(Version(0, 0, bytes(32)), 0, 4, 8)
    lengths = {len(prompt.token_ids) for prompts, _ in batches for prompt in prompts}
    assert lengths == {len("1+2="), len("12+34=")}


def test_a_staleness_run_may_have_a_mixture(tmp_path: Path) -> None:
    recipe, _ = find(str(mixed(tmp_path)))
    sampler = Sampler(recipe, tmp_path, 1, lambda: None)
    sampler.load(WEIGHTS, Version(0, 0, state_hash(WEIGHTS)))
    arrivals = sampler.draw(0, [(0, slot) for slot in range(8)])
    assert {len(arrival.group.prompt_ids) for arrival in arrivals} == {4, 6}
    assert all(arrival.judgement.prompt_ok and arrival.judgement.bad_finish == -1 for arrival in arrivals)
