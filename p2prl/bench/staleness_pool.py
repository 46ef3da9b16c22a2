"""The staleness study's runs over several processes, each finished one kept on disk.

In: specs, a folder. Out: their `Run`s and traces in the order of the specs; what was found in the folder is not run again.

Invariants: a file is written whole or not at all, and counts only when its key is the spec's; no worker outlives `study`,
nor, by the closed pipe, a parent that was killed. One study a folder at a time.
"""

import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from filelock import FileLock, Timeout

from p2prl.bench.staleness import Done, Failed, Job, Progress, Ready, Reply, Run, RunSpec, Setup, Trace
from p2prl.errors import ConfigError, P2prlError
from p2prl.pipes import BlockingPipe, PipeClosed

STOP_S = 10.0
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class Saved(msgspec.Struct, frozen=True):
    """A finished run's file. `wall_s` is kept apart from the result, which is the same each time."""

    key: str
    wall_s: float
    run: Run


class Watch(Protocol):
    """Whom the study tells how it goes on."""

    def begin(self, num_ticks: int, num_found: int, num_runs: int) -> None:
        """`num_found` of the `num_runs` lie in the folder already; `num_ticks` are to come."""
        ...

    def advance(self, num_ticks: int) -> None: ...
    def finished(self, run: Run, wall_s: float) -> None: ...


def study(specs: Sequence[RunSpec], folder: Path, num_workers: int, watch: Watch) -> list[Run]:
    """Every spec's run. Raises P2prlError when a run fails; KeyboardInterrupt passes through. Both leave what is done."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"another study is at work in {folder}; wait for it, or give another --out") from None
    try:
        found = {spec: run for spec in specs if (run := load(spec, folder)) is not None}
        missing = [spec for spec in specs if spec not in found]
        watch.begin(sum(spec.settings.num_steps for spec in missing), len(found), len(specs))
        if missing:
            with _Workers(min(num_workers, len(missing))) as workers:
                workers.run(missing, watch, lambda spec, done: _save(spec, done, folder))
        return [found.get(spec) or _must_load(spec, folder) for spec in specs]
    finally:
        lock.release()


def load(spec: RunSpec, folder: Path) -> Run | None:
    """A finished run of just this spec; a damaged or older file counts as none."""
    try:
        saved = msgspec.json.decode(_run_file(spec, folder).read_bytes(), type=Saved)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return saved.run if saved.key == spec.key() and _trace_file(spec, folder).is_file() else None


def load_trace(spec: RunSpec, folder: Path) -> Trace:
    return msgspec.json.decode(_trace_file(spec, folder).read_bytes(), type=Trace)


def write_whole(path: Path, data: bytes) -> None:
    """Staged beside it, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with staged.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _save(spec: RunSpec, done: Done, folder: Path) -> None:
    write_whole(_trace_file(spec, folder), msgspec.json.encode(done.trace))
    write_whole(_run_file(spec, folder), msgspec.json.encode(Saved(spec.key(), done.wall_s, done.run)))


def _must_load(spec: RunSpec, folder: Path) -> Run:
    run = load(spec, folder)
    if run is None:
        raise P2prlError(f"the file of {spec.name} in {folder} vanished or changed while the study ran; run it again")
    return run


def _run_file(spec: RunSpec, folder: Path) -> Path:
    return folder / "runs" / f"{spec.name}.json"


def _trace_file(spec: RunSpec, folder: Path) -> Path:
    return folder / "traces" / f"{spec.name}.json"


class _Worker:
    """A process and our end of its pipe."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "p2prl.bench.staleness_worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD}, start_new_session=True,
            )  # fmt: skip
        finally:
            theirs.close()
        self.socket = ours
        self.pipe: BlockingPipe[Reply] = BlockingPipe(ours, Reply)
        self.spec: RunSpec | None = None


class _Workers:
    """Some workers; `with` ends them all."""

    def __init__(self, number: int) -> None:
        self._workers: list[_Worker] = []
        self._number = number

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.socket.close()
            worker.process.terminate()
        deadline = time.monotonic() + STOP_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def run(self, specs: Sequence[RunSpec], watch: Watch, save: Callable[[RunSpec, Done], None]) -> None:
        waiting = deque(specs)
        first_of_each = tuple({spec.objective: spec for spec in reversed(specs)}.values())
        with selectors.DefaultSelector() as selector:
            for _ in range(self._number):
                worker = _Worker()
                self._workers.append(worker)
                selector.register(worker.socket, selectors.EVENT_READ, worker)
                worker.pipe.send(Setup(first_of_each))
            while selector.get_map():
                for key, _ in selector.select():
                    worker: _Worker = key.data
                    if self._take(worker, watch, save) and not self._give(worker, waiting):
                        selector.unregister(worker.socket)

    def _take(self, worker: _Worker, watch: Watch, save: Callable[[RunSpec, Done], None]) -> bool:
        """One message; True when the worker is free after it."""
        about = worker.spec.name if worker.spec else "the start of a worker"
        try:
            reply = worker.pipe.receive()
        except PipeClosed:
            code = worker.process.wait(STOP_S)
            raise P2prlError(
                f"a worker ended with {code} during {about}, perhaps for want of memory; "
                "what is finished is kept: the same command goes on"
            ) from None
        match reply:
            case Progress(num_ticks):
                watch.advance(num_ticks)
                return False
            case Failed(message):
                raise P2prlError(f"{about} failed: {message}")
            case Done():
                assert worker.spec is not None
                save(worker.spec, reply)
                watch.finished(reply.run, reply.wall_s)
            case Ready():
                pass
        return True

    def _give(self, worker: _Worker, waiting: deque[RunSpec]) -> bool:
        worker.spec = waiting.popleft() if waiting else None
        if worker.spec is not None:
            worker.pipe.send(Job(worker.spec))
        return worker.spec is not None
