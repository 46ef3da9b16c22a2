"""What the worker knows of engines: token ids in, completions with log-probs and version stamps out.

An engine lives in the engine process (`engine_process.py`) and blocks; it sees no text, no peers, no rewards.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from p2prl.records import Completion, Sampling, Version


class Engine(Protocol):
    """Generates from one policy; the version in use changes only through `load`."""

    @property
    def name(self) -> str:
        """For a group's `engine` field, e.g. "transformers 5.19.0 float32"."""
        ...

    @property
    def version(self) -> Version | None:
        """What is loaded, None before the first load."""
        ...

    def load(self, weights: Path, version: Version) -> None:
        """Switch to the weights of a safetensors file. Raises EngineError and keeps the old ones when it can't."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], num_answers: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        """`num_answers` completions for each prompt, all under the loaded version: [len(prompts)][num_answers].

        A completion's `token_ids` includes the stop token when it was drawn. `logprobs` are of the distribution
        sampled from. Segments index the tuple of versions (here just the loaded one). Raises EngineError.
        """
        ...
