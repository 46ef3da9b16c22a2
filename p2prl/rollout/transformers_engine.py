"""Generation with transformers and torch: the engine that always works.

In: a torch module of the recipe's architecture, prompts. Out: completions, drawn in batches by `decoding.py`.

Where versions are adapters, the matrices they are added to are kept in bf16, so that any version follows exactly. The
forward runs in the module's dtype; in float32 (the weights are bf16-valued) it agrees with the learner's, in bf16 it is
about as good as its rounding. One seed, one batch, one torch version and one number of threads give one result.
Runs on the CPU and CUDA; MPS is untested.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from p2prl.errors import BadRecord, EngineError, StoreError
from p2prl.models.lora import find_targets, is_adapter_file, merge, read_pairs
from p2prl.models.lora_rule import Lora
from p2prl.models.stop_strings import StopStrings
from p2prl.models.tensors import load_into
from p2prl.records import Sampling, Version
from p2prl.rollout.decoding import Decoder
from p2prl.rollout.engine import Between, Drawn, nothing_between

BATCH_TOKENS = 2**16  # cache positions of one batch: rows x (longest prompt + longest answer)


class TransformersEngine:
    """Implements `engine.Engine` for a causal language model of transformers."""

    def __init__(
        self,
        module: torch.nn.Module,
        stop_ids: Sequence[int],
        pad_id: int,
        *,
        lora: Lora | None = None,
        batch_tokens: int = BATCH_TOKENS,
        stops: StopStrings | None = None,
    ) -> None:
        """`module` has the base model's weights where `lora` is given. ConfigError when its targets aren't there.

        `stops`: the stop strings of every request.
        """
        self._module: Any = module.eval().requires_grad_(False)
        self._device = next(module.parameters()).device
        self._stops = stops or StopStrings((), lambda _: "", ())
        ends = torch.tensor(sorted(stop_ids), dtype=torch.long, device=self._device)
        self._decoder = Decoder(self._module, ends, pad_id, lambda: self._version, self._stops)
        self.batch_tokens = batch_tokens
        self._version: Version | None = None
        self._lora = lora
        self._targets = find_targets(module, lora.targets) if lora else {}
        self._bases = {name: target.weight.detach().bfloat16().clone() for name, target in self._targets.items()}
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        self.name = f"transformers {transformers.__version__} torch {torch.__version__} {dtype}"
        self.context: int = getattr(self._module.config, "max_position_embeddings", 2**31)
        self.vocab_size: int | None = self._module.config.vocab_size

    @property
    def version(self) -> Version | None:
        return self._version

    def load(self, weights: Path, version: Version) -> None:
        try:
            if self._lora is not None and version.step > 0:
                self._load_adapters(weights, self._lora)
            elif is_adapter_file(weights):
                raise BadRecord("it is adapters alone, but this recipe's versions are whole weights")
            else:
                load_into(self._module, weights)
                self._bases = {name: target.weight.bfloat16() for name, target in self._targets.items()}
        except (BadRecord, StoreError) as error:  # checked before the first tensor is copied
            raise EngineError(f"can't load {version}: {error}") from error
        self._version = version

    def _load_adapters(self, weights: Path, lora: Lora) -> None:
        pairs = read_pairs(weights, self._targets, lora.rank)
        with torch.no_grad():
            for name, target in self._targets.items():
                target.weight.copy_(merge(self._bases[name], pairs[name], lora.scale, target.transposed))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_answers: int,
        sampling: Sampling,
        seed: int,
        between: Between = nothing_between,
    ) -> Drawn:
        version = self._version
        if version is None:
            raise EngineError("no weights are loaded yet; send Load first")
        if not all(prompts) or num_answers < 1:
            raise EngineError("every prompt needs at least one token, and one answer at least is to be drawn")
        if sampling.stop != self._stops.strings:
            raise EngineError("the engine was set up for other stop strings than these; restart it")
        longest = max(map(len, prompts)) + sampling.max_new_tokens
        if longest > self.context:
            raise EngineError(
                f"a prompt of {longest - sampling.max_new_tokens} tokens and an answer of {sampling.max_new_tokens} are over "
                f"the {self.context} that this model was made for; run a recipe with shorter ones"
            )
        generator = torch.Generator(self._device).manual_seed(seed)
        drawn = Drawn([[] for _ in prompts], (version,))
        versions = [version]
        left = deque(sorted(range(len(prompts)), key=lambda position: len(prompts[position])))
        with torch.inference_mode():
            while left and self._version == version:
                chosen = self._next_batch([len(prompts[position]) for position in left], num_answers, sampling)
                batch = [prompts[position] for position in islice(left, chosen)]
                try:
                    rows = self._decoder.run(batch, num_answers, sampling, generator, versions, between)
                except (RuntimeError, MemoryError, IndexError) as error:
                    self._give_in(error, batch, num_answers, sampling)
                    continue
                for order in range(chosen):
                    drawn.completions[left.popleft()] = rows[order * num_answers : (order + 1) * num_answers]
        return drawn._replace(versions=tuple(versions))

    def _next_batch(self, lengths: Sequence[int], num_answers: int, sampling: Sampling) -> int:
        """How many of the prompts of these (rising) lengths fit the bound on cache positions; one does anyhow."""
        count = 1
        while count < len(lengths):
            if (count + 1) * num_answers * (lengths[count] + sampling.max_new_tokens) > self.batch_tokens:
                break
            count += 1
        return count

    def _give_in(self, error: Exception, batch: Sequence[Sequence[int]], num_answers: int, sampling: Sampling) -> None:
        """Where memory ran out, a smaller bound from now on; EngineError for all else, and where there is none."""
        used = len(batch) * num_answers * (max(map(len, batch)) + sampling.max_new_tokens)
        if not is_out_of_memory(error) or len(batch) < 2:
            raise EngineError(
                f"generating {len(batch)} x {num_answers} answers failed: {str(error)[:300]}; "
                "if memory ran out, free some, or run a recipe with a smaller model, group or answer"
            ) from error
        self.batch_tokens = min(self.batch_tokens, used) // 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    """torch has a type for it on a GPU, and only words on a CPU."""
    words = str(error).lower()
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "allocate memory" in words
        or "out of memory" in words
    )
