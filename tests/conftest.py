"""What several kinds of test need: a disk small enough to fill."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

BALLAST = "ballast"


class SmallDisk:
    """A tmpfs of its own. Mounting needs root, which the tests have in CI."""

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
    """Mounts disks of so many MiB; gone after the test, and after the processes that still use them."""
    disks: list[SmallDisk] = []

    def make(num_mib: int) -> SmallDisk:
        disks.append(SmallDisk(tmp_path / f"disk{len(disks)}", num_mib))
        return disks[-1]

    yield make
    for disk in disks:
        disk.unmount()
