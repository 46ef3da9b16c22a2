import pytest
import torch

from p2prl.errors import BadRecord
from p2prl.learner.collate import collate
from p2prl.learner.policy import Policy
from p2prl.learner.step import apply_part, compute_part
from p2prl.models.state import state_hash
from p2prl.models.tensors import write_tensors
from p2prl.records import Version


def test_follow_takes_the_published_values_and_forgets_the_optimiser(policy, recipe, tools, tmp_path) -> None:
    step = tools.make_step(policy, 2, 1)
    apply_part(policy, compute_part(policy, collate(step, 64), recipe), recipe, 1.0)
    state = policy.publish(tmp_path / "one")
    assert state_hash(tmp_path / "one") == state
    version = Version(1, 1, state)
    other = Policy.load(recipe, tmp_path / "models")
    other.follow(tmp_path / "one", version)
    assert other.version == version
    assert other.publish(tmp_path / "two") == state
    assert all(torch.equal(value, value.bfloat16().float()) for value in other.masters.values())
    policy.follow(tmp_path / "one", version)
    assert policy.optimiser.state_dict()["state"] == {}


def test_weights_of_another_model_change_nothing(policy, tmp_path) -> None:
    before, version = policy.publish(tmp_path / "before"), policy.version
    write_tensors({"other": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(BadRecord):
        policy.follow(tmp_path / "other", Version(1, 1, bytes(32)))
    assert policy.publish(tmp_path / "after") == before
    assert policy.version == version


def test_the_rate_of_a_step_is_restored_even_when_it_fails(policy) -> None:
    usual = policy.optimiser.param_groups[0]["lr"]
    with pytest.raises(ValueError):
        policy.apply([], 0.5)
    assert policy.optimiser.param_groups[0]["lr"] == usual


def test_bfloat16_arithmetic_gives_a_float32_gradient(policy, recipe, tools) -> None:
    learner = recipe.learner.model_copy(update={"compute": "bfloat16"})
    low = Policy(policy.module, learner, policy.version)
    step = tools.make_step(policy, 2, 3)
    part = compute_part(low, collate(step, 64), recipe)
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in part.gradient)
    assert 0.5 < part.ess.rho < 1


@pytest.mark.parametrize("baseline", ["mean", "min_variance"])
def test_gradient_checkpointing_changes_no_gradient(policy, recipe, tools, tmp_path, baseline: str) -> None:
    objective = recipe.objective.model_copy(update={"baseline": baseline})
    plain = recipe.model_copy(update={"objective": objective})
    learner = recipe.learner.model_copy(update={"gradient_checkpointing": True})
    saving = plain.model_copy(update={"learner": learner})
    rows = collate(tools.make_step(policy, 3, 1), 64)
    other = Policy.load(saving, tmp_path / "models")
    runs = []
    for layer in other.module.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer.register_forward_pre_hook(lambda *_: runs.append(1))
        assert not (isinstance(layer, torch.nn.Dropout) and layer.training)
    part, wanted = compute_part(other, rows, saving), compute_part(policy, rows, plain)
    assert len(runs) > 2 * len(other.module.model.layers)  # each ran again in the backward pass
    assert part.faults == ()
    for mine, theirs in zip(part.gradient, wanted.gradient, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
