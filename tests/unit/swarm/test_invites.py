"""An invite is whole and checked, or refused with what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.errors import ConfigError
from p2prl.swarm.invites import parse_invite

PEER = "/ip4/127.0.0.1/tcp/4000/p2p/12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"
SWARM = "ab" * 32


def test_an_invite_gives_swarm_and_peers() -> None:
    invite = parse_invite(f"p2prl://{SWARM}?peer={PEER}&peer={PEER}")
    assert invite.swarm_id.hex() == SWARM
    assert invite.peers == (PEER, PEER)


@pytest.mark.parametrize(
    "text",
    [
        f"p2prl://{SWARM}",
        f"p2prl://{SWARM[:-1]}?peer={PEER}",
        f"http://{SWARM}?peer={PEER}",
        f"p2prl://{SWARM}?peer=/ip4/1.2.3.4",
        f"p2prl://{SWARM}?peer={PEER}&run=rm",
    ],
)
def test_a_bad_invite_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_invite(text)


@given(st.text())
def test_any_text_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_invite("p2prl://" + text)
