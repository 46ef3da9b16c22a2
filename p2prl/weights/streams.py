"""One stream of pieces from a holder: what is still to come in it, and how long that takes.

In: what comes over it, monotonic seconds. Out: its speed, the seconds that it needs. Pure; holds no clock.
"""

from collections.abc import Collection

import msgspec

from p2prl.weights.messages import piece_bytes

LEAST_BYTES = 2**16  # what a stream that gave nothing yet is thought to give in the next moment
PAUSE_FACTOR = 3  # who pauses is expected to pause so much longer


class PieceStream(msgspec.Struct):
    peer: str
    expected: set[int]  # the current one too
    content_bytes: int
    started: float
    moved: float  # when the last byte came
    began: float = 0.0  # the current piece
    current: int | None = None
    num_bytes: int = 0  # of the current piece
    total_bytes: int = 0

    def heads(self, index: int, now: float) -> None:
        """A piece begins."""
        self.current, self.began, self.moved, self.num_bytes = index, now, now, 0

    def ends(self, now: float) -> int:
        """The current piece is here; which one that was."""
        index = self.current
        assert index is not None
        self.expected.discard(index)
        self.current, self.began, self.num_bytes = None, now, 0
        return index

    def next_of(self, missing: Collection[int]) -> int | None:
        """The piece that comes now, or is likely to; None when it is none that is missing."""
        if self.current is not None:
            return self.current if self.current in missing else None
        return min(self.expected.intersection(missing), default=None)

    def speed(self, now: float) -> float:
        """Bytes a second; while nothing came, what would come in the next moment."""
        return max(self.total_bytes, LEAST_BYTES) / max(now - self.started, 1e-3)

    def mean_speed(self, now: float) -> float:
        """Of all that came."""
        return self.total_bytes / max(now - self.started, 1e-6)

    def piece_left_s(self, index: int, now: float) -> float:
        """Until the current piece is here."""
        left = piece_bytes(self.content_bytes, index) - self.num_bytes
        elapsed_s = now - self.began
        return max(elapsed_s * left / max(self.num_bytes, LEAST_BYTES), PAUSE_FACTOR * (now - self.moved))

    def left_s(self, now: float) -> float:
        """Until all of it is here."""
        left = sum(piece_bytes(self.content_bytes, index) for index in self.expected) - self.num_bytes
        return max(left / self.speed(now), PAUSE_FACTOR * (now - self.moved))
