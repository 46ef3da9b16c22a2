"""Running a model's Python away from everything, by bubblewrap.

In: a program's text, what it reads. Out: what it wrote, or why it has nothing to say.

The program sees the interpreter and its libraries, read-only, and an empty /tmp in memory; no network, no /proc, no
other user, no home, no environment variable. It can make no process and no thread; processor, memory, files and output
are limited, and after `wall_s` the kernel takes it down with bubblewrap's first process. Linux alone.

The same program gives the same on every node, as far as Python lets it see no difference: hashes and process ids are the
same, unseeded generators all begin alike, a clock begins at one moment and goes on a microsecond with each look at it, and
sleeping only moves it on. What a program learns in other ways can differ: addresses (`id`, the order of a set of plain
objects) and how far it comes within its limits on a slow machine. Such an answer may be worth something else elsewhere, so
that its group is refused there. It is judged once: a second run here would not tell what another machine gives.
"""

import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from p2prl.environments.seccomp import filter_program
from p2prl.errors import ConfigError
from p2prl.exits import describe_exit

MAX_OUTPUT_BYTES = 2**20
_ADVICE = "install it with: apt-get install bubblewrap"
# Before the program's first line; a hard limit can't be raised again.
_PRELUDE = """
import resource as _r, sys as _s
for _what, _most in ((_r.RLIMIT_CPU, {cpu_s}), (_r.RLIMIT_AS, {memory_bytes}), (_r.RLIMIT_FSIZE, {file_bytes}),
                     (_r.RLIMIT_NOFILE, 64), (_r.RLIMIT_CORE, 0)):
    _r.setrlimit(_what, (_most, _most))
_s.setrecursionlimit(5000)
del _r, _s, _what, _most
"""


_SAME = """
def _same():
    import _random, posix, sys, time
    base, kept = _random.Random, _random.Random(0)
    class Random(base):
        def __new__(cls, *args):
            return super().__new__(cls, 0)
        def seed(self, a=None):
            super().seed(0 if a is None else a)
    _random.Random = Random
    def urandom(size, flags=0):
        return kept.getrandbits(8 * size).to_bytes(size, "little") if size else b""
    for module in (posix, sys.modules.get("os", posix)):
        module.urandom = module.getrandom = urandom
    now = 1_700_000_000 * 10**9
    def ns(*clock):
        nonlocal now
        now += 1000
        return now
    def seconds(*clock):
        return ns() / 10**9
    def sleep(length):
        nonlocal now
        if length < 0:
            raise ValueError("sleep length must be non-negative")
        now += int(length * 10**9)
    time.sleep = sleep
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"):
        setattr(time, name, seconds)
        setattr(time, name + "_ns", ns)
    def of_now(told):
        return lambda at=None: told(seconds() if at is None else at)
    gmtime, asctime, strftime = of_now(time.gmtime), time.asctime, time.strftime
    time.gmtime, time.localtime, time.ctime = gmtime, of_now(time.localtime), of_now(time.ctime)
    time.asctime = lambda at=None: asctime(gmtime() if at is None else at)
    time.strftime = lambda form, at=None: strftime(form, gmtime() if at is None else at)
    sys.modules["_datetime"] = None  # written in C, it asks the system; the one in Python asks `time`
_same()
del _same
"""


class SandboxLimits(msgspec.Struct, frozen=True):
    wall_s: float = 4.0
    cpu_s: int = 2
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 2**20


class Outcome(msgspec.Struct, frozen=True):
    """`trouble` "": it ended by itself with exit code 0."""

    output: bytes
    trouble: str = ""


class Sandbox:
    def __init__(self, limits: SandboxLimits | None = None) -> None:
        """Raises ConfigError where there is no bubblewrap, or the kernel doesn't let it work."""
        self._limits = limits or SandboxLimits()
        if not sys.platform.startswith("linux") or shutil.which("bwrap") is None:
            raise ConfigError(f"running answers as programs needs bubblewrap, which is not here; {_ADVICE}")
        trial = self.run("print(6 * 7)", b"")
        if trial.output.strip() != b"42":
            raise ConfigError(
                f"bubblewrap can't isolate programs here ({trial.trouble or 'no output'}); the kernel must allow user "
                "namespaces. Take a recipe that runs no code, or another machine"
            )

    def run(self, program: str, reads: bytes) -> Outcome:
        """`program` gets `reads` as its standard input; its standard output comes back."""
        limits = self._limits
        prelude = _PRELUDE.format(**{name: getattr(limits, name) for name in limits.__struct_fields__}) + _SAME
        with _filter() as rules:
            # Not -I, which would pass over PYTHONHASHSEED: the order of a set must be the same on every machine.
            command = [*_bubblewrap(rules), "--", _python(), "-P", "-s", "-S", "-B", "-c", prelude + program]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={}, pass_fds=(rules,), start_new_session=True,
            )  # fmt: skip
        try:
            output = _talk(process, reads, limits.wall_s)
        except subprocess.TimeoutExpired:
            return Outcome(b"", f"it ran longer than {limits.wall_s:g} s")
        except _TooMuch:
            return Outcome(b"", f"it wrote more than {MAX_OUTPUT_BYTES} bytes")
        finally:
            _end(process)
        code = process.returncode
        return Outcome(output, "" if code == 0 else _said(code))


class _TooMuch(Exception):
    pass


def _talk(process: subprocess.Popen[bytes], reads: bytes, wall_s: float) -> bytes:
    """communicate(), with a cap on what comes back."""
    assert process.stdin is not None and process.stdout is not None
    deadline = time.monotonic() + wall_s
    output = bytearray()
    waiting = memoryview(reads)
    with selectors.DefaultSelector() as selector:
        for stream, event in ((process.stdin, selectors.EVENT_WRITE), (process.stdout, selectors.EVENT_READ)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, event)
        while process.stdout in {key.fileobj for key in selector.get_map().values()}:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, wall_s)
            for key, _ in selector.select(left):
                if key.fileobj is process.stdin:
                    waiting = _write(process, waiting)
                    if not waiting:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                part = os.read(process.stdout.fileno(), 2**16)
                output += part
                if len(output) > MAX_OUTPUT_BYTES:
                    raise _TooMuch
                if not part:
                    selector.unregister(process.stdout)
        process.wait(max(0.0, deadline - time.monotonic()))
    return bytes(output)


def _write(process: subprocess.Popen[bytes], waiting: memoryview) -> memoryview:
    assert process.stdin is not None
    try:
        return waiting[os.write(process.stdin.fileno(), waiting[: 2**16]) :] if waiting else waiting
    except BrokenPipeError:  # it doesn't read
        return waiting[:0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole session; bubblewrap's processes die with it (--die-with-parent, a pid namespace)."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout):
        if stream is not None and not stream.closed:
            stream.close()
    process.wait()


def _said(code: int) -> str:
    if code > 128:  # bubblewrap's word for a signal
        return f"it was {describe_exit(128 - code)}"
    return f"it was {describe_exit(code)}" if code < 0 else f"it ended with exit code {code}"


def _python() -> str:
    """The interpreter itself: a virtual environment's is a link to it."""
    return os.path.realpath(sys.executable)


@contextmanager
def _filter() -> Iterator[int]:
    """A descriptor that bubblewrap reads the filter from."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as file:  # a few hundred bytes: they fit into the pipe
            file.write(filter_program(platform.machine()))
        yield reading
    finally:
        os.close(reading)


def _bubblewrap(rules: int) -> list[str]:
    command = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    command += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--clearenv"]
    for path in _readable():
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    command += ["--dev-bind", "/dev/null", "/dev/null", "--size", str(16 * 2**20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    for name, value in (("PATH", "/nowhere"), ("PYTHONHASHSEED", "0"), ("LC_ALL", "C.UTF-8")):
        command += ["--setenv", name, value]
    return [*command, "--remount-ro", "/", "--seccomp", str(rules)]


def _readable() -> list[Path]:
    """The C library and what belongs to this Python; nothing else of the disk."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    libraries = [Path("/lib"), Path("/lib64"), Path("/usr/lib"), Path("/usr/lib64")]
    own = {Path(_python())} | {Path(sysconfig.get_path(name, vars=base)) for name in ("stdlib", "platstdlib")}
    shared = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    if all(shared) and (library := Path(*shared)).exists():
        own.add(library)
    return [*libraries, *sorted(path for path in own if not str(path).startswith(("/usr/lib/", "/usr/lib64/")))]
