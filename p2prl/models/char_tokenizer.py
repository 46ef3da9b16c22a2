"""The built-in policy's tokenizer: one token per character, no torch.

In: text over a small alphabet. Out: token ids, and text back.

Ids 0 and 1 are padding and the end of an answer; the rest are `ALPHABET` in order. Changing any of it changes
`CharTokenizer.hash`, and so the swarm's id.
"""

from collections.abc import Sequence

from blake3 import blake3

from p2prl.errors import ConfigError

ALPHABET = "0123456789+-*= "
VOCAB_SIZE = 2 + len(ALPHABET)
PAD_ID = 0
END_ID = 1

_RULE = b"p2prl char tokenizer 1\0"


class CharTokenizer:
    """Implements `models.tokenizer.Tokenizer`."""

    stop_ids: tuple[int, ...] = (END_ID,)
    pad_id: int = PAD_ID

    def __init__(self) -> None:
        self.hash: bytes = blake3(_RULE + ALPHABET.encode()).digest()
        self._id_of = {character: 2 + position for position, character in enumerate(ALPHABET)}

    def encode_prompt(self, text: str) -> list[int]:
        unknown = next((character for character in text if character not in self._id_of), None)
        if unknown is not None:
            raise ConfigError(
                f"the built-in policy can't read {unknown!r}: it knows only the characters {ALPHABET!r}; "
                "use the built-in `addition` environment with it, or another model"
            )
        return [self._id_of[character] for character in text]

    def encode_turn(self, text: str, last: int) -> list[int]:
        """The text alone: this policy knows of no speakers."""
        return self.encode_prompt(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without padding and end tokens; an id outside the vocabulary gives U+FFFD."""
        kept = (token for token in ids if token not in (PAD_ID, END_ID))
        return "".join(ALPHABET[token - 2] if 2 <= token < VOCAB_SIZE else "\ufffd" for token in kept)
