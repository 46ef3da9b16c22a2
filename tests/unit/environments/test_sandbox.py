"""What a program may not do. Each is tried for real."""

import time

import pytest

from p2prl.environments.sandbox import MAX_OUTPUT_BYTES, Sandbox, SandboxLimits
from p2prl.errors import ConfigError

pytestmark = pytest.mark.needs("bwrap")


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(SandboxLimits(wall_s=2.0, cpu_s=1))


def said(sandbox: Sandbox, program: str, reads: bytes = b"") -> str:
    outcome = sandbox.run(program, reads)
    assert outcome.trouble == "", outcome
    return outcome.output.decode().strip()


def refused(sandbox: Sandbox, statement: str) -> str:
    """The name of the error that the statement raises."""
    indented = "\n".join("    " + line for line in statement.splitlines())
    return said(
        sandbox, f"try:\n{indented}\n    print('done')\nexcept Exception as error:\n    print(type(error).__name__)"
    )


def test_it_computes_and_reads_its_input(sandbox: Sandbox) -> None:
    assert said(sandbox, "import math, json\nprint(int(input()) * 2, math.floor(2.5))", b"21\n") == "42 2"


@pytest.mark.parametrize(
    "statement",
    [
        "import socket; socket.socket()",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import threading; threading.Thread(target=print).start()",
        "open('/etc/passwd')",
        "open('/proc/self/environ')",
        "import os; os.listdir('/home')",
        "open('/escape', 'w')",
        "open('/dev/shm/escape', 'w')",
        "open('/usr/lib/escape', 'w')",
        "import os; os.kill(-1, 9)",
        "open('/tmp/big', 'wb').write(bytes(2 * 2**20))",
        "bytearray(2**30)",
        "import os; os.setuid(0)",
    ],
)
def test_what_it_may_not(sandbox: Sandbox, statement: str) -> None:
    assert refused(sandbox, statement) in (
        "PermissionError", "FileNotFoundError", "OSError", "ProcessLookupError", "RuntimeError", "MemoryError",
    )  # fmt: skip


def test_no_namespace_of_its_own(sandbox: Sandbox) -> None:
    program = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.unshare(0x10000000), libc.mount(0, 0, 0, 0, 0))"
    assert said(sandbox, program) == "-1 -1"


def test_no_files_of_this_project_and_no_surroundings(sandbox: Sandbox) -> None:
    here = __file__
    assert refused(sandbox, f"open({here!r})") == "FileNotFoundError"
    assert said(sandbox, "import os\nprint(sorted(os.environ))") == "['LC_ALL', 'PATH', 'PWD', 'PYTHONHASHSEED']"
    assert said(sandbox, "import os\nprint(os.getuid(), os.listdir('/tmp'))") == "65534 []"


def test_nothing_is_left_for_the_next(sandbox: Sandbox) -> None:
    said(sandbox, "open('/tmp/note', 'w').write('x')")
    assert said(sandbox, "import os\nprint(os.path.exists('/tmp/note'))") == "False"


@pytest.mark.parametrize(
    ("program", "trouble"),
    [
        ("while True: pass", ""),
        ("import signal; signal.pause()", "it ran longer than 2 s"),
        ("while True: print('x' * 10000)", f"it wrote more than {MAX_OUTPUT_BYTES} bytes"),
        ("raise SystemExit(3)", "it ended with exit code 3"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
def test_it_ends(sandbox: Sandbox, program: str, trouble: str) -> None:
    started = time.monotonic()
    outcome = sandbox.run(program, b"")
    assert outcome.trouble and trouble in outcome.trouble
    assert outcome.output == b""
    assert time.monotonic() - started < 10


def test_where_there_is_no_bubblewrap_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="needs bubblewrap, which is not here; install it with: apt-get"):
        Sandbox()


def test_the_order_of_a_set_is_the_same_each_time(sandbox: Sandbox) -> None:
    program = "print(set(map(chr, range(97, 123))))"
    assert said(sandbox, program) == said(sandbox, program)
    assert (
        said(sandbox, "import sys; print(sys.flags.safe_path, sys.flags.no_site, sys.flags.no_user_site)") == "True 1 1"
    )


def test_memory_outside_the_address_space_is_refused(sandbox: Sandbox) -> None:
    program = "import ctypes\nprint(ctypes.CDLL(None).shmget(0, 2**20, 0o1600))"
    assert said(sandbox, program) == "-1"
    assert refused(sandbox, "import socket\nsocket.socketpair()") == "PermissionError"
