"""Notices and the disk, as the status shows them."""

from p2prl.node import disk


def test_a_full_disk_is_told_of_once_and_until_there_is_room(make_state, told) -> None:
    state = make_state()
    full, free = disk.judge(0, 0), disk.judge(2**40, 0)
    state.note_room(free)
    assert not state.disk_full and told == []
    for _ in range(3):
        state.note_room(full)
    assert state.disk_full
    level, message, fix, since = state.health["disk_full"]
    assert level == "error" and "the disk is full" in message and "goes on by itself" in fix
    assert [level for level, _, _ in told] == ["error"]
    state.note_room(free)
    assert not state.disk_full and "disk_full" not in state.health
    assert told[-1][:2] == ("info", "the disk has room again")
    state.note_room(full)
    assert state.health["disk_full"][3] >= since
