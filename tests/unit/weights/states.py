"""State files of any kind for tests of deltas: their words, and words as a step leaves them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from p2prl.models.state import BF16, Payload, state_hash, write_payloads

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    content: bytes


def bf16(values: np.ndarray) -> np.ndarray:
    """Words of float32 values, cut off."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def weights(num: int, seed: int, scale: float = 0.05) -> np.ndarray:
    """Words of normal weights, one in fifty zero, as a quantised model has them."""
    source = np.random.default_rng(seed)
    values = source.normal(scale=scale, size=num)
    values[source.random(num) < 0.02] = 0.0
    return bf16(values)


def stepped(words: np.ndarray, seed: int, rate: float = 1e-6) -> np.ndarray:
    """What a step of this rate makes of bf16 words: most stay."""
    source = np.random.default_rng(seed)
    values = (words.astype("<u4") << 16).view("<f4").astype(np.float64)
    lost = source.random(len(words)) * np.spacing(np.abs(values).astype(np.float32)) * 2**16  # what rounding took off
    return bf16(values + np.sign(values) * lost + rate * source.normal(size=len(words)))


def write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """In the order given, as any writer might; returns the state hash."""
    tree: dict = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for name, (dtype, shape, content) in tensors.items():
        tree[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + len(content)]}
        begin += len(content)
    head = json.dumps(tree).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(tensor.content for tensor in tensors.values()))
    return state_hash(path)


def write_words(path: Path, tensors: Mapping[str, np.ndarray]) -> bytes:
    """bf16 tensors as the learner writes them; returns the state hash."""
    return write_payloads(
        path,
        [Payload(name, words.shape, lambda words=words: words.reshape(-1).data) for name, words in tensors.items()],
    )


def tensor(words: np.ndarray, dtype: str = BF16) -> Tensor:
    num = words.nbytes // BYTES[dtype]
    return Tensor(dtype, (num,), words.tobytes()[: num * BYTES[dtype]])
