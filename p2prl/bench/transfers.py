"""How fast a version comes from its holders: how near to the bare stream from one, what more of them, a long line and
faults make of it. No torch.

In: nothing. Out: what was measured, its figures, the section `transfer` of `p2prl bench weights`.

Four holders, a fetcher and a proxy that delays, each a process of its own, on loopback; 256 MiB, verified and on the disk.

Invariant: a ratio is the median of ratios within a round, so that a busy machine slows both sides.
"""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from p2prl.bench.figures import Figure, quantile, spread
from p2prl.bench.processes import Processes
from p2prl.swarm.addresses import tcp_endpoint

VERSION_MIB, QUICK_MIB = 256, 64
NUM_HOLDERS = 4
LIAR = 1  # the holder that serves false bytes
CAP_MIB_S, DELAY_MS = 20, 100
OF_RAW, CAPPED_RATIO, DELAYED_RATIO, PING_S = 0.7, 3.5, 2.0, 0.1


class Capped(msgspec.Struct, frozen=True):
    """Each holder under a cap: MiB a second from one and from four; small calls to them while four sent."""

    one: float
    four: float
    pings_s: tuple[float, ...]


class Faults(msgspec.Struct, frozen=True):
    """One of four capped holders lies and one is killed: MiB a second, the numbers of those blamed."""

    rate: float
    blamed: tuple[int, ...]
    killed: bool


class Measured(msgspec.Struct, frozen=True):
    """`rounds`: MiB a second of the bare stream ("raw"), from "1", "2" and "4" holders, of a plain write to the "disk".

    `cpu_s` of both ends, for the bare stream and for one holder.
    """

    bytes: int
    rounds: tuple[dict[str, float], ...]
    cpu_s: tuple[dict[str, float], ...]
    capped: Capped
    delayed: Capped
    faults: Faults


def measure(say: Callable[[str], None], version_mib: int = VERSION_MIB) -> Measured:
    """Two minutes; whatever happens, no process and no file is left."""
    processes = Processes()
    try:
        say(f"transfer: {NUM_HOLDERS} holders of {version_mib} MiB start")
        with (processes.root / "version").open("wb") as file:
            for _ in range(version_mib):
                file.write(os.urandom(2**20))
        for _ in range(NUM_HOLDERS):
            processes.background("p2prl.bench.transfer_holder")
        told = [json.loads((processes.root / f"holder{number}.json").read_text()) for number in range(NUM_HOLDERS)]
        endpoints = [tcp_endpoint(holder["address"]) for holder in told]
        ports = [endpoint[1] for endpoint in endpoints if endpoint is not None]
        (processes.root / "targets.json").write_text(json.dumps(ports))
        processes.background("p2prl.bench.delay_proxy")
        return msgspec.convert(processes.child("p2prl.bench.transfer_fetcher"), Measured)
    finally:
        processes.close()


def figures(measured: Measured) -> list[Figure]:
    what = f"{measured.bytes / 2**20:.0f} MiB, verified and on the disk, over loopback"
    of_raw, pings = _ratios(measured, "1"), measured.capped.pings_s
    return [
        Figure(
            name="one_holder_over_raw",
            value=quantile(of_raw, 0.5),
            unit="x",
            how=f"{what}, from one holder by the bare stream's rate; median of rounds",
            reference=_median(measured, "raw"),
            reference_how="MiB/s of hivemind's bare stream between the same two processes, nothing verified or stored",
            target=OF_RAW,
            at_least=True,
            num_samples=len(of_raw),
            details=spread(of_raw)
            | {
                "mib_s": _median(measured, "1"),
                "cpu_of_raw": _cpu_ratio(measured),
                "plain_write_mib_s": _median(measured, "disk"),
            },
        ),
        _more("four_capped_over_one", measured.capped, CAPPED_RATIO, f"{what}; each holder sends {CAP_MIB_S} MiB/s"),
        _more(
            "four_delayed_over_one",
            measured.delayed,
            DELAYED_RATIO,
            f"{what}; each holder sends {CAP_MIB_S} MiB/s over a line with {DELAY_MS} ms there and back",
        ),
        Figure(
            name="call_while_four_send",
            value=quantile(pings, 0.95),
            unit="s",
            how="95th percentile of small calls to the holders during that capped transfer from four",
            target=PING_S,
            num_samples=len(pings),
            details=spread(pings),
        ),
        Figure(
            name="with_faults",
            value=measured.faults.rate,
            unit="MiB/s",
            how=f"{what}; of four capped holders one lies and one is killed in mid transfer",
            reference=measured.capped.four,
            reference_how="four that are well",
            broken=_what_went_wrong(measured.faults),
        ),
    ]


def short(measured: Measured) -> dict[str, Any]:
    """The report's section `transfer`: the figures under plain names."""
    return {
        "version_bytes": measured.bytes,
        "raw_mib_s": _median(measured, "raw"),
        "plain_write_mib_s": _median(measured, "disk"),
        "holders_mib_s": {name: _median(measured, name) for name in ("1", "2", "4")},
        "one_over_raw": quantile(_ratios(measured, "1"), 0.5),
        "one_over_raw_cpu": _cpu_ratio(measured),
        "cap_mib_s": CAP_MIB_S,
        "capped": _of(measured.capped),
        "delay_ms": DELAY_MS,
        "delayed": _of(measured.delayed),
        "faults": {"mib_s": measured.faults.rate, "wrong": _what_went_wrong(measured.faults)},
    }


def _of(capped: Capped) -> dict[str, float]:
    return {
        "one_mib_s": capped.one,
        "four_mib_s": capped.four,
        "four_over_one": capped.four / capped.one,
        "call_p50_s": quantile(capped.pings_s, 0.5),
        "call_p95_s": quantile(capped.pings_s, 0.95),
    }


def _more(name: str, capped: Capped, target: float, how: str) -> Figure:
    return Figure(
        name=name,
        value=capped.four / capped.one,
        unit="x",
        how=f"{how}: from four holders by from one",
        reference=capped.one,
        reference_how="MiB/s from one holder",
        target=target,
        at_least=True,
        details={"four_mib_s": capped.four},
    )


def _what_went_wrong(faults: Faults) -> str:
    if not faults.killed:
        return "the transfer ended before a holder could be killed"
    return "" if faults.blamed == (LIAR,) else f"blamed were the holders {faults.blamed}, and only {LIAR} lied"


def _ratios(measured: Measured, name: str) -> Sequence[float]:
    return [rates[name] / rates["raw"] for rates in measured.rounds]


def _cpu_ratio(measured: Measured) -> float:
    """CPU seconds of both ends, from one holder, by the bare stream's."""
    return quantile([cpu["1"] / cpu["raw"] for cpu in measured.cpu_s], 0.5)


def _median(measured: Measured, name: str) -> float:
    return quantile([rates[name] for rates in measured.rounds], 0.5)
