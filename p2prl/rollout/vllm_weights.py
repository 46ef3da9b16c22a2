"""What vLLM reads: a folder with whole weights, made from a version's file.

In: a state file, whole or of adapters. Out: a folder of safetensors; a file that doesn't fit is refused before vLLM
touches its weights.

A weight that a model uses twice (embeddings and output head) is given to vLLM twice, as two weights: of a shared one its
reload in place renews only the first use, and the CPU backend goes on with its packed copy of the old output head.

Adapters are merged as the learner merges them, so that both sides have the same bits; `vllm_adapters.py` is the other way.
"""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from p2prl.errors import BadRecord, EngineError, StoreError
from p2prl.models.load import WEIGHTS_NAME, ModelFiles
from p2prl.models.lora_rule import Lora
from p2prl.models.state import Payload, TensorPlace, open_state, write_payloads
from p2prl.records import Version

SHARED_NAME = "shared.safetensors"
OVERRIDES = {"tie_word_embeddings": False}  # of the model's config
LOCK = ".lock"


@contextmanager
def scratch_folder(cache: Path) -> Iterator[Path]:
    """For `Folders`: gone at the end, or swept by the next one where its process was killed, as it may hold a whole model."""
    parent = cache / ".vllm" / "weights"
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / LOCK).open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)  # nobody takes a new one for a left one
        for left in parent.glob(f"*/{LOCK}"):
            with left.open() as lock:
                if _is_free(lock.fileno()):
                    shutil.rmtree(left.parent, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=parent))
        held = (folder / LOCK).open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
    with held:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _is_free(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Folders:
    """Makes the folder of the newest version in `scratch`, and has vLLM read it."""

    def __init__(self, files: ModelFiles, scratch: Path, lora: Lora | None) -> None:
        assert files.folder is not None
        self._base, self._folder, self._scratch, self._lora = files.weights, files.folder, scratch, lora
        self._shapes = _shapes(self._base)

    def first(self) -> Path:
        """The base model's folder."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            if path.name != WEIGHTS_NAME:
                (self._scratch / path.name).symlink_to(path.absolute())
        return self._make(self._base, None)

    def engine_args(self) -> dict[str, Any]:
        return {}

    def request(self) -> Any:
        """The adapters that each answer names; None: it names none."""
        return None

    def __call__(self, weights: Path, version: Version) -> Path:
        """A version's file to the folder for `put`. Blocks; raises EngineError when it doesn't fit."""
        try:
            return self._folder_of(weights, version.step)
        except (BadRecord, StoreError, OSError) as error:
            raise EngineError(f"can't load {version}: {error}") from error

    async def put(self, llm: Any, folder: Path) -> None:
        """In place, while vLLM draws nothing."""
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

    def _folder_of(self, weights: Path, step: int) -> Path:
        return self._make(weights, self._lora if step > 0 else None)

    def _make(self, weights: Path, lora: Lora | None) -> Path:
        target = self._scratch / WEIGHTS_NAME
        if lora is None:
            self._check(weights)
        target.unlink(missing_ok=True)
        if lora is None:
            target.symlink_to(weights.absolute())
        else:
            self._merge(weights, lora, target)
        self._repeat(target, self._scratch / SHARED_NAME)
        return self._scratch

    def _check(self, weights: Path) -> None:
        found = _shapes(weights)
        wrong = sorted(name for name in found.keys() | self._shapes.keys() if found.get(name) != self._shapes.get(name))
        if wrong:
            raise BadRecord(
                f"these weights are of another model: {wrong[0][:64]!r} and {len(wrong) - 1} more tensors differ in name, "
                "type or shape; check the recipe's model"
            )

    @cached_property
    def _module(self) -> Any:
        """The architecture, without memory for its weights."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    @cached_property
    def _repeated(self) -> dict[str, str]:
        """Further names of shared weights -> the name they have in a state file."""
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        every = self._module.named_parameters(remove_duplicate=False)
        return {name: names[id(parameter)] for name, parameter in every if names[id(parameter)] != name}

    def _repeat(self, weights: Path, target: Path) -> None:
        if not self._repeated:
            return
        with open_state(weights) as (places, data):
            held = {place.name: place for place in places}

            def payload(name: str, place: TensorPlace) -> Payload:
                return Payload(name, place.shape, lambda: memoryview(data[place.begin : place.end]))

            repeated = [payload(name, held[source]) for name, source in self._repeated.items()]
            write_payloads(target, repeated, durable=False)

    def _merge(self, adapters: Path, lora: Lora, target: Path) -> None:
        import torch

        from p2prl.models.lora import find_targets, merge, read_pairs

        targets = find_targets(self._module, lora.targets)
        pairs = read_pairs(adapters, targets, lora.rank)
        with open_state(self._base) as (places, data):

            def read(place: TensorPlace) -> memoryview:
                content = bytearray(data[place.begin : place.end])
                if place.name not in pairs:
                    return memoryview(content)
                base = torch.frombuffer(content, dtype=torch.bfloat16).reshape(place.shape)
                merged = merge(base, pairs[place.name], lora.scale, targets[place.name].transposed)
                return merged.view(torch.int16).reshape(-1).numpy().data

            payloads = [Payload(place.name, place.shape, lambda place=place: read(place)) for place in places]
            write_payloads(target, payloads, durable=False)


def _shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with open_state(path) as (places, _):
        return {place.name: (place.dtype, place.shape) for place in places}
