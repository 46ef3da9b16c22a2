"""Each fault of hivemind shown on its own code, kept as it was; then the repaired behaviour."""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.utils.timed_storage import TimedStorage

from p2prl.errors import PreflightFailed
from p2prl.swarm.libp2p import faults
from p2prl.swarm.libp2p.transport import Libp2pTransport

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")  # hivemind, on Python 3.11
EVICTED = """
import sys, time
from p2prl.swarm.libp2p import faults
from hivemind.utils.timed_storage import TimedStorage
if sys.argv[1] == "repaired":
    faults.install()
storage, now = TimedStorage(), time.time()
storage.store("key", "new", now + 60)
storage.store("key", "old", now + 0.05)
time.sleep(0.1)
print(storage.get("key"))
"""


@pytest.mark.parametrize(("state", "survives"), [("as shipped", False), ("repaired", True)])
def test_a_refused_older_record_evicted_the_newer(state: str, survives: bool) -> None:
    done = subprocess.run([sys.executable, "-c", EVICTED, state], capture_output=True, text=True, check=True)
    assert ("new" in done.stdout) == survives


def test_install_is_idempotent_and_knows_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install()
    store = TimedStorage.store
    faults.install()
    assert TimedStorage.store is store
    monkeypatch.setattr(faults, "version", lambda name: "1.2.0")
    with pytest.raises(PreflightFailed, match=r"1\.2\.0"):
        faults.install()


def test_a_key_holds_a_bounded_dictionary() -> None:
    faults.install()
    held, now = DictionaryDHTValue(), time.time()
    for index in range(faults.MAX_SUBKEYS):
        assert held.store(index, b"", now + 60)
    assert not held.store("one more", b"", now + 60)
    assert held.store(0, b"newer", now + 61)


async def test_an_over_long_reply_is_an_error(make: Callable[..., Awaitable[Libp2pTransport]]) -> None:
    async def long(data: bytes, remote: object) -> bytes:
        return bytes(5 * 2**20)

    server = await make()
    client = await make(server)
    await server._up().p2p._client.add_unary_handler("long", long)
    call = client._up().p2p._client.call_unary_handler(server._up().p2p.peer_id, "long", b"")
    with pytest.raises(P2PHandlerError, match="exceeds"):
        await asyncio.wait_for(call, 5)


async def test_a_dead_control_connection_fails_calls(make: Callable[..., Awaitable[Libp2pTransport]]) -> None:
    transport = await make()
    control = transport._up().p2p._client.control
    peer = transport._up().p2p.peer_id
    await transport.stop()
    with pytest.raises(P2PDaemonError):
        await asyncio.wait_for(control.call_unary_handler(peer, "x", b""), 2)
