"""Score norms and weighted gradients against one autograd backward an answer, on a tiny model of each family."""

import warnings

import pytest
import torch
import transformers
from torch import nn

from p2prl.learner.score_norms import ScoreNorms, ScoreNormWarning, score_pass

SMALL = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 31}
GROUPED = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64}
GEMMA = GROUPED | {"head_dim": 6, "query_pre_attn_scalar": 6, "sliding_window": 4, "pad_token_id": 0}
FAMILIES = {
    "llama_tied": ("LlamaForCausalLM", transformers.LlamaConfig, GROUPED | {"tie_word_embeddings": True}),
    "llama_untied": (
        "LlamaForCausalLM",
        transformers.LlamaConfig,
        GROUPED | {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "pad_token_id": 3},
    ),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config, GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config, GROUPED | {"head_dim": 6, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", transformers.Gemma2Config, GEMMA),
    "gemma3": ("Gemma3ForCausalLM", transformers.Gemma3TextConfig, GEMMA),
    "gpt2": (
        "GPT2LMHeadModel",
        transformers.GPT2Config,
        {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 31, "n_positions": 64},
    ),
}


def make(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    name, config, options = FAMILIES[family]
    torch.manual_seed(7)
    module = getattr(transformers, name)(config(**options)).to(dtype).eval()
    with torch.no_grad():
        for parameter in module.parameters():  # norms and biases off their special starting values
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module


def draw(answers: int = 5, tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids with repeats, and which of them count."""
    source = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 31, (answers, tokens), generator=source)
    ids[:, 3] = ids[:, 1]
    mask = torch.rand(answers, tokens, generator=source) < 0.7
    mask[:, 0] = False
    mask[1] = False
    return ids, mask


def scorer(module: nn.Module, ids: torch.Tensor, mask: torch.Tensor):
    def logprobs() -> torch.Tensor:
        logits = module(input_ids=ids, use_cache=False).logits[:, :-1]
        logp = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
        logp = logp.gather(2, ids[:, 1:, None]).squeeze(2)
        return torch.where(mask[:, 1:], logp, 0.0)

    return logprobs


def by_autograd(module: nn.Module, logprobs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Norms [B], and each parameter's gradient of each answer, [B, ...]."""
    logp = logprobs()
    trained = {name: item for name, item in module.named_parameters() if item.requires_grad}
    rows = [
        torch.autograd.grad(row.sum(), list(trained.values()), retain_graph=True, allow_unused=True) for row in logp
    ]
    gradients = {
        name: torch.stack([torch.zeros_like(item) if row[number] is None else row[number] for row in rows])
        for number, (name, item) in enumerate(trained.items())
    }
    square = sum(value.flatten(1).square().sum(1) for value in gradients.values())
    return square.sqrt(), gradients


def check(module: nn.Module, logprobs, tolerance: float = 1e-9) -> None:
    """Everything the pass gives, against autograd; what it leaves in `.grad` is added to what was there."""
    norms, gradients = by_autograd(module, logprobs)
    found = score_pass(module, logprobs)
    assert found.fallback == ""
    torch.testing.assert_close(found.norms, norms, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.logp, logprobs().detach())
    weights = torch.linspace(-1.5, 2.0, len(norms), dtype=norms.dtype)
    for times in (1, 2):
        found.gradient(weights)
        for name, item in module.named_parameters():
            if item.requires_grad and item.grad is not None:
                wanted = times * torch.einsum("b,b...->...", weights, gradients[name])
                torch.testing.assert_close(item.grad, wanted, rtol=tolerance, atol=tolerance * 10)
            elif item.requires_grad:
                assert not gradients[name].any()
            else:
                assert item.grad is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(family: str) -> None:
    module = make(family)
    # Gemma's norms compute in float32 whatever the model's type.
    check(module, scorer(module, *draw()), 1e-6 if family.startswith("gemma") else 1e-9)


@pytest.mark.parametrize("family", ["llama_tied", "gemma3", "gpt2"])
def test_single_precision_is_close(family: str) -> None:
    module = make(family, torch.float32)
    check(module, scorer(module, *draw()), 1e-5)


def test_long_answers_take_the_other_formula() -> None:
    """Above T = d_in d_out / (d_in + d_out) the per-answer product is cheaper than Gram matrices."""
    module = make("llama_tied")
    check(module, scorer(module, *draw(answers=3, tokens=60)))


def test_temporaries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2prl.learner.score_layers._BUDGET", 100)
    for tokens in (9, 60):
        module = make("qwen2")
        check(module, scorer(module, *draw(tokens=tokens)))


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "gpt2"])
def test_lora_layers_alone_are_trained(family: str) -> None:
    import peft

    targets = ["c_attn", "c_proj"] if family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about GPT-2's transposed layers
        config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False)
        module = peft.get_peft_model(make(family), config).double().eval()
    check(module, scorer(module, *draw()))


def test_frozen_parameters_have_no_share() -> None:
    module = make("llama_tied")
    for name, item in module.named_parameters():
        item.requires_grad_("layers.1" in name)
    check(module, scorer(module, *draw()))


def test_gradient_checkpointing_changes_nothing() -> None:
    module = make("llama_tied")
    norms, _ = by_autograd(module, scorer(module, *draw()))
    module.gradient_checkpointing_enable({"use_reentrant": False})
    module.train()
    found = score_pass(module, scorer(module, *draw()))
    assert found.fallback == ""
    torch.testing.assert_close(found.norms, norms)


def test_low_precision_arithmetic_stays_near() -> None:
    module = make("llama_tied", torch.float32)
    logprobs = scorer(module, *draw())
    norms, _ = by_autograd(module, logprobs)
    with torch.autocast("cpu", torch.bfloat16):
        found = score_pass(module, logprobs)
    assert found.fallback == ""
    torch.testing.assert_close(found.norms, norms, rtol=0.05, atol=0.05)
    found.gradient(torch.ones(5))
    assert all(item.grad is None or item.grad.dtype == torch.float32 for item in module.parameters())


class Odd(nn.Module):
    """A scale of its own, which no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((24,), 1.3, dtype=torch.float64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale


class OddRMSNorm(nn.Module):
    """Named like a norm, but its output is no linear function of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((24,), 0.7, dtype=torch.float64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * torch.tanh(self.weight)


class Shortcut(nn.Module):
    """Uses the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24, bias=False, dtype=torch.float64)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value) + nn.functional.linear(value, self.inner.weight)


class Decoy(nn.Module):
    """Calls a layer for nothing, and uses its weight beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24, bias=False, dtype=torch.float64)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.inner(value)
        return value + nn.functional.linear(value, self.inner.weight)


class DoublesInput(nn.Module):
    """Changes in place what a layer saw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24, dtype=torch.float64)
        self.inner.weight.requires_grad_(False)  # else torch itself refuses

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value * 1.0
        result = self.inner(value)
        return result + value.mul_(2)


class DoublesOutput(nn.Module):
    """Changes in place what a layer gave: the graph is rewritten, the layer's output is no longer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24, dtype=torch.float64)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value).mul_(2)


class Flat(nn.Module):
    """Loses which row belongs to which answer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24, dtype=torch.float64)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value.flatten(0, 1)).view_as(value)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Odd, "not known"),
        (OddRMSNorm, "not known"),
        (Shortcut, "outside"),
        (Decoy, "outside"),
        (DoublesInput, "in place"),
        (DoublesOutput, "outside"),
        (Flat, "rows"),
    ],
)
def test_what_is_not_known_takes_a_backward_an_answer(layer: type[nn.Module], why: str) -> None:
    module = make("llama_tied")
    module.model.norm = nn.Sequential(module.model.norm, layer())
    logprobs = scorer(module, *draw())
    norms, gradients = by_autograd(module, logprobs)
    with pytest.warns(ScoreNormWarning, match=why):
        found = score_pass(module, logprobs)
    assert why in found.fallback
    torch.testing.assert_close(found.norms, norms)
    found.gradient(torch.ones_like(norms))
    for name, gradient in gradients.items():
        torch.testing.assert_close(module.get_parameter(name).grad, gradient.sum(0))


def test_a_layer_that_runs_twice_counts_twice() -> None:
    module = make("llama_tied")
    module.model.layers[1] = module.model.layers[0]
    check(module, scorer(module, *draw()))


def test_no_hooks_are_left_even_when_the_model_fails() -> None:
    module = make("llama_tied")
    norms = ScoreNorms(module)

    def broken() -> torch.Tensor:
        scorer(module, *draw())()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        norms.run(broken)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


def test_one_plan_serves_many_passes() -> None:
    module = make("qwen3")
    norms = ScoreNorms(module)
    for answers in (2, 5):
        logprobs = scorer(module, *draw(answers))
        torch.testing.assert_close(norms.run(logprobs).norms, by_autograd(module, logprobs)[0])
