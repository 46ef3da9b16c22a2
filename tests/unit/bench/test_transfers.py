"""The figures of a transfer follow from what was measured; the proxy delays and loses nothing."""

import asyncio
import os

import msgspec
import pytest

from p2prl.bench import delay_proxy, transfers
from p2prl.bench.transfers import Capped, Faults, Measured


def measured() -> Measured:
    """Three rounds, each on a machine twice as slow as the one before."""
    rates = {"raw": 400.0, "1": 320.0, "2": 300.0, "4": 200.0, "disk": 500.0}
    rounds = tuple({name: rate / slow for name, rate in rates.items()} for slow in (1, 2, 4))
    capped = Capped(20.0, 76.0, (0.001,) * 90 + (0.05,) * 10)
    cpu = ({"raw": 0.5, "1": 1.0},) * 3
    return Measured(2**28, rounds, cpu, capped, Capped(20.0, 30.0, (0.1,)), Faults(40.0, (1,), True))


def test_a_busy_machine_slows_both_sides() -> None:
    short = transfers.short(measured())
    assert short["one_over_raw"] == pytest.approx(0.8)
    assert short["one_over_raw_cpu"] == pytest.approx(2.0)
    assert short["holders_mib_s"] == {"1": 160.0, "2": 150.0, "4": 100.0}
    assert short["capped"]["four_over_one"] == pytest.approx(3.8)


def test_each_figure_has_its_target() -> None:
    met = {figure.name: figure.met for figure in transfers.figures(measured())}
    assert met == {
        "one_holder_over_raw": True,
        "four_capped_over_one": True,
        "four_delayed_over_one": False,
        "call_while_four_send": True,
        "with_faults": None,
    }


@pytest.mark.parametrize("faults", [Faults(40.0, (0, 1), True), Faults(40.0, (), True), Faults(40.0, (1,), False)])
def test_blame_on_the_wrong_one_makes_the_figure_worthless(faults: Faults) -> None:
    found = transfers.figures(msgspec.structs.replace(measured(), faults=faults))
    assert [figure.broken != "" for figure in found] == [False] * 4 + [True]


async def test_the_proxy_delays_both_ways_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delay_proxy, "ONE_WAY_S", 0.1)
    data = os.urandom(3_000_000)

    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while received := await reader.read(2**16):
            writer.write(received)
            await writer.drain()
        writer.close()

    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(mirror, "127.0.0.1", 0)
    proxy = await delay_proxy.serve(server.sockets[0].getsockname()[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.sockets[0].getsockname()[1])
    began = loop.time()
    writer.write(data[:1])
    assert await reader.readexactly(1) == data[:1]
    assert loop.time() - began >= 0.2
    writer.write(data[1:])
    writer.write_eof()
    assert await reader.read() == data[1:]
    writer.close()
    for each in (proxy, server):
        each.close()
        await each.wait_closed()
