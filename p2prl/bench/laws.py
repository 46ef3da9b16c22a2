"""How many versions late a group comes: a fixed age, or the delay laws of the GEPO paper.

In: a law's name, the age asked for, a share in (0, 1). Out: delays in ticks (one tick is one optimiser step), and for
each tick under which tick's weights each of its groups was drawn.

The paper (arXiv 2508.17850) draws network delays from a log-normal or a Weibull law whose 99.5 % interval is 60 to
1920 s, and clamps them to it. The same shapes here, stretched so that the mean is the age asked for; only that ratio of
the bounds, 32, says how spread the delays are. Its authors subtract one minute more from each draw: left out.

Invariants: a delay follows from law, age and share alone, a schedule from law, age and seed, whatever is trained; no
group is drawn under weights that don't exist yet (from tick 0 on, the version is max(0, tick - delay)).
"""

import math
import struct
from statistics import NormalDist

from blake3 import blake3

from p2prl.errors import ConfigError

LAWS = ("fixed", "lognormal", "weibull")
BOUNDS_RATIO = 1920 / 60
CONFIDENCE = 0.995

_TAIL = (1 - CONFIDENCE) / 2
_SIGMA = math.log(BOUNDS_RATIO) / (2 * NormalDist().inv_cdf(1 - _TAIL))
_SHAPE = math.log(math.log(_TAIL) / math.log1p(-_TAIL)) / math.log(BOUNDS_RATIO)


def delay(law: str, age: int, share: float) -> int:
    """Ticks; `share` of all delays are shorter."""
    if law not in LAWS:
        raise ConfigError(f"there is no delay law {law!r}; there are: {', '.join(LAWS)}")
    if age == 0 or law == "fixed":
        return age
    share = min(max(share, _TAIL), 1 - _TAIL)  # clamps the delay to the law's bounds
    if law == "lognormal":
        return round(age * math.exp(_SIGMA * NormalDist().inv_cdf(share) - _SIGMA**2 / 2))
    scale = age / math.gamma(1 + 1 / _SHAPE)
    return round(scale * (-math.log1p(-share)) ** (1 / _SHAPE))


def share_of(seed: int, tick: int, slot: int) -> float:
    """A number in (0, 1) that looks random and is the same wherever it is asked for."""
    digest = blake3(b"p2prl delay 1\0" + struct.pack("<QQQ", seed, tick, slot)).digest(length=8)
    return (int.from_bytes(digest, "little") + 0.5) / 2**64


def schedule(law: str, age: int, seed: int, num_ticks: int, num_groups: int) -> tuple[tuple[int, ...], ...]:
    """`[tick][slot]`: the tick whose weights draw this group of `tick`'s batch."""
    return tuple(
        tuple(max(0, tick - delay(law, age, share_of(seed, tick, slot))) for slot in range(num_groups))
        for tick in range(num_ticks)
    )


def drawn_at(plan: tuple[tuple[int, ...], ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """`[tick]`: which (tick, slot) of the schedule are drawn under this tick's weights, in order."""
    found: list[list[tuple[int, int]]] = [[] for _ in plan]
    for tick, origins in enumerate(plan):
        for slot, origin in enumerate(origins):
            found[origin].append((tick, slot))
    return tuple(map(tuple, found))
