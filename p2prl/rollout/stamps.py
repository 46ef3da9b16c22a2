"""Which version drew which token: run-length stamps while answers grow, and what a group of them says.

In: the version in use at each token. Out: segments; a group's versions, with its answers' segments pointing at them.

Invariants: segments cover the tokens exactly and neighbours differ; the first version is the one that all answers of a
request began under; a group names each version once and none that drew nothing, as admission demands.
"""

from collections.abc import Sequence

import msgspec

from p2prl.records import Completion, Segment, Version

MAX_VERSIONS = 64  # of one group, as `records.Group` has it: with so many no further change is taken in mid-answer


class Stamps:
    """Of one answer, or of answers that grow in step. `versions` is shared by all answers of a request."""

    def __init__(self, versions: list[Version]) -> None:
        self._versions = versions
        self._runs: list[tuple[int, int]] = []  # (place in versions, tokens)
        self.num_tokens = 0

    def add(self, version: Version, num_tokens: int = 1) -> None:
        """So many more tokens, drawn under `version`."""
        if num_tokens == 0:
            return
        if version not in self._versions:
            self._versions.append(version)
        place = self._versions.index(version)
        if self._runs and self._runs[-1][0] == place:
            self._runs[-1] = place, self._runs[-1][1] + num_tokens
        else:
            self._runs.append((place, num_tokens))
        self.num_tokens += num_tokens

    def segments(self, num_tokens: int) -> tuple[Segment, ...]:
        """Of the first `num_tokens` tokens."""
        found: list[Segment] = []
        left = num_tokens
        for place, length in self._runs:
            if left > 0:
                found.append(Segment(place, min(length, left)))
                left -= length
        assert left <= 0, "more tokens than were stamped"
        return tuple(found)


def of_group(
    versions: Sequence[Version], completions: Sequence[Completion]
) -> tuple[tuple[Version, ...], tuple[Completion, ...]]:
    """The versions that drew these answers, and the answers with segments that index them."""
    used = sorted({segment.version for completion in completions for segment in completion.segments})
    if used == list(range(len(versions))):
        return tuple(versions), tuple(completions)
    places = {place: number for number, place in enumerate(used)}
    return tuple(versions[place] for place in used), tuple(
        msgspec.structs.replace(
            completion,
            segments=tuple(msgspec.structs.replace(part, version=places[part.version]) for part in completion.segments),
        )
        for completion in completions
    )
