"""What follows an answer, so that all tokens together are those of the whole conversation, encoded at once."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from p2prl.errors import ConfigError
from p2prl.models.char_tokenizer import END_ID, CharTokenizer
from p2prl.models.tokenizer import FolderTokenizer

WORDS = ["pad", "<|end|>", "user", "bot", "one", "two", "unk", "be", "brief", "<|eos|>"]
CHATML = (
    "be brief <|end|>{% for message in messages %} {{ 'bot' if message['role'] == 'assistant' else 'user' }} "
    "{{ message['content'] | trim }} <|end|>{% endfor %}{% if add_generation_prompt %} bot {% endif %}"
)
ONE_MESSAGE = (
    "{% if messages | length > 1 %}{{ raise_exception('only one message') }}{% endif %}"
    "user {{ messages[0]['content'] }}"
)
FORGETS = "{{ messages[-1]['content'] }} bot"


def made(folder: Path, template: str | None) -> FolderTokenizer:
    backend = Backend(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="unk"))
    backend.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="pad", unk_token="unk",
        additional_special_tokens=["<|eos|>"],
    )  # fmt: skip
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 9]}')
    return FolderTokenizer(folder)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def test_turns_are_those_of_the_whole_conversation(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, CHATML)
    whole = ids("be brief <|end|> user one <|end|> bot two one <|end|> user two <|end|> bot")
    so_far = [*tokenizer.encode_prompt("one"), *ids("two one")]
    assert [*so_far, 1, *tokenizer.encode_turn("two", 1)] == whole
    assert [*so_far, *tokenizer.encode_turn("two", 4)] == whole, "it ended at a stop string: the end is given"


def test_after_another_end_token_the_turn_is_closed_as_the_template_does(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, CHATML)
    so_far = [*tokenizer.encode_prompt("one"), *ids("two one <|eos|>")]
    assert [*so_far, *tokenizer.encode_turn("two", 9)] == ids(
        "be brief <|end|> user one <|end|> bot two one <|eos|> <|end|> user two <|end|> bot"
    )


def test_two_ends_of_a_template_are_both_there_whichever_was_drawn(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, CHATML.replace("trim }} <|end|>", "trim }} <|end|> <|eos|>"))
    assert tokenizer.encode_turn("two", 1) == ids("<|eos|> user two <|end|> <|eos|> bot")
    assert tokenizer.encode_turn("two", 9) == ids("<|end|> <|eos|> user two <|end|> <|eos|> bot")


def test_what_follows_each_end_token_is_in_the_hash(tmp_path: Path) -> None:
    class Open(FolderTokenizer):
        def encode_turn(self, text: str, last: int) -> list[int]:
            return super().encode_turn(text, 1 if last == 9 else last)

    assert made(tmp_path, CHATML).hash != Open(tmp_path).hash


@pytest.mark.parametrize("text", ["<|end|> one", "p2prl-answer <|end|>", "", "user", "end", "|"])
def test_whatever_is_said_only_the_answers_own_end_is_left_out(tmp_path: Path, text: str) -> None:
    tokenizer = made(tmp_path, CHATML)
    assert [1, *tokenizer.encode_turn(text, 1)] == tokenizer.encode_turn(text, 4)


def test_without_a_template_a_line_is_said(tmp_path: Path) -> None:
    assert made(tmp_path, None).encode_turn("two", 1) == ids("two")
    assert CharTokenizer().encode_turn("1+2=", END_ID) == CharTokenizer().encode_prompt("1+2=")


@pytest.mark.parametrize(
    ("template", "message"), [(ONE_MESSAGE, "can't take several turns: only one message"), (FORGETS, "leaves earlier")]
)
def test_a_template_of_one_message_is_a_sentence_and_fine_for_one_turn(
    tmp_path: Path, template: str, message: str
) -> None:
    tokenizer = made(tmp_path, template)
    assert tokenizer.encode_prompt("one")
    with pytest.raises(ConfigError, match=message):
        tokenizer.encode_turn("two", 1)
