"""The rule for stop strings, with tokenizers whose characters are spread over tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from p2prl.models.char_tokenizer import END_ID, CharTokenizer
from p2prl.models.stop_strings import StopStrings, load_stop_strings

END, EMPTY, BYTES = 300, 301, range(256)
WORDS = ["<answer>", "</ans", "wer>", "wer>\n", "</answer>", "> \u4f60", "\u597d", " a"]
FIRST_WORD = 302


def decode(ids: Sequence[int]) -> str:
    """Bytes and whole words; the end token and another have no text."""
    words = {FIRST_WORD + place: word.encode() for place, word in enumerate(WORDS)}
    return b"".join(words.get(token, bytes([token]) if token in BYTES else b"") for token in ids).decode(
        "utf-8", "replace"
    )


def stops(*strings: str) -> StopStrings:
    return StopStrings(strings, decode, (END,))


def word(text: str) -> int:
    return FIRST_WORD + WORDS.index(text)


def test_the_token_that_completes_a_stop_string_is_the_last() -> None:
    found = stops("</answer>")
    ids = [word("<answer>"), ord("4"), ord("2"), word("</ans"), word("wer>\n")]
    assert [found.complete(ids[: n + 1]) for n in range(5)] == [False] * 4 + [True]
    assert found.text(ids) == "<answer>42</answer>"  # with the stop string, without what its token holds beyond
    assert found.ends_as_said(ids, "stop") and not found.ends_as_said(ids, "length")
    assert found.text(ids[:4]) == "<answer>42</ans"
    assert found.ends_as_said(ids[:4], "length") and not found.ends_as_said(ids[:4], "stop")


def test_an_answer_goes_on_past_no_stop_string() -> None:
    found, ids = stops("</answer>"), [word("</answer>"), ord("!")]
    assert not any(found.ends_as_said(ids, reason) for reason in ("stop", "length"))
    assert not found.ends_as_said([*ids, END], "stop")
    assert not found.ends_as_said([word("</answer>"), END], "stop")
    assert found.ends_as_said([ord("!"), END], "stop") and not found.ends_as_said([ord("!"), END], "length")
    assert not found.ends_as_said([], "stop")


def test_the_stop_string_that_ends_first_counts() -> None:
    assert stops("bcd", "bc", "d").text(list(b"abcd")) == "abc"
    assert stops("bcd", "bc").complete(list(b"abc")) and not stops("bcd").complete(list(b"abc"))


def test_a_character_of_many_bytes_is_complete_with_its_last() -> None:
    found, ids = stops("\u4f60"), list("x\u4f60".encode())
    assert [found.complete(ids[: n + 1]) for n in range(4)] == [False, False, False, True]
    later = stops(">")  # the first byte of the next character hides nothing
    assert later.complete([*ids, ord(">")]) and later.text([*ids, ord(">"), 0xE4]) == "x\u4f60>"


def test_tokens_without_text_between_hide_nothing() -> None:
    ids = [*b"</answer", *[EMPTY] * 200, ord(">")]
    assert stops("</answer>").complete(ids) and not stops("</answer>").complete(ids[:-1])


def test_without_stop_strings_the_text_is_all_of_it() -> None:
    none = stops()
    assert none.text(list(b"a</answer>b")) == "a</answer>b"
    assert not none.complete([65]) and none.ends_as_said([65], "length") and none.ends_as_said([], "stop")


TOKENS = st.lists(
    st.sampled_from([*b"</answer>ab ", 0xE4, 0xBD, 0xA0, 0xFF, EMPTY, *range(FIRST_WORD, FIRST_WORD + len(WORDS))]),
    min_size=1,
    max_size=60,
)
KNOWN = ["</answer>", "a", " ", "er>", "\u4f60", "\u597d", "ab", "> "]
STRINGS = st.lists(st.sampled_from(KNOWN) | st.text("ab<\u4f60", min_size=1, max_size=4), min_size=1, max_size=3)


@given(TOKENS, STRINGS)
def test_the_end_found_while_it_grows_is_that_of_the_whole(ids: list[int], strings: list[str]) -> None:
    found = stops(*strings)
    grown = next((n for n in range(1, len(ids) + 1) if found.complete(ids[:n])), None)
    whole = next((n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in strings)), None)
    assert grown == whole
    kept = ids[:grown]
    assert found.ends_as_said(kept, "stop" if grown else "length")
    text = found.text(kept)
    assert decode(kept).startswith(text)
    assert any(text.endswith(string) for string in strings) if grown else text == decode(kept)


@pytest.mark.parametrize("run", [1, 30])
def test_bytes_that_decode_only_together_are_looked_at_together(run: int) -> None:
    """As Llama 2's byte tokens: a run of them is text, or none of it is; a window that cuts one must not hide its end."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<0x00>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # pyright: ignore[reportAttributeAccessIssue]
    found = StopStrings(("\n",), lambda ids: backend.decode(list(ids)), ())
    ids = [*("\u4f60" * run).encode(), 10]
    assert [n for n in range(1, len(ids) + 1) if found.complete(ids[:n])] == [len(ids)]
    broken = [0xFF, *ids]
    assert not found.complete(broken) and found.ends_as_said(broken, "length")


def test_they_come_with_the_models_tokenizer(tmp_path) -> None:
    found = load_stop_strings(("=",), "builtin:addition", tmp_path, (END_ID,))
    ids = CharTokenizer().encode_prompt("1+1=2")
    assert found.text(ids) == "1+1=" and found.complete(ids[:4])
    assert load_stop_strings((), "folder:/nowhere", tmp_path, ()).strings == ()
