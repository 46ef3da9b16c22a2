"""What the worker knows of engines: token ids in, completions with log-probs and version stamps out.

An engine lives in the engine process (`engine_process.py`) and blocks; it sees no text, no peers, no rewards.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from p2prl.records import Completion, Sampling, Version

# Called now and then while an engine generates, with whether weights may change: then it may call `load`.
Between = Callable[[bool], None]


def nothing_between(may_load: bool) -> None:
    """For callers that neither watch nor change an engine at work."""


class Drawn(NamedTuple):
    """`completions[p][a]`: answer `a` to prompt `p`; none where the prompt was not begun, since by then another version
    was loaded. Segments index `versions`, whose first is the one that all answers began under."""

    completions: list[list[Completion]]
    versions: tuple[Version, ...]


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
        self,
        prompts: Sequence[Sequence[int]],
        num_answers: int,
        sampling: Sampling,
        seed: int,
        between: Between = nothing_between,
    ) -> Drawn:
        """`num_answers` completions for each prompt, begun under the loaded version.

        After a `load` within `between` each further token is drawn from the new weights alone: what was kept of the old
        ones (keys, values) is made anew. A completion's `token_ids` includes the stop token when it was drawn.
        `logprobs` are of the distribution sampled from. Raises EngineError.
        """
        ...
