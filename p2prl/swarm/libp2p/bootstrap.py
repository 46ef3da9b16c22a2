"""Joining: addresses to connections and routing tables, with a verdict for each.

In: addresses. Out: JoinReports. Each address has its own short deadlines and all are tried at once, so that silent ones
cost a second together; p2pd itself would try them one after another and exit when none answers.
"""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
from collections.abc import Sequence

from hivemind.dht.routing import DHTID

from p2prl.errors import ConfigError
from p2prl.swarm import addresses
from p2prl.swarm.libp2p.session import NETWORK_ERRORS, Session, peer_bytes
from p2prl.swarm.transport import JoinReport

PROBE_S, DIAL_S, PING_S, TABLES_S = 1.0, 8.0, 4.0, 5.0


async def join(session: Session, texts: Sequence[str]) -> list[JoinReport]:
    reports = await asyncio.gather(*(_join(session, text) for text in texts))
    if any(report.peer for report in reports):
        own = session.node.node_id
        # Tasks, not a plain await: what is late goes on in the background.
        await asyncio.wait({asyncio.ensure_future(_tables(session, own))}, timeout=TABLES_S)
    return list(reports)


async def _tables(session: Session, own: DHTID) -> None:
    try:
        await asyncio.wait_for(session.node.find_nearest_nodes([own]), TABLES_S)
    except NETWORK_ERRORS:
        return


async def _join(session: Session, text: str) -> JoinReport:
    try:
        address = addresses.check(text)
    except ConfigError as error:
        return JoinReport(text, error=str(error))
    peer = addresses.peer_of(address)
    if peer == str(session.p2p.peer_id):
        return JoinReport(text, error="this is our own address")
    endpoint = addresses.tcp_endpoint(address)
    if endpoint is not None and (error := await _probe(*endpoint)):
        return JoinReport(text, error=error)
    try:
        await session.dial(address, DIAL_S)
    except TimeoutError:
        return JoinReport(text, error=f"the port is open but no libp2p answered within {DIAL_S:g} s")
    except NETWORK_ERRORS as error:
        return JoinReport(
            text,
            error=f"the port is open but {peer} did not answer there: {str(error)[:160]}",
        )
    try:
        node_id = await asyncio.wait_for(session.node.protocol.call_ping(peer_bytes(peer)), PING_S)
    except NETWORK_ERRORS:
        node_id = None
    if node_id is None:
        return JoinReport(
            text,
            error="connected, but its directory did not answer: busy, or no p2prl node",
        )
    return JoinReport(text, peer=peer)


async def _probe(host: str, port: int) -> str:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_S)
    except TimeoutError:
        return f"no TCP answer from {host} port {port} within {PROBE_S:g} s"
    except OSError as error:
        return f"can't connect to {host} port {port}: {error.strerror or error}"
    writer.close()
    return ""
