"""What the daemon and its environment process say to each other (frames of `pipes.py`).

In: requests from the daemon. Out: `Ready` once, then one reply a request, in order. Inside one machine only.
"""

import msgspec

from p2prl.records import Hash, Prompt


class PromptsRequest(msgspec.Struct, frozen=True, tag=True):
    id: int
    indices: tuple[int, ...]


class JudgeItem(msgspec.Struct, frozen=True, array_like=True):
    """A group to judge: are these the prompt's tokens, and what are its answers worth?"""

    index: int
    prompt_ids: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]


class JudgeRequest(msgspec.Struct, frozen=True, tag=True):
    id: int
    items: tuple[JudgeItem, ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first message: the environment and the tokenizer are loaded."""

    tokenizer_hash: Hash
    environment_version: str
    num_prompts: int | None
    stop_ids: tuple[int, ...]
    pad_id: int


class PromptsReply(msgspec.Struct, frozen=True, tag=True):
    id: int
    prompts: tuple[Prompt, ...]


class Judgement(msgspec.Struct, frozen=True, array_like=True):
    """`rewards` and `details` are as long as the item's answers, also when the prompt is wrong."""

    prompt_ok: bool
    rewards: tuple[float, ...]
    details: tuple[str, ...]


class JudgeReply(msgspec.Struct, frozen=True, tag=True):
    id: int
    items: tuple[Judgement, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request `id` can't be answered; id -1: the process can't start (its last message)."""

    message: str
    id: int = -1


Request = PromptsRequest | JudgeRequest
Reply = Ready | PromptsReply | JudgeReply | Failed
