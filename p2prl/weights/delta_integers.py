"""Whole numbers of any size as a symbol and a few plain bits.

In: numbers of 0 to 2**31 - 1 with a flag each (a sign, or anything that is skewed), and back. Out: symbols, bits.

A number below 8 is its own symbol. Of a larger one the symbol holds the length and the two bits below the first, like a
floating-point number; the bits below those are as good as random and are packed as they are, lowest bits of all first.
The highest bit of the symbol is the flag.
"""

import numpy as np

from p2prl.errors import BadRecord
from p2prl.weights.delta_entropy import take

MAX_NUMBER = 2**31 - 1
_EXACT = 8  # numbers below are symbols; 8 is the least of length 4
_MAX_SYMBOL = _EXACT + 4 * 28 - 1  # of length 31
_FLAG = np.uint8(128)
assert _MAX_SYMBOL < _FLAG


def symbols_of(numbers: np.ndarray, flags: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Symbols [N] uint8, and the plain bits."""
    doubles = numbers.astype(np.float64).view(np.uint64)  # exponent and mantissa are what a symbol is made of
    floating = (doubles >> np.uint64(50)).astype(np.int64) - ((1023 + 3) << 2) + _EXACT
    symbols = np.where(numbers < _EXACT, numbers, floating).astype(np.uint8)
    num_bits, planes = _num_bits(symbols), []
    for bit in range(int(num_bits.max(initial=0))):
        deep = num_bits > bit
        numbers, num_bits = numbers[deep], num_bits[deep]
        planes.append(np.packbits(((numbers >> bit) & 1).astype(np.uint8)).tobytes())
    return symbols | (flags.astype(np.uint8) << np.uint8(7)), b"".join(planes)


def numbers_of(symbols: np.ndarray, data: memoryview) -> tuple[np.ndarray, np.ndarray, memoryview]:
    """Numbers [N] int64, flags [N], and what follows the plain bits in `data`."""
    flags, symbols = symbols >= _FLAG, symbols & ~_FLAG
    if symbols.max(initial=0) > _MAX_SYMBOL:
        raise BadRecord("a delta holds a number that is too large; fetch it from another peer")
    num_bits = _num_bits(symbols).astype(np.int64)
    numbers = symbols.astype(np.int64)
    large = num_bits > 0
    numbers[large] = (4 + (numbers[large] & 3)) << num_bits[large]
    for bit in range(int(num_bits.max(initial=0))):
        places = np.flatnonzero(num_bits > bit)
        plane = take(data, -(-len(places) // 8))
        data = data[len(plane) :]
        numbers[places] |= np.unpackbits(np.frombuffer(plane, np.uint8), count=len(places)).astype(np.int64) << bit
    return numbers, flags, data


def _num_bits(symbols: np.ndarray) -> np.ndarray:
    """How many plain bits go with each symbol."""
    return np.where(symbols < _EXACT, np.uint8(0), (symbols - np.uint8(_EXACT)) // np.uint8(4) + np.uint8(1))
