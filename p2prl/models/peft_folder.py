"""Adapters as the peft library reads them.

In: a version's pairs of A and B, the layers they belong to. Out: adapter_config.json, adapter_model.safetensors.

The values are the version's own bf16 values, under peft's names.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from p2prl.models.lora import Pair, Target
from p2prl.models.lora_rule import Lora
from p2prl.models.state import write_payloads
from p2prl.models.tensors import payload_of


def write_peft(folder: Path, lora: Lora, targets: Mapping[str, Target], pairs: Mapping[str, Pair]) -> None:
    payloads = []
    for name, (a, b) in pairs.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        payloads += [payload_of(f"{layer}.lora_A.weight", a), payload_of(f"{layer}.lora_B.weight", b)]
    write_payloads(folder / "adapter_model.safetensors", payloads, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(target.transposed for target in targets.values()),
        "target_modules": sorted({name.removesuffix(".weight").rpartition(".")[2] for name in pairs}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
