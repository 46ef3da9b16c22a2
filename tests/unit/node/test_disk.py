"""Room on the disk."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.errors import PreflightFailed
from p2prl.node.disk import SLACK, check_room, floor_bytes, free_bytes, judge
from p2prl.paths import Home

sizes = st.integers(0, 2**44)


@given(sizes, sizes)
def test_a_node_waits_below_its_floor_and_goes_on_well_above(free: int, version: int) -> None:
    floor = floor_bytes(version)
    assert floor >= 2 * version
    assert judge(free, version).full == (free < floor)
    assert judge(free, version, was_full=True).full == (free < SLACK * floor)


@given(sizes, st.lists(st.integers(-(2**20), 2**20), max_size=50))
def test_it_does_not_flap_on_its_own_small_writes(version: int, changes: list[int]) -> None:
    free, full, turns = floor_bytes(version), False, 0
    for change in changes:
        was = full
        full = judge(free + change, version, was).full
        turns += was != full
    assert turns <= 1


def test_a_start_without_room_says_how_much_is_needed(tmp_path: Path) -> None:
    home = Home.locate(tmp_path / "not" / "made" / "yet")
    check_room(home)
    with pytest.raises(PreflightFailed, match="the disk is full.*--home"):
        check_room(home, 2**60)
    assert not (tmp_path / "not").exists()
    stats = os.statvfs(tmp_path)
    assert free_bytes(home) == pytest.approx(stats.f_bavail * stats.f_frsize, rel=0.05)
