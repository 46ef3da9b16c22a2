"""How far a peer's groups are to be trusted: the mean of a beta distribution over its verdicts.

In: verdicts with their time. Out: a standing per peer, a score in (0, 1), whether to take anything from it.

Invariants: only what an honest node never does counts against a peer (a late group is no fault); old verdicts fade, so
that a repaired node comes back by itself; pure: a standing goes in, a standing comes out.
"""

import msgspec

PRIOR_GOOD, PRIOR_BAD = 4.0, 1.0
HALF_LIFE_S = 3600.0
QUARANTINE_BELOW = 0.4

# Lateness, races and forks happen to honest peers; being in quarantine must not prolong it.
INNOCENT = frozenset({"too_old", "unknown_version", "duplicate", "quarantined"})
# Can't happen without intent or a broken node: rewards that weren't earned, prompts that weren't drawn.
GRAVE = frozenset({"wrong_reward", "wrong_prompt", "bad_lottery", "counter_reused", "wrong_maker"})
GRAVE_WEIGHT = 4.0
# Beyond doubt: whatever it did well before, quarantine.
PROVEN = frozenset({"unlikely_draws"})
PROVEN_SCORE = 0.25


class Standing(msgspec.Struct, frozen=True):
    """Faded counts as of `at` (unix seconds)."""

    good: float = 0.0
    bad: float = 0.0
    at: float = 0.0


def judged(standing: Standing, admitted: bool, reason: str, now: float) -> Standing:
    """The standing after one more verdict."""
    good, bad = _faded(standing, now)
    if admitted:
        good += 1.0
    elif reason in PROVEN:
        bad = max(bad, (PRIOR_GOOD + good) / PROVEN_SCORE - PRIOR_GOOD - PRIOR_BAD - good)
    elif reason not in INNOCENT:
        bad += GRAVE_WEIGHT if reason in GRAVE else 1.0
    return Standing(good, bad, max(now, standing.at))


def score(standing: Standing, now: float) -> float:
    """Expected share of good groups: .8 for a stranger."""
    good, bad = _faded(standing, now)
    return (PRIOR_GOOD + good) / (PRIOR_GOOD + PRIOR_BAD + good + bad)


def quarantined(standing: Standing, now: float) -> bool:
    """Whether to take nothing from this peer for now."""
    return score(standing, now) < QUARANTINE_BELOW


def _faded(standing: Standing, now: float) -> tuple[float, float]:
    left = 0.5 ** (max(0.0, now - standing.at) / HALF_LIFE_S)
    return standing.good * left, standing.bad * left
