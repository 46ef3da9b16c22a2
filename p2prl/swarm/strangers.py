"""Whether the bootstraps lead into this swarm at all.

In: what answered at each address at the start. Out: the sentence to stop with, or "".

Invariants: a bootstrap that is down stops nobody (the right swarm may be behind it), nor do wrong ones beside a right
one; a node without bootstraps begins a swarm and is never stopped.
"""

from collections.abc import Iterable

import msgspec


class Answer(msgspec.Struct, frozen=True):
    """One address that was dialled: the swarm and recipe that answered, `swarm` None when nothing did."""

    address: str
    swarm: bytes | None = None
    recipe: str = ""


def wrong_network(answers: Iterable[Answer], bootstraps: Iterable[str], own: bytes, recipe: str) -> str:
    """`bootstraps` are those that the user named; `answers` may be of addresses remembered from earlier runs too."""
    swarms = {answer.address: answer for answer in answers}
    named = [swarms.get(address, Answer(address)) for address in dict.fromkeys(bootstraps)]
    if not named or any(answer.swarm is None for answer in named):
        return ""
    if any(answer.swarm == own for answer in swarms.values()):
        return ""
    first = named[0]
    assert first.swarm is not None
    every = "the bootstrap is" if len(named) == 1 else f"all {len(named)} bootstraps are"
    return (
        f"wrong network: {every} in another swarm, as {first.address}: recipe {first.recipe[:64]!r} "
        f"({first.swarm.hex()[:8]}), this node's is {recipe!r} ({own.hex()[:8]}). "
        "Check the address, or run the recipe of that swarm: an invite has both"
    )
