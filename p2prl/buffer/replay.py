"""Which admitted groups the next step trains on.

In: the admitted groups that no step has used, their ages, the time. Out: the ids of a batch (or none yet), and what is
too old to be of use.

Invariants: makers take turns, each with its youngest first, so that a peer whose groups all grew old while others' are
fresh is not left waiting, idle, until they are too old; a batch has at most `groups_per_step` groups, each once; at most
half of it is one peer's when three or more have groups to give; none is older than `max_age`. The order of the entries
does not matter.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from p2prl.recipe import Recipe
from p2prl.records import Group

CAPPED_FROM_MAKERS = 3


class Entry(msgspec.Struct, frozen=True):
    """An admitted group. `age`: of its youngest version, None when that is no longer known."""

    id: bytes
    maker: str
    age: int | None
    admitted_at: float


class ReplayRules(msgspec.Struct, frozen=True):
    groups_per_step: int
    longest_wait_s: float
    max_age: int


class Choice(msgspec.Struct, frozen=True):
    """`batch` is empty while waiting for more; `dropped` can never be trained on again; `wait_s` until the next try."""

    batch: tuple[bytes, ...]
    dropped: tuple[bytes, ...]
    wait_s: float


def rules_of(recipe: Recipe) -> ReplayRules:
    learner = recipe.learner
    return ReplayRules(learner.groups_per_step, learner.longest_wait_s, learner.max_age)


def choose(entries: Iterable[Entry], now: float, rules: ReplayRules, *, since: float = float("-inf")) -> Choice:
    """A full batch at once; a smaller one when `longest_wait_s` has passed.

    The wait counts from the oldest usable group's admission, but from `since` (the last step's end) at the earliest.
    """
    unique = {entry.id: entry for entry in entries}.values()
    dropped = tuple(sorted(entry.id for entry in unique if entry.age is None or entry.age > rules.max_age))
    usable = [entry for entry in unique if entry.age is not None and entry.age <= rules.max_age]
    if not usable:
        return Choice((), dropped, rules.longest_wait_s)
    usable.sort(key=lambda entry: (entry.age, -entry.admitted_at, entry.id))
    batch = _fair(_in_turns(usable), rules.groups_per_step)
    waited_s = now - max(since, min(entry.admitted_at for entry in usable))
    if len(batch) < rules.groups_per_step and waited_s < rules.longest_wait_s:
        return Choice((), dropped, min(rules.longest_wait_s, rules.longest_wait_s - waited_s))
    return Choice(tuple(entry.id for entry in batch), dropped, 0.0)


def _in_turns(ordered: list[Entry]) -> list[Entry]:
    """The first of each maker, then the second of each; within a turn as they were."""
    given: Counter[str] = Counter()
    turns: list[tuple[int, Entry]] = []
    for entry in ordered:
        turns.append((given[entry.maker], entry))
        given[entry.maker] += 1
    return [entry for _, entry in sorted(turns, key=lambda turn: turn[0])]


def _fair(ordered: list[Entry], limit: int) -> list[Entry]:
    """The first `limit` of them, at most half from one maker when there are three makers or more."""
    makers = {entry.maker for entry in ordered}
    if len(makers) < CAPPED_FROM_MAKERS:
        return ordered[:limit]
    cap = max(1, limit // 2)
    taken: Counter[str] = Counter()
    batch: list[Entry] = []
    for entry in ordered:
        if taken[entry.maker] < cap and len(batch) < limit:
            taken[entry.maker] += 1
            batch.append(entry)
    (busiest, most), *_ = taken.most_common(1)
    surplus = most - max(1, len(batch) - most)
    if surplus <= 0:
        return batch
    # The others gave less than half: this maker's oldest wait for the next step.
    kept = [entry for entry in batch if entry.maker == busiest][:-surplus]
    return [entry for entry in batch if entry.maker != busiest or entry in kept]


def age_quantiles(groups: Sequence[Group], ages: Sequence[Sequence[int]], shares: Sequence[float]) -> tuple[float, ...]:
    """Ages in versions that these shares of all drawn tokens don't exceed; `ages[g][v]` of `groups[g].versions[v]`."""
    tokens: Counter[int] = Counter()
    for group, of_versions in zip(groups, ages, strict=True):
        for trajectory in group.trajectories:
            for segment in trajectory.completion.segments:
                tokens[of_versions[segment.version]] += segment.num_tokens * segment.drawn
    total, found = sum(tokens.values()), []
    for share in shares:
        below = 0
        for age in sorted(tokens):
            below += tokens[age]
            if below >= share * total:
                found.append(float(age))
                break
    return tuple(found) or (0.0,) * len(shares)
