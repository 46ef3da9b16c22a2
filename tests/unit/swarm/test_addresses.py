"""Addresses: what is accepted, and that a refusal says why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.errors import ConfigError
from p2prl.identity import Identity
from p2prl.swarm import addresses

PEER = Identity.from_seed(bytes(32)).peer_id
OTHER = Identity.from_seed(bytes(31) + b"\1").peer_id


@pytest.mark.parametrize("host", ["/ip4/203.0.113.7", "/ip6/2001:db8::1", "/dns/node.example", "/dns4/node.example"])
def test_a_direct_address_is_canonical(host: str) -> None:
    text = f"{host}/tcp/7001/p2p/{PEER}"
    assert addresses.check(text) == text
    assert addresses.check(addresses.check(text)) == text
    assert addresses.peer_of(text) == PEER
    assert addresses.tcp_endpoint(text) == (host.split("/")[2], 7001)


def test_a_relayed_address_leads_to_the_peer_behind_it() -> None:
    text = f"/ip4/203.0.113.7/tcp/7001/p2p/{OTHER}/p2p-circuit/p2p/{PEER}"
    assert addresses.peer_of(text) == PEER
    assert addresses.is_relayed(text)
    assert addresses.tcp_endpoint(text) == ("203.0.113.7", 7001)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must begin with"),
        ("garbage", "unknown protocol"),
        ("/unix/a", "must begin with"),
        ("/ip4/300.1.1.1/tcp/1", "not IPv4"),
        (f"/ip4/1.2.3.4/udp/7001/p2p/{PEER}", "needs /tcp"),
        (f"/ip4/1.2.3.4/tcp/0/p2p/{PEER}", "port 0"),
        ("/ip4/1.2.3.4/tcp/7001", "lacks the peer's id"),
        (f"/ip4/1.2.3.4/tcp/7001/ws/p2p/{PEER}", "is known"),
        ("/ip4/1.2.3.4/tcp/7001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "not an Ed25519"),
        ("/ip4/1.2.3.4/tcp/7001/p2p/" + "x" * 600, "longer than"),
        ("/dns/n\u00f6de/tcp/1", "ASCII"),
    ],
)
def test_a_wrong_address_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        addresses.check(text)
    assert "Example: " in str(refused.value)


def test_loopback() -> None:
    assert addresses.is_loopback("127.0.0.1") and addresses.is_loopback("::1") and addresses.is_loopback("localhost")
    assert addresses.is_loopback(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}")
    assert not addresses.is_loopback("0.0.0.0") and not addresses.is_loopback("node.example")


@given(st.text(max_size=80) | st.text("/ip4tcdnsp2.0:", max_size=40))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        address = addresses.check(text)
    except ConfigError:
        return
    assert addresses.check(address) == address
