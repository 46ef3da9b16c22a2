"""What the flow knows of tokenizers, and the one for Hugging Face folders.

In: a prompt's text. Out: token ids as the model was trained to see them, and text back from answers.

`hash` binds what must agree between a group's maker and its receivers: vocabulary, merges, special tokens, chat
template, the rules that join them, and how a probe text is really encoded. Library versions are not in it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from p2prl.errors import ConfigError

_RULE = "p2prl chat prompt 1: one user message, then the generation prompt"
_TURN_RULE = "p2prl chat turn 1: the answer as it was drawn, its end, one user message, the generation prompt"
_ANSWER = "p2prl-answer"  # stands for an answer in the template: what comes after it is a turn's beginning
_SAID = "p2prl-said"  # stands for what follows
_ROLES = ("user", "assistant", "user")
_PROBE = "State 12 + 7 = ?\n\tna\u00efve \u4f60\u597d  x"


class Tokenizer(Protocol):
    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def hash(self) -> bytes: ...

    def encode_prompt(self, text: str) -> list[int]:
        """Raises ConfigError for text that the model can't read."""
        ...

    def encode_turn(self, text: str, last: int) -> list[int]:
        """What follows an answer whose last token is `last`: its end where that is another, the user's `text`, and what
        an answer begins after. Raises ConfigError as `encode_prompt` does."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text without end and padding tokens; never raises on ids from a peer."""
        ...


class FolderTokenizer:
    """A Hugging Face folder's tokenizer; prompts go through its chat template where it has one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self._size = len(self._tokenizer)
        self.stop_ids: tuple[int, ...] = _stop_ids(folder, self._tokenizer)
        self._ends: list[str] = self._tokenizer.convert_ids_to_tokens(list(self.stop_ids))
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.stop_ids[0] if pad_id is None else pad_id
        self.hash: bytes = self._fingerprint(folder)

    def encode_prompt(self, text: str) -> list[int]:
        if not self._tokenizer.chat_template:
            return list(self._tokenizer(text)["input_ids"])
        messages = [{"role": "user", "content": text}]
        return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def encode_turn(self, text: str, last: int) -> list[int]:
        if not self._tokenizer.chat_template:
            return self._plain(f"\n{text}\n")
        after = self._after_answer(text)
        if last in self.stop_ids:  # the end is there, as drawn
            head = self._after_answer(_SAID).partition(_SAID)[0]  # not of `text`, which may look like an end
            first = min((end for end in self._ends if end in head), key=head.find, default="")
            if first == self._ends[self.stop_ids.index(last)]:  # after another end the template's own is still to come
                after = after[head.find(first) + len(first) :]
        return self._plain(after)

    def _after_answer(self, text: str) -> str:
        """What the chat template writes between an answer and the next one."""
        from jinja2 import TemplateError

        said = ("?", _ANSWER, text)
        messages = [{"role": role, "content": each} for role, each in zip(_ROLES, said, strict=True)]
        try:
            whole = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise ConfigError(
                f"the model's chat template can't take several turns: {error}; use another model"
            ) from None
        before, _, after = whole.partition(_ANSWER)
        if before == whole:
            raise ConfigError("the model's chat template leaves earlier answers out: no turns; use another model")
        return after

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        known = [token for token in ids if 0 <= token < self._size]
        return self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _fingerprint(self, folder: Path) -> bytes:
        parts = {
            "rule": _RULE,
            "vocabulary": sorted(self._tokenizer.get_vocab().items()),
            "merges": _merges(folder),
            "special": sorted(self._tokenizer.all_special_ids),
            "stop": self.stop_ids,
            "template": self._tokenizer.chat_template,
            "probe": self.encode_prompt(_PROBE),
            "turns": (_TURN_RULE, self._turn_probe()),
        }
        return blake3(json.dumps(parts, sort_keys=True).encode()).digest()

    def _turn_probe(self) -> list[list[int]]:
        """After an answer that ends with each end token, and after one without; [] where there are no turns."""
        try:
            return [self.encode_turn(_PROBE, last) for last in (*self.stop_ids, -1)]
        except ConfigError:
            return []


def _merges(folder: Path) -> list[str]:
    """A byte-pair model's merges in order; libraries write a merge as "a b" or as ["a", "b"]."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return []
    merges = json.loads(path.read_text(encoding="utf-8")).get("model", {}).get("merges", [])
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            eos = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            found |= {eos} if isinstance(eos, int) else set(eos or ())
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if not found:
        raise ConfigError(f"{folder} names no end-of-text token; set eos_token_id in its config.json")
    return tuple(sorted(found))
