"""Whether the disk has room for what a node writes next; a node that has none waits instead of failing half-way.

In: a home, the size of one version. Out: `Room`; PreflightFailed where a start would fail.

Invariants: what holds a node back is less than what lets it start, and it goes on only when more is free than what
stopped it, so that it does not flap while it fills and frees the last bytes itself.
"""

import shutil
from pathlib import Path

import msgspec

from p2prl.errors import PreflightFailed
from p2prl.paths import Home

MARGIN_BYTES = 16 * 2**20  # database, logs
VERSIONS = 3  # a state that is written, a delta and a cumulative delta that may turn out as large
SLACK = 1.25


class Room(msgspec.Struct, frozen=True):
    """`floor_bytes` must stay free."""

    free_bytes: int
    floor_bytes: int
    full: bool

    @property
    def message(self) -> str:
        return f"the disk is full: {_mb(self.free_bytes)} are free, a node here needs {_mb(self.floor_bytes)}"


def floor_bytes(version_bytes: int) -> int:
    return MARGIN_BYTES + VERSIONS * version_bytes


def judge(free_bytes: int, version_bytes: int, was_full: bool = False) -> Room:
    floor = floor_bytes(version_bytes)
    return Room(free_bytes, floor, free_bytes < (SLACK * floor if was_full else floor))


def free_bytes(home: Home) -> int:
    """On the fuller of the disks that hold the home."""
    return min(shutil.disk_usage(_existing(folder)).free for folder in (home.state, home.cache))


def check_room(home: Home, version_bytes: int = 0) -> None:
    """Before anything is written. Raises PreflightFailed."""
    room = judge(free_bytes(home), version_bytes, was_full=True)
    if room.full:
        raise PreflightFailed(
            f"{room.message} and {_mb(int(SLACK * room.floor_bytes))} to start. "
            f"Free some space at {home.state} and {home.cache}, or choose another disk with --home"
        )


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
