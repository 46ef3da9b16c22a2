"""How long a transfer must wait to keep within a rate that its owner may change at any time.

In: bytes about to move, monotonic seconds. Out: seconds to wait first.

Invariants: over any stretch of t seconds at one rate, at most burst + rate * t bytes are let through; waits are handed
out in the order of asking; nothing is refused: what is larger than the burst waits its time.
"""


class Bandwidth:
    """A token bucket with debt. `rate` in bytes a second, None for no limit; the burst is `burst_s` of it."""

    def __init__(self, rate: float | None, now: float, *, burst_s: float = 1.0) -> None:
        if burst_s <= 0:
            raise ValueError(f"burst_s is {burst_s}, it must be positive")
        self._burst_s = burst_s
        self._rate = _checked(rate)
        self._at = now
        self._tokens = self._burst()

    @property
    def rate(self) -> float | None:
        return self._rate

    def take(self, num_bytes: int, now: float) -> float:
        """Reserve `num_bytes`; send them after so many seconds."""
        if self._rate is None:
            return 0.0
        self._fill(now)
        self._tokens -= num_bytes
        return max(0.0, -self._tokens / self._rate)

    def set_rate(self, rate: float | None, now: float) -> None:
        """From now on. Debt stays, in bytes: waits already handed out are not told again."""
        self._fill(now)
        before, self._rate = self._rate, _checked(rate)
        self._tokens = self._burst() if before is None else min(self._tokens, self._burst())

    def wait_s(self, now: float) -> float:
        """What a transfer that comes now would wait: how far the line is behind."""
        if self._rate is None:
            return 0.0
        self._fill(now)
        return max(0.0, -self._tokens / self._rate)

    def give_back(self, num_bytes: int) -> None:
        """Bytes that were reserved and not sent."""
        self._tokens = min(self._tokens + num_bytes, self._burst())

    def _burst(self) -> float:
        return 0.0 if self._rate is None else self._rate * self._burst_s

    def _fill(self, now: float) -> None:
        if self._rate is not None and now > self._at:
            self._tokens = min(self._tokens + (now - self._at) * self._rate, self._burst())
        self._at = max(self._at, now)


def _checked(rate: float | None) -> float | None:
    if rate is not None and not rate > 0:
        raise ValueError(f"the rate is {rate}, it must be positive, or None for no limit")
    return rate
