"""LoRA that is exact: what runs is what is published, and the gradient is the chain rule's through that."""

import pytest
import torch

from p2prl.errors import LearnerError
from p2prl.learner import checkpoint
from p2prl.learner.adapters import adapt
from p2prl.learner.collate import collate
from p2prl.learner.logprobs import token_logprobs
from p2prl.learner.policy import Policy
from p2prl.learner.score_norms import score_pass
from p2prl.learner.step import apply_part, compute_part
from p2prl.models.tensors import read_state
from p2prl.recipe import LoraSection
from p2prl.records import Version

TARGETS = ("q_proj", "v_proj", "down_proj")
BOTH = ("q_proj", "k_proj")  # they see the same input


def lora(recipe, targets=TARGETS, **changes):
    section = LoraSection(rank=4, alpha=8.0, targets=targets)
    update = {"training": "lora", "lora": section, "learning_rate": 1e-2} | changes
    return recipe.model_copy(update={"learner": recipe.learner.model_copy(update=update)})


@pytest.fixture
def adapted(recipe, tmp_path) -> Policy:
    """A LoRA policy whose adapters have an effect already."""
    torch.set_num_threads(1)
    policy = Policy.load(lora(recipe), tmp_path / "models")
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for adapter in policy.adapters.values():
            adapter.b.copy_(0.05 * torch.randn(adapter.b.shape, generator=source))
    policy._round()
    return policy


def is_merged(policy: Policy) -> bool:
    weights = dict(policy.module.named_parameters())
    return all(
        torch.equal(weights[name], (each.base.float() + 2.0 * (each.b @ each.a)).bfloat16().float())
        for name, each in policy.adapters.items()
    )


def test_it_begins_as_the_model_itself(policy, recipe, tmp_path) -> None:
    other = Policy.load(lora(recipe), tmp_path / "models")
    for (name, mine), (same, theirs) in zip(
        other.module.named_parameters(), policy.module.named_parameters(), strict=True
    ):
        assert name == same and torch.equal(mine, theirs)
    assert len(other.masters) == 2 * len(TARGETS) * 2  # A and B, two layers


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_the_gradient_is_the_chain_rule_through_the_merged_weights(adapted, recipe, tools, compute, tmp_path) -> None:
    step = tools.make_step(adapted, 4, 1)
    if compute == "bfloat16":
        adapted._learner = lora(recipe, compute=compute).learner
    part = compute_part(adapted, collate(step, 64), recipe)
    adapted.publish(tmp_path / "state")
    full = Policy.load(recipe, tmp_path / "models")
    full.follow(tmp_path / "state", adapted.version)
    dense = dict(zip(full.masters, compute_part(full, collate(step, 64), recipe).gradient, strict=True))
    found = dict(zip(adapted.masters, part.gradient, strict=True))
    close = {"rtol": 1e-3, "atol": 1e-4} if compute == "float32" else {"rtol": 0.1, "atol": 0.1}
    for name, adapter in adapted.adapters.items():
        torch.testing.assert_close(found[f"{name}.lora_a"], 2.0 * adapter.b.detach().t() @ dense[name], **close)
        torch.testing.assert_close(found[f"{name}.lora_b"], 2.0 * dense[name] @ adapter.a.detach().t(), **close)
        assert found[f"{name}.lora_a"].any() and found[f"{name}.lora_b"].any()


def test_steps_move_the_targets_alone_and_publish_the_whole_rounding(adapted, recipe, tools, tmp_path) -> None:
    before = {name: value.detach().clone() for name, value in adapted.module.named_parameters()}
    for seed in range(3):
        done = apply_part(
            adapted, compute_part(adapted, collate(tools.make_step(adapted, 4, seed), 64), recipe), recipe, 1.0
        )
        assert done.skipped == "" and is_merged(adapted)
    adapted.publish(tmp_path / "state")
    state = read_state(tmp_path / "state")
    assert state.keys() == before.keys()
    for name, value in adapted.module.named_parameters():
        assert torch.equal(state[name].float(), value.detach())
        assert torch.equal(value, before[name]) == (name not in adapted.adapters)


def test_it_learns(recipe, tools, tmp_path) -> None:
    changed = lora(recipe, LoraSection().targets, learning_rate=5e-3)
    policy = Policy.load(changed, tmp_path / "models")
    rewards = []
    for number in range(15):
        part = compute_part(policy, collate(tools.make_step(policy, 32, number), 64), changed)
        rewards.append(apply_part(policy, part, changed, 1.0).metrics["reward_mean"])
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.02


@pytest.mark.parametrize("targets", [TARGETS, BOTH])
def test_score_norms_are_those_of_the_adapters(recipe, tools, tmp_path, targets) -> None:
    policy = Policy.load(lora(recipe, targets), tmp_path / "models")
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for adapter in policy.adapters.values():
            adapter.b.copy_(0.05 * torch.randn(adapter.b.shape, generator=source))
    policy.shares_prompts = False
    rows = collate(tools.make_step(policy, 1, 3), 64)
    everyone, parameters = torch.arange(len(rows.ids)), list(policy.masters.values())

    def logprobs() -> torch.Tensor:
        return token_logprobs(policy, rows, rows.batch, everyone).logp

    each = [torch.autograd.grad(row.sum(), parameters, retain_graph=True) for row in logprobs()]
    norms = torch.stack([sum(value.square().sum() for value in row).sqrt() for row in each])
    found = score_pass(policy.module, logprobs)
    assert found.fallback == ""
    torch.testing.assert_close(found.norms, norms, rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1.0, 2.0, len(norms))
    found.gradient(weights)
    for number, parameter in enumerate(parameters):
        wanted = sum(weight * row[number] for weight, row in zip(weights, each, strict=True))
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_goes_on_where_it_was_also_from_other_weights(adapted, recipe, tools, tmp_path) -> None:
    adapted.publish(tmp_path / "state")
    adapted.follow(tmp_path / "state", Version(1, 7, bytes(32)))  # the adapters begin anew on these
    assert all(not each.b.any() and each.a.any() for each in adapted.adapters.values()) and is_merged(adapted)
    apply_part(adapted, compute_part(adapted, collate(tools.make_step(adapted, 4, 1), 64), recipe), recipe, 1.0)
    checkpoint.save(adapted, tmp_path / "saved", 1.0)
    other = Policy.load(lora(recipe), tmp_path / "models")
    assert checkpoint.restore_newest(other, tmp_path / "saved") == (adapted.version, [])
    for policy in (adapted, other):
        step = tools.make_step(policy, 4, 2)
        apply_part(policy, compute_part(policy, collate(step, 64), recipe), recipe, 1.0)
    pairs = zip(adapted.module.parameters(), other.module.parameters(), strict=True)
    assert is_merged(other) and all(torch.equal(mine, theirs) for mine, theirs in pairs)
    full = Policy.load(recipe, tmp_path / "models")
    version, notes = checkpoint.restore_newest(full, tmp_path / "saved")
    assert version is None and "another model" in notes[0]


def test_a_target_that_is_not_there_is_named(policy) -> None:
    with pytest.raises(LearnerError, match="'c_attn'"):
        adapt(policy.module, 4, 8.0, ("q_proj", "c_attn"))
