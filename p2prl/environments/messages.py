"""What the daemon and its environment process say to each other (frames of `pipes.py`).

In: requests from the daemon. Out: `Ready` once, then one reply a request, in order. Inside one machine only.
"""

import msgspec

from p2prl.records import Hash, Prompt


class PromptsRequest(msgspec.Struct, frozen=True, tag=True):
    id: int
    indices: tuple[int, ...]


class JudgeItem(msgspec.Struct, frozen=True, array_like=True):
    """A group to judge: are these the prompt's tokens, and what are its answers worth?

    `finishes`: the answers' finish reasons, to be checked where the recipe has stop strings or turns; () to leave that out.
    `runs`: of each answer, as in `conversation`; () where all have one turn.
    """

    index: int
    prompt_ids: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    finishes: tuple[str, ...] = ()
    runs: tuple[tuple[int, ...], ...] = ()


class TurnItem(msgspec.Struct, frozen=True, array_like=True):
    """An answer so far, which ended with an end token or a stop string: what does the environment say to it?"""

    index: int
    token_ids: tuple[int, ...]
    runs: tuple[int, ...]


class TurnsRequest(msgspec.Struct, frozen=True, tag=True):
    id: int
    items: tuple[TurnItem, ...]


class TextsRequest(msgspec.Struct, frozen=True, tag=True):
    """The texts of an answer's parts, drawn, given, drawn, ..., to be shown: what rewards see, or was said."""

    id: int
    parts: tuple[tuple[int, ...], ...]


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


class TurnsReply(msgspec.Struct, frozen=True, tag=True):
    """What an answer is given before its next turn, up to where that begins; () where it is over."""

    id: int
    items: tuple[tuple[int, ...], ...]


class TextsReply(msgspec.Struct, frozen=True, tag=True):
    id: int
    texts: tuple[str, ...]


class Judgement(msgspec.Struct, frozen=True, array_like=True):
    """`rewards` and `details` are as long as the item's answers, also when the prompt is wrong.

    `bad_finish`: the first answer that does not end as it says; `bad_turns`: the first whose turns are not what the
    environment makes of them; -1: none. `too_slow`: judging all of them took longer than a group may.
    """

    prompt_ok: bool
    rewards: tuple[float, ...]
    details: tuple[str, ...]
    bad_finish: int = -1
    bad_turns: int = -1
    too_slow: bool = False

    @property
    def refused(self) -> bool:
        """Whatever its answers are worth."""
        return self.bad_finish >= 0 or self.bad_turns >= 0 or self.too_slow


class JudgeReply(msgspec.Struct, frozen=True, tag=True):
    id: int
    items: tuple[Judgement, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request `id` can't be answered; id -1: the process can't start (its last message)."""

    message: str
    id: int = -1


Request = PromptsRequest | JudgeRequest | TurnsRequest | TextsRequest
Reply = Ready | PromptsReply | JudgeReply | TurnsReply | TextsReply | Failed
