"""Whatever ends the process or the machine in a write, the store is usable afterwards and what has a name is whole."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2prl.errors import StoreError
from p2prl.learner.publish import Folders, publish
from p2prl.models.state import state_hash
from p2prl.records import DeltaBase, Version
from p2prl.weights import delta
from p2prl.weights.chain import Garbage
from p2prl.weights.contents import content_of
from p2prl.weights.store import WeightStore, path_of, staged_path
from tests.unit.weights.states import stepped, weights, write_words


class PowerCut(BaseException):
    """Nothing is written any more from here on."""


class Disk:
    """Dies at the operation of this number; what was renamed before it was synced is then half lost."""

    def __init__(self, dies_at: int) -> None:
        self.dies_at, self.num, self.is_dead = dies_at, 0, False
        self._synced: set[int] = set()  # inodes
        self._risky: list[Path] = []

    def tick(self) -> None:
        self.num += 1
        self.is_dead = self.is_dead or self.num == self.dies_at
        if self.is_dead:
            raise PowerCut

    def install(self, patch: pytest.MonkeyPatch) -> None:
        real_sync, real_unlink, real_mkdir = os.fsync, os.unlink, os.mkdir

        def sync(file: int) -> None:
            self.tick()
            real_sync(file)
            self._synced.add(os.fstat(file).st_ino)

        def moving(real: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            def move(source: Any, target: Any, **_: Any) -> None:
                self.tick()
                inode = os.stat(source).st_ino
                real(source, target)
                if inode not in self._synced:
                    self._risky.append(Path(target))

            return move

        def unlink(path: Any, **more: Any) -> None:
            self.tick()
            real_unlink(path, **more)

        def mkdir(path: Any, *more: Any, **named: Any) -> None:
            self.tick()
            real_mkdir(path, *more, **named)

        patch.setattr(os, "fsync", sync)
        patch.setattr(os, "replace", moving(os.replace))
        patch.setattr(os, "rename", moving(os.rename))
        patch.setattr(os, "unlink", unlink)
        patch.setattr(os, "mkdir", mkdir)

    def lose(self) -> None:
        for path in self._risky:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)


PARENT = weights(3000, 1)
CHILD = stepped(PARENT, 2, 1e-4)


def folders_of(home: Path) -> Folders:
    return Folders(home / "states", home / "blobs")


def store_of(home: Path) -> WeightStore:
    store = WeightStore(home / "states", home / "blobs")
    store.open()
    return store


def learner_and_follower(home: Path) -> None:
    """A version is published; a follower makes it of the delta; the one before goes."""
    one, other = folders_of(home / "learner"), store_of(home / "follower")
    first = publish(lambda path: write_words(path, {"w": PARENT}), one, (), anchor=False)
    base = DeltaBase(Version(1, 1, first.hash), str(first.path))
    second = publish(lambda path: write_words(path, {"w": CHILD}), one, (base,), anchor=True)
    staged = other.staged_state()
    write_words(staged, {"w": PARENT})
    other.add_state(staged, first.hash)
    staged = other.staged_state()
    change = path_of(one.blobs, second.contents[0].content_hash)
    delta.apply(other.state_path(first.hash), [change], staged, expected=second.hash)
    other.add_state(staged, second.hash)
    other.collect(Garbage(frozenset({first.hash}), frozenset()))


def files(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


def test_a_power_cut_at_any_operation_leaves_a_usable_store(tmp_path: Path) -> None:
    whole, dies_at = files_after(tmp_path / "whole"), 0
    while True:
        dies_at += 1
        home, disk = tmp_path / str(dies_at), Disk(dies_at)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            try:
                learner_and_follower(home)
            except PowerCut:
                pass
        disk.lose()
        for node in ("learner", "follower"):
            store = store_of(home / node)
            assert store.verify() == (), f"operation {dies_at}"
            assert all(len(Path(name).name) == 64 for name in files(home / node)), "something was left half-way"
        learner_and_follower(home)
        assert files(home) >= whole
        assert store_of(home / "follower").verify() == ()
        if not disk.is_dead:
            break
    assert dies_at > 25


def files_after(home: Path) -> set[str]:
    learner_and_follower(home)
    return files(home)


@pytest.mark.parametrize("name", ["fsync", "replace", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_refuses_gives_a_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    store = store_of(tmp_path)
    staged = staged_path(tmp_path / "states", "made")
    staged.parent.mkdir()
    digest = write_words(staged, {"w": PARENT})

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, name, refuse)
        with pytest.raises(StoreError, match=f"(?i){os.strerror(number)}; free some space"):
            store.add_state(staged, digest)
    assert files(tmp_path) == set()
    assert not store.has_state(digest)


def test_what_others_put_there_is_found_and_what_goes_is_gone(tmp_path: Path) -> None:
    store, folders = store_of(tmp_path), folders_of(tmp_path)
    first = publish(lambda path: write_words(path, {"w": PARENT}), folders, (), anchor=False)
    base = DeltaBase(Version(1, 1, first.hash), str(first.path))
    second = publish(lambda path: write_words(path, {"w": CHILD}), folders, (base,), anchor=False)
    (way,) = second.contents
    assert store.held.states == {} and store.held.contents == {}
    for name in (first.hash, second.hash, bytes(32)):
        store.found_state(name)
    store.found_content(way.content_hash)
    size = first.path.stat().st_size
    assert store.held.states == {first.hash: size, second.hash: size}
    assert store.held.contents == {way.content_hash: way.content_bytes}
    again = store_of(tmp_path)
    assert again.held == store.held
    freed = store.collect(Garbage(frozenset({first.hash}), frozenset({way.content_hash})))
    assert freed == size + way.content_bytes
    assert files(tmp_path) == {str(second.path.relative_to(tmp_path))}
    store.drop_state(second.hash)
    store.drop_state(second.hash)
    assert store.held == store_of(tmp_path).held


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "empty"])
def test_what_rotted_is_found_told_of_and_dropped(tmp_path: Path, damage: str) -> None:
    folders = folders_of(tmp_path)
    first = publish(lambda path: write_words(path, {"w": PARENT}), folders, (), anchor=False)
    base = DeltaBase(Version(1, 1, first.hash), str(first.path))
    second = publish(lambda path: write_words(path, {"w": CHILD}), folders, (base,), anchor=False)
    store = store_of(tmp_path)
    change = path_of(folders.blobs, second.contents[0].content_hash)
    for path in (second.path, change):
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            rotted = {"flipped": content[:-1] + bytes([content[-1] ^ 1]), "cut": content[:-9], "empty": b""}
            path.write_bytes(rotted[damage])
    faults = store.verify()
    assert {Path(fault.path) for fault in faults} == {second.path, change}
    assert all(fault.why for fault in faults)
    assert store.held.states.keys() == {first.hash} and not store.held.contents
    assert files(tmp_path) == {str(first.path.relative_to(tmp_path))}
    assert store.verify() == ()


def test_the_start_sweeps_what_was_left_and_touches_nothing_else(tmp_path: Path) -> None:
    for folder in (tmp_path / "states", tmp_path / "blobs"):
        (folder / "ab").mkdir(parents=True)
        staged_path(folder, "delta").write_bytes(b"half")
        (folder / "ab" / f".ab{'0' * 62}.77.staged").write_bytes(b"half")
        (folder / ".version.1.staged.1.staged").write_bytes(b"of write_payloads")
        (folder / "ab" / "README").write_bytes(b"somebody's")
        (folder / "ab" / ("cd" * 32)).write_bytes(b"in the wrong folder")
        (folder / "ab" / ("ab" + "zz" * 31)).write_bytes(b"no name of ours")
    part = tmp_path / "blobs" / "ab" / f".ab{'0' * 62}.part"
    part.write_bytes(b"verified pieces")
    store = WeightStore(tmp_path / "states", tmp_path / "blobs")
    store.sweep(os.getpid())
    assert staged_path(tmp_path / "blobs", "delta").exists(), "ours, in the middle of a write"
    store.open()
    assert not [name for name in files(tmp_path) if name.endswith(".staged")]
    assert len(files(tmp_path)) == 7
    assert store.held.states == {} and store.held.contents == {}
    store.drop_parts({bytes.fromhex("ab" + "0" * 62)})
    assert part.exists()
    store.drop_parts(set())
    assert not part.exists()


# -- what is published ----------------------------------------------------------------------------------------------


def test_a_delta_that_does_not_pay_gives_way_to_the_whole_state(tmp_path: Path) -> None:
    folders, source = folders_of(tmp_path), np.random.default_rng(0)
    first = publish(lambda path: write_words(path, {"w": PARENT}), folders, (), anchor=False)
    base = DeltaBase(Version(1, 1, first.hash), str(first.path))
    other = source.integers(0, 2**16, 3000, dtype="<u2")
    second = publish(lambda path: write_words(path, {"w": other}), folders, (base,), anchor=False)
    assert [way.kind for way in second.contents] == ["anchor"]
    assert second.metrics["delta_fraction"] > 0.9
    assert second.contents == (content_of(second.path, "anchor", None),)
    assert [path for path in folders.blobs.rglob("*") if path.is_file()] == []


def test_a_base_of_other_tensors_gives_the_whole_state_and_a_note(tmp_path: Path) -> None:
    folders = folders_of(tmp_path)
    first = publish(lambda path: write_words(path, {"w": PARENT}), folders, (), anchor=False)
    bases = (
        DeltaBase(Version(0, 0, first.hash), str(first.path)),
        DeltaBase(Version(0, 0, bytes(32)), str(tmp_path / "gone")),
    )
    second = publish(lambda path: write_words(path, {"lora_a": CHILD}), folders, bases, anchor=False)
    assert [way.kind for way in second.contents] == ["anchor"]
    assert len(second.notes) == 2 and all("no delta from 0.0" in note for note in second.notes)


def test_bases_of_one_state_give_one_delta(tmp_path: Path) -> None:
    """Versions that changed nothing: a manifest that named the same content twice would be nobody's."""
    folders = folders_of(tmp_path)
    first = publish(lambda path: write_words(path, {"w": PARENT}), folders, (), anchor=False)
    bases = [DeltaBase(Version(1, step, first.hash), str(first.path)) for step in (16, 0)]
    second = publish(lambda path: write_words(path, {"w": CHILD}), folders, bases, anchor=True)
    assert [(way.kind, way.base) for way in second.contents] == [("delta", bases[0].version), ("anchor", None)]
    assert len({way.content_hash for way in second.contents}) == 2


def test_several_deltas_come_in_the_order_of_their_bases(tmp_path: Path) -> None:
    folders = folders_of(tmp_path)
    words = stepped(PARENT, 0, 1e-5)
    made = publish(lambda path: write_words(path, {"w": PARENT}), folders, (), anchor=False)
    bases = (DeltaBase(Version(1, 1, made.hash), str(made.path)),)
    for step in range(2, 4):
        made = publish(lambda path, words=words: write_words(path, {"w": words}), folders, bases, anchor=step == 3)
        bases = (DeltaBase(Version(1, step, made.hash), str(made.path)), *bases)
        words = stepped(words, step, 1e-5)
    assert [(way.kind, way.base.step if way.base else None) for way in made.contents] == [
        ("delta", 2),
        ("delta", 1),
        ("anchor", None),
    ]
    for way in made.contents[:2]:
        assert way.base is not None
        path = path_of(folders.blobs, way.content_hash)
        delta.apply(path_of(folders.states, way.base.hash), [path], tmp_path / "out", expected=made.hash)
        assert state_hash(tmp_path / "out") == made.hash


@pytest.mark.parametrize("base_is_new", [True, False])
def test_a_step_that_fails_after_its_state_was_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_is_new: bool
) -> None:
    """The disk filled up at the second delta. What was there before, of the same bytes, stays."""
    folders = folders_of(tmp_path)
    first = publish(lambda path: write_words(path, {"w": PARENT}), folders, (), anchor=False)
    other = publish(lambda path: write_words(path, {"w": stepped(PARENT, 3, 1e-5)}), folders, (), anchor=False)
    bases = tuple(DeltaBase(Version(1, 1, made.hash), str(made.path)) for made in (first, other))
    before, real, num = files(tmp_path), delta.encode, 0

    def full(*args: Any, **more: Any) -> object:
        nonlocal num
        num += 1
        if num == 2:
            raise StoreError("can't write: no space left; free some disk space")
        return real(*args, **more)

    monkeypatch.setattr(delta, "encode", full)
    words = CHILD if base_is_new else PARENT
    with pytest.raises(StoreError, match="no space left"):
        publish(lambda path: write_words(path, {"w": words}), folders, bases, anchor=False)
    assert num == 2 and files(tmp_path) == before


def test_what_a_process_had_named_before_it_died_is_held_after_the_sweep(tmp_path: Path) -> None:
    """Nobody was told of it, and it is collected in its time."""
    store, folders = store_of(tmp_path), folders_of(tmp_path)
    made = publish(lambda path: write_words(path, {"w": PARENT}), folders, (), anchor=True)
    bases = (DeltaBase(Version(1, 1, made.hash), str(made.path)),)
    child = publish(lambda path: write_words(path, {"w": CHILD}), folders, bases, anchor=False)
    assert not store.has_state(child.hash)
    store.sweep(os.getpid())
    assert store.held.states.keys() == {made.hash, child.hash}
    assert store.held.contents.keys() == {child.contents[0].content_hash}


def test_one_file_that_can_not_be_dropped_keeps_no_other(tmp_path: Path) -> None:
    store, names = store_of(tmp_path), [bytes([number]) * 32 for number in range(1, 6)]
    for name in names[1:]:
        path_of(tmp_path / "states", name).parent.mkdir(parents=True)
        path_of(tmp_path / "states", name).write_bytes(b"old")
    path_of(tmp_path / "states", names[0]).mkdir(parents=True)  # no file: it can't be unlinked
    store.open()
    with pytest.raises(StoreError, match="can't drop weights"):
        store.collect(Garbage(frozenset(names), frozenset()))
    assert files(tmp_path) == set() and store.held.states == {}
