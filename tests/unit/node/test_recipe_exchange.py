"""A recipe by invite: what is said while nobody answers, and from whom it is taken."""

import asyncio

import async_solipsism
import pytest

from p2prl.errors import ConfigError, SwarmUnreachable
from p2prl.node.recipe_exchange import METHOD, fetch_recipe
from p2prl.recipe import find
from p2prl.swarm.invites import Invite
from p2prl.swarm.memory_transport import MemoryNetwork

RECIPE, TEXT = find("addition")
_, OTHER = find("school-maths")
PEER = "/memory/p2p/host"


def fetched(*replies: bytes, at_s: float = 0.0) -> tuple[str, list[tuple[float, str]]]:
    """(the recipe, what was said and when) from a host that is up from `at_s` on, in its turn with each reply."""
    said: list[tuple[float, str]] = []

    async def program() -> str:
        network, loop = MemoryNetwork(1), asyncio.get_running_loop()
        begun, left = loop.time(), list(replies)

        async def host() -> None:
            await asyncio.sleep(at_s)
            transport = network.transport("host")

            async def answer(peer: str, body: bytes) -> bytes:
                assert body == RECIPE.swarm_id
                return left.pop(0)

            transport.serve(METHOD, answer)
            await transport.start()

        hosting = asyncio.create_task(host())
        try:
            return await fetch_recipe(
                network.transport("guest"),
                Invite(RECIPE.swarm_id, (PEER,)),
                lambda text: said.append((loop.time() - begun, text)),
            )
        finally:
            hosting.cancel()
            await asyncio.wait([hosting])

    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        return runner.run(program()), said


def test_a_host_that_answers_is_no_news() -> None:
    assert fetched(TEXT.encode(), at_s=-1.0) == (TEXT, [])


def test_that_nobody_answers_yet_is_said_once_and_soon() -> None:
    text, said = fetched(TEXT.encode(), at_s=30.0)
    assert text == TEXT
    ((at_s, line),) = said
    assert at_s < 10.0
    assert line.startswith(f"nobody gave the recipe yet ({PEER}: no answer from this address); trying for 60 s: check")


def test_after_a_minute_it_is_given_up() -> None:
    with pytest.raises(SwarmUnreachable, match="in 60 s .*no answer from this address.*try again later"):
        fetched(at_s=1000.0)


def test_a_host_of_another_swarm_may_yet_come_to_this_one() -> None:
    text, said = fetched(b"", b"", TEXT.encode(), at_s=-1.0)
    assert text == TEXT and [line.split(";")[0] for _, line in said] == [
        "nobody gave the recipe yet (host is in another swarm)"
    ]


def test_another_recipe_than_the_invites_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not the invite's"):
        fetched(OTHER.encode(), at_s=-1.0)
