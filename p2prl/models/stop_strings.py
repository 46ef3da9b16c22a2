"""Where an answer ends by the recipe's stop strings, and which text of it counts: one rule for all who ask.

In: stop strings, a tokenizer, an answer's token ids. Out: whether its last token completes a stop string; whether it ends
as it says; its text.

The token that completes a stop string is the answer's last: it was drawn, so it is trained on, and its log-prob is there.
The text that rewards see ends with that stop string: it is in it, as a grader may look for the `</answer>` that an answer
stops at; what the same token holds beyond it is cut off.

A character may be spread over tokens (byte-level vocabularies) and a token's text may depend on its neighbours, so what
counts is the text of all tokens together. While an answer grows only its end is decoded, and only after a token that can
complete a stop string at all.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from p2prl.models.char_tokenizer import CharTokenizer
from p2prl.models.load import load_tokenizer

PARTIAL = "\ufffd"  # what bytes of an unfinished character decode to; no stop string holds it
_MARGIN = 4  # characters at a window's begin that may differ from the whole: a cut character, a space taken off

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    def __init__(self, strings: Sequence[str], decode: Decode, stop_ids: Sequence[int]) -> None:
        self.strings = tuple(strings)
        self._decode, self._stop_ids = decode, frozenset(stop_ids)
        self._longest = max(map(len, self.strings), default=0)
        self._last = frozenset(string[-1] for string in self.strings)
        self._text_lengths: dict[int, int] = {}  # of tokens that can complete one; 0: this one can't

    def text(self, token_ids: Sequence[int]) -> str:
        """The answer's text up to the end of its first stop string; all of it without one."""
        text = self._decode(token_ids)
        return text[: self._end(text)]

    def complete(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completes a stop string, in an answer that had none before it."""
        if not self.strings or not (length := self._text_length(token_ids[-1])):
            return False
        wanted, size = self._longest + length + _MARGIN, self._longest + 1 + _MARGIN
        while True:
            window = self._decode(token_ids[-size:])
            if size >= len(token_ids) or (len(window) >= wanted and window[0] != PARTIAL):
                break
            size *= 2  # tokens without text, or a begin within a character
        return self._end(window) is not None and self._end(self._decode(token_ids)) is not None

    def ends_as_said(self, token_ids: Sequence[int], finish_reason: str) -> bool:
        """Whether a whole answer goes on past no stop string, and says "stop" exactly where one, or an end token, is."""
        if not self.strings:
            return True
        if not token_ids or self._end(self._decode(token_ids[:-1])) is not None:
            return False
        stopped = token_ids[-1] in self._stop_ids or self._end(self._decode(token_ids)) is not None
        return finish_reason == ("stop" if stopped else "length")

    def _end(self, text: str) -> int | None:
        """Where the stop string ends that ends first."""
        return min((at + len(string) for string in self.strings if (at := text.find(string)) >= 0), default=None)

    def _text_length(self, token: int) -> int:
        """Characters of a token's own text; 0 where it can't complete a stop string. A leading space may be missing."""
        known = self._text_lengths.get(token)
        if known is None:
            text = self._decode((token,))
            able = " " in self._last or PARTIAL in text or not self._last.isdisjoint(text)
            known = self._text_lengths[token] = max(1, len(text)) if able else 0
        return known


def load_stop_strings(strings: Sequence[str], source: str, cache: Path, stop_ids: Sequence[int]) -> StopStrings:
    """For the tokenizer of a model source, which is loaded only where there are any."""
    tokenizer = load_tokenizer(source, cache) if strings else CharTokenizer()
    return StopStrings(strings, tokenizer.decode, stop_ids)
