"""What the daemon and its engine process say to each other (frames of `pipes.py`).

In: `Setup` once, then requests from the daemon. Out: `Ready` once, then one reply a request, told apart by id, and
`Beat`s while it works. A `Load` overtakes `Generate`s that still wait, and is done between two tokens of those in work.
Inside one machine only.
"""

import msgspec

from p2prl.models.lora_rule import Lora
from p2prl.records import Completion, Sampling, Tokens, Version
from p2prl.rollout.plan import Plan


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message. `engine`: "auto", "transformers", "vllm" or "scripted" (a fake for tests and simulations).

    `lora`: versions are adapters on the source's weights; None: whole weights. `adapters`: how vLLM gets them, "merged" or
    by "name". `device` "cuda": the GPU that was used before must still be there. `group_size`, `max_new_tokens` and
    `most_batch_tokens` are for the plan of memory. `stop`: the stop strings that every `Generate` has.
    """

    source: str
    models_cache: str
    stop_ids: tuple[int, ...]
    pad_id: int
    threads: int = 1
    engine: str = "transformers"
    lora: Lora | None = None
    adapters: str = "merged"
    device: str = "auto"
    dtype: str = "auto"
    group_size: int = 8
    max_new_tokens: int = 256
    most_batch_tokens: int = 0
    stop: tuple[str, ...] = ()


class Load(msgspec.Struct, frozen=True, tag=True):
    """Switch to the weights of the safetensors file at `path`."""

    id: int
    path: str
    version: Version


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Draw under `version`: the prompts follow from it. Nothing is begun while another one is loaded."""

    id: int
    version: Version
    prompts: tuple[Tokens, ...]
    num_answers: int
    sampling: Sampling
    seed: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now; what still waits stays unanswered."""


class Planned(msgspec.Struct, frozen=True, tag=True):
    """What is about to be loaded, before `Ready`; again, with a lower `batch_tokens`, when memory ran out. No reply."""

    plan: Plan
    id: int = -1


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is up, no version loaded yet. `vocab_size`: ids from here on are no tokens of its model.

    `num_answers`: it works on so many at once, of any number of requests; 0: on one request after the other. `context`:
    the longest prompt and answer together; None: any.
    """

    name: str
    vocab_size: int | None = None
    num_answers: int = 0
    context: int | None = None


class Loaded(msgspec.Struct, frozen=True, tag=True):
    id: int
    version: Version


class Generated(msgspec.Struct, frozen=True, tag=True):
    """`completions[p][a]`: answer `a` to prompt `p`; none where `p` was not begun before another version was loaded.

    Segments index `versions`, the first of which was asked for. `num_tokens` and `wall_s` are of the whole request.
    """

    id: int
    completions: tuple[tuple[Completion, ...], ...]
    versions: tuple[Version, ...]
    num_tokens: int
    wall_s: float


class Outdated(msgspec.Struct, frozen=True, tag=True):
    """Nothing was begun: `version` is loaded, another one was asked for. Draw prompts for it and ask again."""

    id: int
    version: Version


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life from the work on request `id`; no reply."""

    id: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request `id` failed; -1: the process can't start. `fatal`: this process is of no more use, restart it."""

    message: str
    id: int = -1
    fatal: bool = False


Request = Setup | Load | Generate | Stop
Reply = Planned | Ready | Loaded | Generated | Outdated | Beat | Failed
