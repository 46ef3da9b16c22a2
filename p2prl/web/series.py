"""Numbers over time for the plots: recorded as rows, asked for as columns.

In: `record(now, values)` about once a second or step. Out: columns of at most `points` rows, averaged here so that an
open page costs next to nothing. Bounded: when full, the older half is thinned to every second row.
"""

import math
from collections.abc import Mapping

MAX_ROWS = 8192


class Series:
    """Rows of (unix time, name -> value); names may come and go."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        assert max_rows >= 4
        self._max_rows = max_rows
        self._rows: list[tuple[float, dict[str, float]]] = []

    def record(self, now: float, values: Mapping[str, float]) -> None:
        self._rows.append((now, {name: float(value) for name, value in values.items() if math.isfinite(value)}))
        if len(self._rows) > self._max_rows:
            half = len(self._rows) // 2
            self._rows = self._rows[:half:2] + self._rows[half:]

    def columns(self, names: tuple[str, ...], since: float, points: int) -> dict[str, list[float | None]]:
        """Rows since unix time `since` in at most `points` buckets of equal count; None where a name has no value."""
        rows = [row for row in self._rows if row[0] >= since]
        size = max(1, -(-len(rows) // max(1, points)))
        buckets = [rows[start : start + size] for start in range(0, len(rows), size)]
        columns: dict[str, list[float | None]] = {"t": [bucket[-1][0] for bucket in buckets]}
        for name in names:
            columns[name] = [_mean([values[name] for _, values in bucket if name in values]) for bucket in buckets]
        return columns


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
