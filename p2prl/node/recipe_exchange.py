"""A recipe from the swarm itself: served to whoever knows its hash, fetched by whoever has only an invite.

In: an invite, our identity. Out: the recipe's text, whose swarm id is the invite's.

Invariants: what a peer sends is used only when it hashes to the invite's swarm id; 60 s without an answer is exit 75,
and that it is waited for is said when the first try has failed.
"""

import asyncio
from collections.abc import Callable

from p2prl import recipe as recipes
from p2prl.errors import ConfigError, PeerError, SwarmUnreachable, Unreachable, WrongSwarm
from p2prl.node.membership_loop import CHECK
from p2prl.node.state import NodeState
from p2prl.paths import Home
from p2prl.swarm.invites import Invite
from p2prl.swarm.transport import Transport

METHOD = "p2prl/recipe"
PATIENCE_S = 60.0
RETRY_S = 2.0


def serve_recipe(state: NodeState, text: str) -> None:
    """Answer with our recipe when it is the one asked for, else with nothing."""

    async def answer(peer: str, body: bytes) -> bytes:
        return text.encode() if body == state.swarm else b""

    state.transport.serve(METHOD, answer)


def known_recipe(invite: Invite, home: Home) -> str | None:
    """The text of a recipe on this disk with the invite's swarm id."""
    texts = [text for found in recipes.available((home.recipes,)).values() for text in found]
    last = home.state / "last-recipe.toml"
    if last.is_file():
        texts.append(last.read_text("utf-8"))
    for text in texts:
        try:
            if recipes.parse(text, "a recipe").swarm_id == invite.swarm_id:
                return text
        except ConfigError:
            continue  # a broken recipe of another swarm is no reason not to join this one
    return None


async def fetch_recipe(
    transport: Transport, invite: Invite, say: Callable[[str], None], patience_s: float = PATIENCE_S
) -> str:
    """Ask the invite's peers until one serves the recipe. Raises ConfigError for a wrong one, SwarmUnreachable."""
    await transport.start()
    failure = ""
    try:
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    return await _ask_each(transport, invite)
                except PeerError as error:
                    if not failure:
                        say(f"nobody gave the recipe yet ({error}); trying for {patience_s:.0f} s: {CHECK}")
                    failure = str(error)
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise SwarmUnreachable(
            f"nobody gave the recipe of swarm {invite.swarm_id.hex()[:8]} in {patience_s:.0f} s "
            f"({failure or 'none of its peers answers'}). Check the connection, or try again later"
        ) from None
    finally:
        await transport.stop()


async def _ask_each(transport: Transport, invite: Invite) -> str:
    """The recipe from the first peer that has it; raises the last one's PeerError."""
    failure = Unreachable("none of its peers answers")
    for report in await transport.join(invite.peers):
        if not report.peer:
            failure = Unreachable(f"{report.address}: {report.error}")
            continue
        try:
            body = await transport.call(report.peer, METHOD, invite.swarm_id)
        except PeerError as error:
            failure = error
            continue
        if not body:
            failure = WrongSwarm(f"{report.peer} is in another swarm")
            continue
        text = body.decode("utf-8", "replace")
        if recipes.parse(text, f"the recipe from {report.peer}").swarm_id != invite.swarm_id:
            raise ConfigError(
                f"{report.peer} serves a recipe that is not the invite's ({invite.swarm_id.hex()[:8]}): "
                "don't join through it; ask for another invite"
            )
        return text
    raise failure
