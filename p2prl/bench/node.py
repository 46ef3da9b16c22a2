"""How fast a node is: every figure of `p2prl bench node`, each with its reference from the same run.

In: how to read a daemon's status. Out: `Figure`s; progress. It starts real daemons on loopback in temporary homes.

One thing is measured at a time; what else the machine did shows in its load average, in the report.
"""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from p2prl.bench import commands
from p2prl.bench.figures import Figure, quantile, spread
from p2prl.bench.processes import Cost, Processes, cost
from p2prl.errors import P2prlError
from p2prl.status import LagStatus, Status

READ_S = 0.3
START_S = 90.0
WINDOW_S = 33.0  # more than the half minute that a daemon keeps lags of
BUSY_FROM_STEP = 2
MB = 1e6
Read = Callable[[Path], Status | None]
Say = Callable[[str], None]


def measure(read: Read, say: Say) -> list[Figure]:
    """All figures; whatever happens, no process and no file is left."""
    processes = Processes()
    try:
        quiet, idle_lag = _quiet(processes, read, say)
        return [
            *quiet,
            _busy(processes, read, say, idle_lag),
            *_network(processes, say),
            *_generation(processes, say),
        ]
    finally:
        processes.close()


def machine() -> dict[str, Any]:
    """Where and under which load; taken before and after."""
    return {"cores": os.cpu_count(), "load": [round(load, 2) for load in os.getloadavg()], "python": _python()}


# -- a daemon with nothing to do --------------------------------------------------------------------------------------


def _quiet(processes: Processes, read: Read, say: Say) -> tuple[list[Figure], LagStatus]:
    say("two relays and a bare hivemind node start")
    first = processes.daemon("relay0", "relay")
    status = _wait(processes, "relay0", first, read, lambda status: status.state.now == "working")
    second = processes.daemon("relay1", "relay", status.swarm.addresses[:1])
    _wait(processes, "relay1", second, read, lambda status: status.swarm.peers_alive > 0)
    bare = processes.background("p2prl.bench.bare_hivemind")
    home = processes.root / "relay1"
    say(f"commands: {commands.NUM_ROUNDS} rounds")
    found = commands.measure(home)
    say(f"an idle daemon: {WINDOW_S:.0f} s")
    before, before_bare = cost(second.pid), cost(bare.pid)
    time.sleep(WINDOW_S)
    after, after_bare = cost(second.pid), cost(bare.pid)
    status = read(home)
    processes.end(second, first, bare)
    if status is None:
        raise P2prlError("the idle daemon did not answer")
    found += [_memory(after, after_bare), _idle_cpu(before, after, before_bare, after_bare)]
    return found, status.lag


def _memory(ours: Cost, bare: Cost) -> Figure:
    torch = any("libtorch" in path for path in ours.mapped)
    return Figure(
        name="idle_memory",
        value=ours.rss_bytes / MB,
        unit="MB",
        how="RSS of the daemon's whole tree with p2pd, role relay, joined to one peer; pages that processes of the tree "
        f"share count for each. torch is {'' if torch else 'not '}mapped in it",
        reference=bare.rss_bytes / MB,
        reference_how="RSS of a process with `import hivemind` and a bare DHT node, with its p2pd",
        target=400.0,
        details={"pss": ours.pss_bytes / MB, "torch_mapped": float(torch)}
        | {name: num_bytes / MB for name, num_bytes in ours.by_process.items()},
    )


def _idle_cpu(before: Cost, after: Cost, before_bare: Cost, after_bare: Cost) -> Figure:
    return Figure(
        name="idle_cpu",
        value=100 * (after.cpu_s - before.cpu_s) / WINDOW_S,
        unit="% of a core",
        how=f"CPU time of the same tree over {WINDOW_S:.0f} s",
        reference=100 * (after_bare.cpu_s - before_bare.cpu_s) / WINDOW_S,
        reference_how="the bare DHT node and its p2pd over the same seconds",
        target=2.0,
    )


# -- a daemon with much to do -----------------------------------------------------------------------------------------


def _busy(processes: Processes, read: Read, say: Say, idle: LagStatus) -> Figure:
    say("a full node starts")
    node = processes.daemon("full", "full")
    before = _wait(processes, "full", node, read, lambda status: status.training.step >= BUSY_FROM_STEP)
    say(f"a node that generates and trains: {WINDOW_S:.0f} s")
    time.sleep(WINDOW_S)
    after = read(processes.root / "full")
    processes.end(node)
    if after is None:
        raise P2prlError(f"the busy node did not answer: {processes.log_of('full')}")
    steps = after.training.step - before.training.step
    return Figure(
        name="loop_lag_p99",
        value=1000 * after.lag.p99_s,
        unit="ms",
        how="the daemon's own probe (a sleep of 0.1 s, how much later it ends), last half minute of a full node alone in "
        f"its swarm that made {steps} versions and {after.given.groups - before.given.groups} groups meanwhile",
        reference=1000 * idle.p99_s,
        reference_how="the same of the idle daemon",
        target=50.0,
        num_samples=after.lag.num_samples,
        details={"p50": 1000 * after.lag.p50_s, "max": 1000 * after.lag.max_s, "idle_max": 1000 * idle.max_s},
        broken="" if steps > 0 else "the node made no version meanwhile, so it was not busy",
    )


def _wait(
    processes: Processes, name: str, process: subprocess.Popen, read: Read, condition: Callable[[Status], bool]
) -> Status:
    deadline = time.monotonic() + START_S
    while True:
        status = read(processes.root / name)
        if status is not None and condition(status):
            return status
        if process.poll() is not None or time.monotonic() > deadline:
            raise P2prlError(f"the node {name} did not come up in {START_S:.0f} s: {processes.log_of(name)}")
        time.sleep(READ_S)


# -- network and generation, measured in children ---------------------------------------------------------------------


def _network(processes: Processes, say: Say) -> list[Figure]:
    say("thirteen p2pd start")
    found = processes.child("p2prl.bench.network")
    pings, reached = found["pings"], found["reached"]
    joins = [join["all"] for join in found["joins"]]
    return [
        Figure(
            name="announcement_p95",
            value=1000 * quantile(reached, 0.95),
            unit="ms",
            how="from publish until the last of 12 peers has heard it and checked its signature; 13 p2pd, one event loop",
            reference=1000 * quantile(pings, 0.95),
            reference_how=f"p95 of {len(pings)} unary round trips between the same peers",
            target=100.0,
            num_samples=len(reached),
            details=_scaled(spread(reached), 1000) | {"ping_p50": 1000 * quantile(pings, 0.5)},
        ),
        Figure(
            name="join",
            value=quantile(joins, 0.5),
            unit="s",
            how="median; from the start of a new node's network until one of 13 running peers reads its record from the "
            "directory and it has heard an announcement (one a second is sent)",
            reference=quantile(found["bare_joins"], 0.5),
            reference_how="start of a bare hivemind DHT node that joins one, until that one reads what it stored",
            target=3.0,
            num_samples=len(joins),
            details=spread(joins) | {f"{part}_p50": _median_of(found["joins"], part) for part in ("up", "joined")},
        ),
    ]


def _generation(processes: Processes, say: Say) -> list[Figure]:
    say("generation, through the worker and bare, in turn")
    found = processes.child("p2prl.bench.generation")
    ratios = [100 * ours / bare for ours, bare in found["pairs"]]
    return [
        Figure(
            name="generation",
            value=quantile(ratios, 0.5),
            unit="% of bare",
            how="median of paired rounds' ratios of tokens/s: worker, pipe and engine process against the engine alone; "
            f"recipe addition, {found['num_batches']} batches a round, {found['threads']} thread",
            reference=100.0,
            reference_how="the bare engine in a child of its own: same prompts, seeds, threads and niceness",
            target=95.0,
            at_least=True,
            num_samples=len(ratios),
            details=spread(ratios)
            | {
                "engine_busy_share": quantile(found["busy_shares"], 0.5),
                "tokens_per_s": quantile([ours for ours, _ in found["pairs"]], 0.5),
                "bare_tokens_per_s": quantile([bare for _, bare in found["pairs"]], 0.5),
            },
        )
    ]


def _median_of(rows: Sequence[dict[str, float]], part: str) -> float:
    return quantile([row[part] for row in rows], 0.5)


def _scaled(values: dict[str, float], factor: float) -> dict[str, float]:
    return {name: factor * value for name, value in values.items()}


def _python() -> str:
    return platform.python_version()
