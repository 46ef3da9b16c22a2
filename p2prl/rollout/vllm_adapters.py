"""Adapters given to vLLM by name: one that each request names, and that each version replaces in place.

In: a version's file of adapters. Out: a folder as the peft library has it, and the requests for it.

Version 0 has adapters too, all of zeros, so that answers begun under it go on under the next version's; its file must be
the base model's, as zeros change nothing of that and there is no other.

By name a version is there in hundredths of a second, whatever the model's size. But vLLM computes W x + s B A x, and the
learner runs on the bf16 rounding of W + s B A. SmolLM2 in float32, rank 16 in all linear layers, an update of .1 % of
each weight: the log-probs differ from the learner's by 4e-3 in the mean, by 6e-6 when merged (ESS ratio .9995 and 1.0000
over 16 tokens), and a CPU gives an eighth of the tokens a second.
"""

from pathlib import Path
from typing import Any

import torch

from p2prl.errors import BadRecord, EngineError
from p2prl.models.load import ModelFiles
from p2prl.models.lora import Pair, Target, find_targets, read_pairs
from p2prl.models.lora_rule import Lora
from p2prl.models.peft_folder import write_peft
from p2prl.models.state import state_hash
from p2prl.rollout.vllm_weights import Folders

NAME, NUMBER = "policy", 1
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for


class Adapters(Folders):
    """Makes the folder of the newest version's adapters; the base model's stays as it was."""

    def __init__(self, files: ModelFiles, scratch: Path, lora: Lora) -> None:
        """Raises EngineError for a rank or a layer that vLLM has no adapters for."""
        super().__init__(files, scratch, None)
        self._rule, self._base_hash = lora, files.hash
        self._targets: dict[str, Target] = find_targets(self._module, lora.targets)
        self._adapters = scratch / "adapters"
        if lora.rank > RANKS[-1] or any(target.transposed for target in self._targets.values()):
            raise EngineError(
                f"vLLM has no adapters of rank {lora.rank} for these layers; set rollout.adapters to merged"
            )

    def engine_args(self) -> dict[str, Any]:
        rank = next(rank for rank in RANKS if rank >= self._rule.rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}

    def request(self) -> Any:
        return self._request(load_inplace=False)  # what is there stays, or each answer would read it again

    async def put(self, llm: Any, folder: Path) -> None:
        await llm.add_lora(self._request(load_inplace=True))

    def _request(self, load_inplace: bool) -> Any:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        return LoRARequest(NAME, NUMBER, str(self._adapters), load_inplace=load_inplace)

    def _folder_of(self, weights: Path, step: int) -> Path:
        if not step and not self._is_base(weights):
            raise BadRecord(
                "it is not the base model, the one whole version that there is by name; set rollout.adapters to merged"
            )
        pairs = read_pairs(weights, self._targets, self._rule.rank) if step else self._zeros()
        self._adapters.mkdir(exist_ok=True)
        write_peft(self._adapters, self._rule, self._targets, pairs)
        return self._adapters

    def _is_base(self, weights: Path) -> bool:
        return weights.samefile(self._base) or state_hash(weights) == self._base_hash

    def _zeros(self) -> dict[str, Pair]:
        rank = self._rule.rank
        return {
            name: (torch.zeros(rank, target.num_inputs).bfloat16(), torch.zeros(target.num_outputs, rank).bfloat16())
            for name, target in self._targets.items()
        }
