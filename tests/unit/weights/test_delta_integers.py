import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import BadRecord
from p2prl.weights.delta_integers import MAX_NUMBER, numbers_of, symbols_of

any_number = st.one_of(
    st.integers(0, MAX_NUMBER), st.integers(0, 20), st.integers(0, 31).map(lambda bit: min(2**bit, MAX_NUMBER))
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(any_number, st.booleans()), max_size=60))
def test_numbers_and_flags_survive_the_trip(pairs: list[tuple[int, bool]]) -> None:
    given_numbers = np.array([number for number, _ in pairs], np.int64)
    given_flags = np.array([flag for _, flag in pairs], bool)
    symbols, bits = symbols_of(given_numbers, given_flags)
    found, flags, rest = numbers_of(symbols, memoryview(bits + b"next"))
    assert found.tolist() == given_numbers.tolist()
    assert flags.tolist() == given_flags.tolist()
    assert bytes(rest) == b"next"


def test_a_symbol_holds_small_numbers_whole_and_three_digits_of_larger_ones() -> None:
    symbols, bits = symbols_of(np.array([0, 7, 8, 9, 10, 15, 16, 2**20]), np.zeros(8, bool))
    assert symbols.tolist() == [0, 7, 8, 8, 9, 11, 12, 8 + 4 * 17]
    assert len(bits) == 1 + 17  # the lowest bits of all but 0 and 7 share a byte


def test_numbers_past_the_largest_are_refused() -> None:
    with pytest.raises(BadRecord):
        numbers_of(np.array([127], np.uint8), memoryview(bytes(100)))


def test_missing_bits_are_refused() -> None:
    numbers = np.arange(0, 10**6, 999)
    symbols, bits = symbols_of(numbers, numbers < 0)
    for length in range(0, len(bits), 50):
        with pytest.raises(BadRecord):
            numbers_of(symbols, memoryview(bits[:length]))
