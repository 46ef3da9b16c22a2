import pytest
import torch

from p2prl.errors import StoreError
from p2prl.learner import checkpoint
from p2prl.learner.collate import collate
from p2prl.learner.policy import Policy
from p2prl.learner.step import apply_part, compute_part
from p2prl.records import Version


def advance(policy: Policy, recipe, tools, seed: int) -> None:
    step = tools.make_step(policy, 2, seed)
    apply_part(policy, compute_part(policy, collate(step, 64), recipe), recipe, 1.0)
    policy.version = Version(1, policy.version.step + 1, bytes([seed]) * 32)


def same(one: Policy, other: Policy) -> bool:
    return all(torch.equal(one.masters[name], other.masters[name]) for name in one.masters)


def test_round_trip_goes_on_exactly_where_it_was(policy, recipe, tools, tmp_path) -> None:
    advance(policy, recipe, tools, 1)
    checkpoint.save(policy, tmp_path, 1.0)
    other = Policy.load(recipe, tmp_path / "models")
    assert checkpoint.restore_newest(other, tmp_path) == (policy.version, [])
    assert same(policy, other)
    advance(policy, recipe, tools, 2)
    advance(other, recipe, tools, 2)
    assert same(policy, other)


def test_a_corrupt_one_is_set_aside_and_the_one_before_is_taken(policy, recipe, tools, tmp_path) -> None:
    advance(policy, recipe, tools, 1)
    checkpoint.save(policy, tmp_path, 1.0)
    first = policy.version
    advance(policy, recipe, tools, 2)
    data = checkpoint.save(policy, tmp_path, 2.0).with_suffix(".safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    version, notes = checkpoint.restore_newest(policy, tmp_path)
    assert version == first == policy.version
    assert len(notes) == 1 and "corrupt" in notes[0]
    assert not data.exists()
    assert len(list(tmp_path.glob("*.corrupt-1*"))) == 2


def test_a_kill_before_the_manifest_leaves_the_older_one(policy, recipe, tools, tmp_path) -> None:
    advance(policy, recipe, tools, 1)
    checkpoint.save(policy, tmp_path, 1.0)
    first = policy.version
    advance(policy, recipe, tools, 2)
    checkpoint.save(policy, tmp_path, 2.0).unlink()
    (tmp_path / ".half.safetensors.staged").write_bytes(b"half")
    assert checkpoint.restore_newest(policy, tmp_path) == (first, [])


def test_an_unreadable_manifest_is_set_aside(policy, tmp_path) -> None:
    checkpoint.save(policy, tmp_path, 1.0).write_bytes(b"{")
    version, notes = checkpoint.restore_newest(policy, tmp_path)
    assert version is None and "corrupt" in notes[0]


def test_it_keeps_the_newest(policy, recipe, tools, tmp_path) -> None:
    for seed in (1, 2, 3):
        advance(policy, recipe, tools, seed)
        checkpoint.save(policy, tmp_path, float(seed), keep=2)
    assert [path.name[:10] for path in sorted(tmp_path.glob("*.json"))] == ["0000000002", "0000000003"]
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_another_version_than_the_wanted_is_not_taken(policy, tmp_path) -> None:
    checkpoint.save(policy, tmp_path, 1.0)
    assert checkpoint.restore_newest(policy, tmp_path, Version(1, 5, bytes(32))) == (None, [])


def test_a_full_disk_leaves_the_older_one_and_no_rubbish(policy, recipe, tools, small_disk) -> None:
    disk = small_disk(32)
    folder = disk.path / "checkpoints"
    advance(policy, recipe, tools, 1)
    checkpoint.save(policy, folder, 1.0)
    first, names = policy.version, sorted(path.name for path in folder.iterdir())
    advance(policy, recipe, tools, 2)
    for leave_bytes in (0, 2**20):  # nothing fits; the beginning fits
        disk.fill(leave_bytes)
        with pytest.raises(StoreError, match="free some space"):
            checkpoint.save(policy, folder, 2.0)
        assert sorted(path.name for path in folder.iterdir()) == names
    assert checkpoint.restore_newest(policy, folder) == (first, [])
    disk.free()
    advance(policy, recipe, tools, 3)
    checkpoint.save(policy, folder, 3.0)
    assert checkpoint.restore_newest(policy, folder) == (policy.version, [])


def test_the_optimiser_alone_is_taken_from_an_older_one(policy, recipe, tools, tmp_path) -> None:
    advance(policy, recipe, tools, 1)
    checkpoint.save(policy, tmp_path, 1.0)
    first = policy.version
    advance(policy, recipe, tools, 2)
    checkpoint.save(policy, tmp_path, 2.0).write_bytes(b"{")
    advance(policy, recipe, tools, 3)
    weights, version = tmp_path / "version", policy.version
    policy.publish(weights)
    policy.follow(weights, version)
    masters = {name: master.clone() for name, master in policy.masters.items()}
    assert not policy.optimiser.state_dict()["state"]
    found, notes = checkpoint.restore_moments(policy, tmp_path)
    assert found == first
    assert len(notes) == 1 and "corrupt" in notes[0]
    assert policy.version == version
    assert all(torch.equal(masters[name], policy.masters[name]) for name in masters)
    assert policy.optimiser.state_dict()["state"]
    advance(policy, recipe, tools, 4)
    policy.version = Version(1, first.step + checkpoint.MAX_BEHIND + 1, bytes(32))
    assert checkpoint.restore_moments(policy, tmp_path) == (None, [])
