"""Which prompt a peer draws next: a lottery that everybody can check and nobody can steer.

In: the maker's peer id, the version its answers start under, its counter. Out: a prompt index.

Held-out indices (`HELD_OUT_FROM` and up) are never drawn: they are for evaluation alone.
"""

import struct

from blake3 import blake3

from p2prl.environments.registry import HELD_OUT_FROM
from p2prl.records import Version

_RULE = b"p2prl lottery 1\0"
_NUMBERS = struct.Struct("<QQQ")


def prompt_index(maker: str, version: Version, counter: int, num_prompts: int | None = None) -> int:
    """The index of the prompt, below `num_prompts` (None: as many as there are training indices)."""
    numbers = _NUMBERS.pack(version.term, version.step, counter)
    digest = blake3(_RULE + numbers + version.hash + maker.encode()).digest(length=16)
    return int.from_bytes(digest, "little") % min(num_prompts or HELD_OUT_FROM, HELD_OUT_FROM)
