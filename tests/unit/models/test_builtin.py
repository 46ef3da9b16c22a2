import torch

from p2prl.environments.registry import HELD_OUT_FROM, load_environment
from p2prl.models.builtin import WEIGHTS, make_builtin
from p2prl.models.char_tokenizer import VOCAB_SIZE
from p2prl.models.state import state_hash
from p2prl.models.tensors import load_into
from p2prl.models.warm_start import Task, sampled_reward


def test_the_shipped_weights_are_pinned() -> None:
    assert WEIGHTS.stat().st_size < 2_000_000
    assert state_hash(WEIGHTS).hex() == "d18e7ef4fb3c2845a2fcccfce38ce33d2991b860baffc34aa88b2ee75fc442df"


def test_the_architecture_has_the_promised_size() -> None:
    module = make_builtin()
    assert 300_000 <= sum(parameter.numel() for parameter in module.parameters()) <= 900_000
    assert module.config.vocab_size == VOCAB_SIZE
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_the_warm_start_has_its_sampled_reward() -> None:
    """On 4,096 training and 4,096 held-out prompts at temperature 1 (standard error .007)."""
    task: Task = load_environment("addition", {})  # pyright: ignore[reportAssignmentType]
    module = make_builtin()
    load_into(module, WEIGHTS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rewards = [sampled_reward(module, task, first, 4096, seed=7) for first in (10**6, HELD_OUT_FROM)]
    finally:
        torch.set_num_threads(threads)
    assert all(0.70 <= reward <= 0.80 for reward in rewards), rewards
