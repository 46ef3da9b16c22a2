"""Contents that somebody takes from us now: kept for those who are slower than new versions come.

In: what was sent of which content, monotonic seconds. Out: the contents to keep. Pure; holds no clock.

Invariants: after its last byte went out one is kept for as long again as it was taken, `least_s` to `most_s`: whoever is
quick needs it no more, whoever is slow asks others meanwhile, or applies what it has. Nobody makes us keep one for longer
than `longest_s` in a row; the table is bounded. Bytes are bounded by the owner's budget (`chain.py`).
"""

from collections import OrderedDict

import msgspec

from p2prl.records import Hash

MAX_CONTENTS = 256


class PulledRules(msgspec.Struct, frozen=True):
    least_s: float = 5.0
    most_s: float = 120.0
    longest_s: float = 24 * 3600.0


class _Row(msgspec.Struct):
    began: float
    last: float


class Pulled:
    def __init__(self, rules: PulledRules | None = None) -> None:
        self._rules = rules or PulledRules()
        self._rows: OrderedDict[Hash, _Row] = OrderedDict()  # the longest unasked first

    def took(self, content: Hash, now: float) -> None:
        """Some of it went out."""
        row = self._rows.pop(content, None)
        goes_on = row is not None and now <= self._until(row)
        self._rows[content] = _Row(row.began if row is not None and goes_on else now, now)
        if len(self._rows) > MAX_CONTENTS:
            self._rows.popitem(last=False)

    def now(self, now: float) -> frozenset[Hash]:
        """What to keep."""
        rows = self._rows.items()
        return frozenset(
            content for content, row in rows if now <= self._until(row) and now - row.began <= self._rules.longest_s
        )

    def _until(self, row: _Row) -> float:
        return row.last + min(max(row.last - row.began, self._rules.least_s), self._rules.most_s)
