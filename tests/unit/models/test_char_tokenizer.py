import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.errors import ConfigError
from p2prl.models.char_tokenizer import ALPHABET, END_ID, PAD_ID, VOCAB_SIZE, CharTokenizer


@given(st.text(ALPHABET))
def test_round_trip(text: str) -> None:
    tokenizer = CharTokenizer()
    ids = tokenizer.encode_prompt(text)
    assert tokenizer.decode([*ids, END_ID, PAD_ID]) == text
    assert not {PAD_ID, END_ID} & set(ids)


@given(st.lists(st.integers(-(2**40), 2**40)))
def test_any_ids_are_decoded(ids: list[int]) -> None:
    kept = [token for token in ids if token not in (PAD_ID, END_ID)]
    assert len(CharTokenizer().decode(ids)) == len(kept)
    assert CharTokenizer().decode([VOCAB_SIZE]) == "\ufffd"


def test_an_unknown_character_is_named() -> None:
    with pytest.raises(ConfigError, match="'x'"):
        CharTokenizer().encode_prompt("47+x=")


def test_ids_and_hash_are_pinned() -> None:
    tokenizer = CharTokenizer()
    assert tokenizer.encode_prompt("47+85=") == [6, 9, 12, 10, 7, 15]
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ((1,), 0)
    assert tokenizer.hash.hex() == "f7817f91c7dea1330d560bfaf20218f4063d7ffa4e08e3c6a02a53a85951867e"
