"""Whether a maker drew its answers from what it says it drew them from: a test that staleness can't fool.

In: log importance ratios of a maker's answers, in the order they were trained on. Out: whether it is beyond belief.

However stale the sampler q and whatever the policy p, E_q[p(y) / q(y)] <= 1 for an answer y drawn from q: the ratio is a
bet at fair odds against "the claimed log-probs are those it was drawn by". The statistic is the Shiryaev-Roberts sum of
such bets begun at every answer, R_n = (1 + R_{n-1}) w_n. An honest maker's passes LIMIT on average once in LIMIT answers
at most (Shin, Ramdas and Rinaldo, arXiv 2203.03532, e-SR); somebody who claims to have drawn what nobody draws, to swamp
the effective sample size with one weight, passes it with its first answers.

That holds for all answers of a maker. Of those that are trained on, the short ones of a slow maker come in time more often
than the long ones, and the policy may have moved towards them: MARGIN an answer forgives that, and what an engine rounds.

Invariants: bounded; a ratio that is not finite counts as none; honest answers, whose ratios are small as a rule, buy no
credit for false ones.
"""

import math
from collections.abc import Sequence

LOG_LIMIT = math.log(1e9)
MARGIN = 0.1
MAX_MAKERS = 4096


class Claims:
    """Of each maker, the statistic so far."""

    def __init__(self) -> None:
        self._statistics: dict[str, float] = {}

    def drew(self, maker: str, log_ratios: Sequence[float]) -> bool:
        """Whether the maker's claims are beyond belief after these answers; it is then judged from the start again."""
        statistic = after(self._statistics.pop(maker, -math.inf), log_ratios)
        if statistic > LOG_LIMIT:
            return True
        if len(self._statistics) >= MAX_MAKERS:
            del self._statistics[min(self._statistics, key=self._statistics.__getitem__)]
        self._statistics[maker] = statistic
        return False


def after(log_statistic: float, log_ratios: Sequence[float]) -> float:
    """The log of R after these answers; -inf before the first."""
    for log_ratio in log_ratios:
        if math.isfinite(log_ratio):
            log_statistic = _log1p_exp(log_statistic) + log_ratio - MARGIN
    return log_statistic


def _log1p_exp(value: float) -> float:
    return value if value > 40.0 else math.log1p(math.exp(value))
