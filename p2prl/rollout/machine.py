"""What the plan needs to know of this machine and of a model: measured and read, in the engine process.

In: a model's files. Out: `plan.Machine`, `plan.Model`.
"""

import importlib.util
from pathlib import Path

import psutil

from p2prl.errors import ConfigError
from p2prl.models.builtin import HIDDEN_SIZE, MAX_POSITIONS, NUM_HEADS, NUM_LAYERS
from p2prl.models.load import ModelFiles
from p2prl.models.state import open_state
from p2prl.rollout.plan import Machine, Model

CGROUP = Path("/sys/fs/cgroup")


def measure(device: str = "auto") -> Machine:
    """ConfigError when `device` is "cuda" and no GPU answers."""
    import torch

    has_vllm = importlib.util.find_spec("vllm") is not None
    if device != "cpu" and torch.cuda.is_available():
        free_bytes, _ = torch.cuda.mem_get_info()
        return Machine("cuda", free_bytes, has_vllm)
    if device == "auto" and torch.backends.mps.is_available():  # untested: no such machine was at hand
        return Machine("mps", free_memory(), has_vllm)  # which it shares with the processor
    if device == "cuda":
        raise ConfigError("the GPU that generated here is gone: look at nvidia-smi and the system's log, then restart")
    return Machine("cpu", free_memory(), has_vllm)


def free_memory(cgroup: Path = CGROUP) -> int:
    """Of the machine, or less where a container has a limit."""
    free_bytes = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text()) - _cached_files(cgroup / "memory.stat")
    except (OSError, ValueError):  # no such group, or "max"
        return free_bytes
    return max(0, min(free_bytes, limit - used))


def _cached_files(stat: Path) -> int:
    """Counted as used, and given back as soon as somebody needs it."""
    if not stat.exists():
        return 0
    values = dict(line.split() for line in stat.read_text().splitlines())
    return int(values.get("inactive_file", 0))


def describe(files: ModelFiles) -> Model:
    with open_state(files.weights) as (places, _):
        num_parameters = sum((place.end - place.begin) // 2 for place in places)
    if files.folder is None:
        return Model(num_parameters, NUM_LAYERS, NUM_HEADS, HIDDEN_SIZE // NUM_HEADS, MAX_POSITIONS, False)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(files.folder, local_files_only=True, trust_remote_code=False).get_text_config()
    heads = config.num_attention_heads
    return Model(
        num_parameters,
        config.num_hidden_layers,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        getattr(config, "max_position_embeddings", 2048),
        True,
        config.vocab_size * config.hidden_size if getattr(config, "tie_word_embeddings", False) else 0,
    )
