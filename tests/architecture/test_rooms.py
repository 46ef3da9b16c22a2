"""The house rules that a script can check: room sizes, one home for hivemind and multiaddr."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "p2prl"
ROOMS = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_is_small_and_says_what_it_is_for(room: Path) -> None:
    text = room.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert text.lstrip().startswith('"""')


def test_only_the_libp2p_room_imports_hivemind() -> None:
    """And the benchmark's reference, which is hivemind without anything of ours."""
    outside = [room.name for room in ROOMS if "libp2p" not in room.parts and _imports(room, "hivemind")]
    assert outside == ["bare_hivemind.py"]


def test_only_addresses_imports_multiaddr() -> None:
    assert [room.name for room in ROOMS if _imports(room, "multiaddr")] == ["addresses.py"]


def test_no_room_needs_the_virtual_time_loop_of_the_tests() -> None:
    assert [room for room in ROOMS if _imports(room, "async_solipsism")] == []


def test_nothing_is_named_like_a_bin() -> None:
    assert not {"utils", "common", "helpers", "manager", "base", "misc"} & {room.stem for room in ROOMS}


def _imports(room: Path, package: str) -> bool:
    return bool(re.search(rf"^\s*(import|from) {package}\b", room.read_text(), re.MULTILINE))
