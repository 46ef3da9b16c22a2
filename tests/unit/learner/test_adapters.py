"""LoRA that is exact: what runs follows from what is published, and the gradient is the chain rule's through that."""

import copy

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from p2prl.errors import BadRecord, ConfigError
from p2prl.learner import checkpoint
from p2prl.learner.adapters import adapt
from p2prl.learner.collate import collate
from p2prl.learner.logprobs import token_logprobs
from p2prl.learner.policy import Policy
from p2prl.learner.score_norms import score_pass
from p2prl.learner.step import apply_part, compute_part
from p2prl.models.load import load_module
from p2prl.models.lora_rule import Lora
from p2prl.models.tensors import read_state, write_state, write_tensors
from p2prl.recipe import LoraSection
from p2prl.records import Version
from p2prl.rollout.transformers_engine import TransformersEngine

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
    disturb(policy, 1)
    return policy


def disturb(policy: Policy, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, master in policy.masters.items():
            if name.endswith(".lora_b"):
                master.copy_(0.05 * torch.randn(master.shape, generator=source))
    policy._round()


def advance(policy: Policy, recipe, tools, seed: int) -> None:
    step = tools.make_step(policy, 4, seed)
    done = apply_part(policy, compute_part(policy, collate(step, 64), recipe), recipe, 1.0)
    assert done.skipped == ""
    policy.version = Version(1, policy.version.step + 1, bytes([seed]) * 32)


def is_merged(policy: Policy) -> bool:
    """Its adapters are the masters' roundings, its weights the base plus those."""
    weights = dict(policy.module.named_parameters())
    rounded = {name: master.bfloat16().double() for name, master in policy.masters.items()}
    return all(
        torch.equal(weights[name], (each.base.double() + 2.0 * (b @ a)).float().bfloat16().float())
        and torch.equal(each.a.double(), a)
        and torch.equal(each.b.double(), b)
        for name, each in policy.adapters.items()
        for a, b in [(rounded[f"{name}.lora_a"], rounded[f"{name}.lora_b"])]
    )


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


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
    write_state(adapted.module, tmp_path / "state")
    full = Policy.load(recipe, tmp_path / "models")
    full.follow(tmp_path / "state", adapted.version)
    dense = dict(zip(full.masters, compute_part(full, collate(step, 64), recipe).gradient, strict=True))
    found = dict(zip(adapted.masters, part.gradient, strict=True))
    close = {"rtol": 1e-3, "atol": 1e-4} if compute == "float32" else {"rtol": 0.1, "atol": 0.1}
    for name, adapter in adapted.adapters.items():
        torch.testing.assert_close(found[f"{name}.lora_a"], 2.0 * adapter.b.detach().t() @ dense[name], **close)
        torch.testing.assert_close(found[f"{name}.lora_b"], 2.0 * dense[name] @ adapter.a.detach().t(), **close)
        assert found[f"{name}.lora_a"].any() and found[f"{name}.lora_b"].any()


def test_steps_move_the_targets_alone_and_publish_the_adapters(adapted, recipe, tools, tmp_path) -> None:
    before = {name: value.detach().clone() for name, value in adapted.module.named_parameters()}
    for seed in range(3):
        done = apply_part(
            adapted, compute_part(adapted, collate(tools.make_step(adapted, 4, seed), 64), recipe), recipe, 1.0
        )
        assert done.skipped == "" and is_merged(adapted)
    adapted.publish(tmp_path / "state")
    state = read_state(tmp_path / "state")
    assert state.keys() == adapted.masters.keys()
    assert all(torch.equal(state[name], master.bfloat16()) for name, master in adapted.masters.items())
    assert any(not torch.equal(master, master.bfloat16().float()) for master in adapted.masters.values())
    for name, value in adapted.module.named_parameters():
        assert torch.equal(value, before[name]) == (name not in adapted.adapters)


def test_an_engine_that_loads_a_version_has_the_learners_weights(adapted, recipe, tools, tmp_path) -> None:
    """Bit for bit, whatever it had loaded before."""
    module = load_module(recipe.model.source, tmp_path / "models", torch.float32)
    write_state(module, tmp_path / "base")
    engine = TransformersEngine(module, (1,), 0, lora=Lora(4, 8.0, TARGETS))
    adapted.publish(tmp_path / "one")
    first = {name: value.detach().clone() for name, value in adapted.module.named_parameters()}
    advance(adapted, recipe, tools, 1)
    adapted.publish(tmp_path / "two")
    for name in ("two", "one", "two"):
        engine.load(tmp_path / name, Version(1, 1, bytes(32)))
    assert same_weights(module, adapted.module)
    engine.load(tmp_path / "one", Version(1, 1, bytes(32)))
    assert all(torch.equal(value, first[name]) for name, value in module.named_parameters())
    engine.load(tmp_path / "base", Version(0, 0, bytes(32)))
    adapted.follow(tmp_path / "base", Version(0, 0, bytes(32)))
    assert same_weights(module, adapted.module)


def test_a_new_leader_goes_on_with_the_same_adapters(adapted, recipe, tools, tmp_path) -> None:
    """A step, publish, follow elsewhere, a step: as without the change but for the roundings of the masters."""
    rate = lora(recipe, learning_rate=1e-3)
    elsewhere = Policy.load(rate, tmp_path / "models")
    disturb(elsewhere, 7)
    adapted._learner = rate.learner
    adapted.optimiser = adapted._new_optimiser()
    advance(adapted, rate, tools, 1)
    adapted.publish(tmp_path / "one")
    checkpoint.save(adapted, tmp_path / "saved", 1.0)
    elsewhere.follow(tmp_path / "one", adapted.version)
    assert is_merged(elsewhere) and same_weights(elsewhere.module, adapted.module)
    assert elsewhere.publish(tmp_path / "again") == adapted.publish(tmp_path / "one")
    moments = copy.deepcopy(adapted.optimiser.state_dict()["state"])
    elsewhere.restore({name: value.clone() for name, value in elsewhere.masters.items()}, moments, adapted.version)
    step = tools.make_step(adapted, 4, 2)
    for policy in (adapted, elsewhere):
        apply_part(policy, compute_part(policy, collate(step, 64), rate), rate, 1.0)
    for name, master in adapted.masters.items():
        torch.testing.assert_close(elsewhere.masters[name], master, rtol=2**-8, atol=1e-4)  # a tenth of a step
    restarted = Policy.load(rate, tmp_path / "models")
    assert checkpoint.restore_newest(restarted, tmp_path / "saved") == (Version(1, 1, bytes([1]) * 32), [])
    apply_part(restarted, compute_part(restarted, collate(step, 64), rate), rate, 1.0)
    assert all(torch.equal(restarted.masters[name], master) for name, master in adapted.masters.items())


def test_bad_adapters_change_nothing(adapted, tmp_path) -> None:
    good = {name: master.bfloat16() for name, master in adapted.masters.items()}
    before, version = adapted.publish(tmp_path / "before"), adapted.version
    name = next(iter(good))
    write_tensors(good | {name: torch.full_like(good[name], float("nan"))}, tmp_path / "bad")
    with pytest.raises(BadRecord, match="no finite numbers"):
        adapted.follow(tmp_path / "bad", Version(1, 1, bytes(32)))
    write_state(adapted.module, tmp_path / "whole")
    with pytest.raises(BadRecord, match="of another recipe"):
        adapted.follow(tmp_path / "whole", Version(1, 1, bytes(32)))
    assert adapted.publish(tmp_path / "after") == before and adapted.version == version and is_merged(adapted)


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
    disturb(policy, 2)
    policy.shares_prompts = False
    rows = collate(tools.make_step(policy, 1, 3), 64)
    everyone, parameters = torch.arange(len(rows.ids)), list(policy._trained.values())

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


def test_version_0_begins_anew_and_a_checkpoint_goes_on_where_it_was(adapted, recipe, tools, tmp_path) -> None:
    adapted.follow(tmp_path / "never read", Version(0, 0, bytes(32)))
    assert all(not each.b.any() and each.a.any() for each in adapted.adapters.values()) and is_merged(adapted)
    assert same_weights(adapted.module, Policy.load(recipe, tmp_path / "models").module)
    advance(adapted, recipe, tools, 1)
    checkpoint.save(adapted, tmp_path / "saved", 1.0)
    other = Policy.load(lora(recipe), tmp_path / "models")
    assert checkpoint.restore_newest(other, tmp_path / "saved") == (adapted.version, [])
    for policy in (adapted, other):
        advance(policy, recipe, tools, 2)
    assert is_merged(other) and same_weights(adapted.module, other.module)
    full = Policy.load(recipe, tmp_path / "models")
    version, notes = checkpoint.restore_newest(full, tmp_path / "saved")
    assert version is None and "another model" in notes[0]


def test_a_checkpoint_has_no_base_and_one_that_has_is_set_aside(adapted, tmp_path) -> None:
    path = checkpoint.save(adapted, tmp_path, 1.0).with_suffix(".safetensors")
    tensors = load_file(path)
    assert {name.partition("/")[0] for name in tensors} == {"master"}
    save_file(tensors | {f"base/{next(iter(adapted.masters))}": torch.zeros(2)}, path)
    manifest = path.with_suffix(".json")
    old = msgspec.json.decode(manifest.read_bytes(), type=checkpoint.Manifest)
    manifest.write_bytes(msgspec.json.encode(msgspec.structs.replace(old, data_hash=checkpoint._file_hash(path))))
    version, notes = checkpoint.restore_newest(adapted, tmp_path)
    assert version is None and "older p2prl" in notes[0]


def test_moments_of_an_older_checkpoint_are_taken(adapted, recipe, tools, tmp_path) -> None:
    advance(adapted, recipe, tools, 1)
    first = adapted.version
    checkpoint.save(adapted, tmp_path / "saved", 1.0)
    advance(adapted, recipe, tools, 2)
    adapted.publish(tmp_path / "two")
    other = Policy.load(lora(recipe), tmp_path / "models")
    other.follow(tmp_path / "two", adapted.version)
    assert checkpoint.restore_moments(other, tmp_path / "saved") == (first, [])
    assert other.optimiser.state_dict()["state"] and is_merged(other) and other.version == adapted.version


def test_a_layer_with_a_transposed_weight_is_adapted_too() -> None:
    """GPT-2's: its gradients and score norms against autograd through base + s B A itself."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=23, n_positions=32)
    module = transformers.GPT2LMHeadModel(config).eval()
    plain = copy.deepcopy(module)
    adapters = adapt(module, Lora(3, 6.0, ("c_attn", "c_fc", "c_proj")))
    assert len(adapters) == 4 and all(each.target.transposed for each in adapters.values())
    with torch.no_grad():
        for each in adapters.values():
            for _, half in each.halves:
                half.copy_(0.1 * torch.randn(half.shape).bfloat16())
            each.target.weight.copy_(each.merged())
        for name, parameter in plain.named_parameters():
            parameter.copy_(module.get_parameter(name))
    ids = torch.randint(0, 23, (3, 9))

    def logprobs(model) -> torch.Tensor:
        return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, :-1], -1)[..., 5]

    found = score_pass(module, lambda: logprobs(module))
    assert found.fallback == ""
    torch.testing.assert_close(found.logp, logprobs(plain).detach())
    weights = [plain.get_parameter(name) for name in adapters]
    square = torch.zeros(3)
    for row, total in enumerate(logprobs(plain).sum(1)):
        for each, dense in zip(adapters.values(), torch.autograd.grad(total, weights, retain_graph=True), strict=True):
            square[row] += (2.0 * each.b.detach().t() @ dense.t()).square().sum()
            square[row] += (2.0 * dense.t() @ each.a.detach().t()).square().sum()
    torch.testing.assert_close(found.norms, square.sqrt(), rtol=1e-4, atol=1e-5)


def test_a_target_that_is_not_there_is_named(policy) -> None:
    with pytest.raises(ConfigError, match="'c_attn'"):
        adapt(policy.module, Lora(4, 8.0, ("q_proj", "c_attn")))
