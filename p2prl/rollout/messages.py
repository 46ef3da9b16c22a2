"""What the daemon and its engine process say to each other (frames of `pipes.py`).

In: `Setup` once, then requests from the daemon. Out: `Ready` once, then one reply a request, told apart by id; a `Load`
overtakes `Generate`s that still wait. Inside one machine only.
"""

import msgspec

from p2prl.records import Completion, Sampling, Tokens, Version


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message. `engine`: "transformers" or "scripted" (a fake for tests and simulations)."""

    source: str
    models_cache: str
    stop_ids: tuple[int, ...]
    pad_id: int
    threads: int = 1
    engine: str = "transformers"


class Load(msgspec.Struct, frozen=True, tag=True):
    """Switch to the weights of the safetensors file at `path`."""

    id: int
    path: str
    version: Version


class Generate(msgspec.Struct, frozen=True, tag=True):
    id: int
    prompts: tuple[Tokens, ...]
    num_answers: int
    sampling: Sampling
    seed: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now; what still waits stays unanswered."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is up, no version loaded yet. `vocab_size`: ids from here on are no tokens of its model."""

    name: str
    vocab_size: int | None = None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    id: int
    version: Version


class Generated(msgspec.Struct, frozen=True, tag=True):
    """`completions[p][a]`: answer `a` to prompt `p`; `num_tokens` and `wall_s` of the whole request."""

    id: int
    completions: tuple[tuple[Completion, ...], ...]
    version: Version
    num_tokens: int
    wall_s: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request `id` failed; -1: the process can't start. `fatal`: this process is of no more use, restart it."""

    message: str
    id: int = -1
    fatal: bool = False


Request = Setup | Load | Generate | Stop
Reply = Ready | Loaded | Generated | Failed
