import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from p2prl.errors import BadRecord, DeltaError, StoreError
from p2prl.models.state import state_hash
from p2prl.weights import delta, delta_format
from tests.conftest import SmallDisk
from tests.unit.weights.states import Tensor, stepped, tensor, weights, write, write_words

Words = dict[str, np.ndarray]


def state(num: int = 2000, seed: int = 0) -> Words:
    return {"b": weights(num, seed).reshape(-1, 4), "a": weights(num // 2, seed + 100), "norm": weights(8, seed, 1.0)}


def step(words: Words, seed: int, rate: float = 1e-5) -> Words:
    return {name: stepped(one.reshape(-1), seed, rate).reshape(one.shape) for name, one in words.items()}


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """State files of four versions; the delta to each from the one before is beside it."""
    words, paths = state(), []
    for number in range(4):
        paths.append(tmp_path / f"{number}.state")
        write_words(paths[-1], words)
        if number:
            delta.encode(paths[-2], paths[-1], delta_to(paths[-1]))
        words = step(words, number)
    return paths


def delta_to(path: Path) -> Path:
    return path.with_suffix(".delta")


def apply(parent: Path, deltas: list[Path], child: Path, out: Path) -> None:
    delta.apply(parent, deltas, out, expected=state_hash(child))


def test_the_child_comes_out_byte_for_byte(chain: list[Path], tmp_path: Path) -> None:
    apply(chain[0], [delta_to(chain[1])], chain[1], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == chain[1].read_bytes()
    assert [path for path in tmp_path.iterdir() if "staged" in path.name] == []


def test_several_deltas_are_applied_at_once(chain: list[Path], tmp_path: Path) -> None:
    apply(chain[0], [delta_to(path) for path in chain[1:]], chain[3], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == chain[3].read_bytes()


def test_a_delta_over_several_versions_is_smaller_than_theirs_together(chain: list[Path], tmp_path: Path) -> None:
    info = delta.encode(chain[0], chain[3], tmp_path / "sum")
    assert info.num_bytes < sum(delta_to(path).stat().st_size for path in chain[1:])
    apply(chain[0], [tmp_path / "sum"], chain[3], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == chain[3].read_bytes()


def test_what_is_told_of_a_delta(chain: list[Path], tmp_path: Path) -> None:
    info = delta.encode(chain[0], chain[1], tmp_path / "delta")
    changed = sum((one != other).sum() for one, other in zip(state().values(), step(state(), 0).values(), strict=True))
    assert info == delta.DeltaInfo((tmp_path / "delta").stat().st_size, changed, 3008)
    header = delta.read_header(tmp_path / "delta")
    assert header == delta.Header(state_hash(chain[0]), state_hash(chain[1]), 3008, changed)


@pytest.mark.parametrize("threads", [1, 3])
def test_small_chunks_and_frames_and_threads_change_nothing(
    chain: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(delta, "CHUNK_WORDS", 101)
    monkeypatch.setattr(delta_format, "_FULL_FRAME_CHANGES", 150)
    steps = []
    for parent, child in pairwise(chain):
        steps.append(tmp_path / f"{child.name}.small")
        delta.encode(parent, child, steps[-1], threads=threads)
    delta.apply(chain[0], steps, tmp_path / "out", expected=state_hash(chain[3]), threads=threads)
    assert (tmp_path / "out").read_bytes() == chain[3].read_bytes()


def test_the_same_states_give_the_same_delta_whatever_the_threads(chain: list[Path], tmp_path: Path) -> None:
    delta.encode(chain[0], chain[1], tmp_path / "other", threads=4)
    assert (tmp_path / "other").read_bytes() == delta_to(chain[1]).read_bytes()


def test_a_foreign_layout_of_the_parent_does_not_matter(chain: list[Path], tmp_path: Path) -> None:
    foreign = {name: Tensor("BF16", words.shape, words.tobytes()) for name, words in reversed(sorted(state().items()))}
    assert write(tmp_path / "foreign", foreign, {"format": "pt"}) == state_hash(chain[0])
    delta.encode(tmp_path / "foreign", chain[1], tmp_path / "delta")
    assert (tmp_path / "delta").read_bytes() == delta_to(chain[1]).read_bytes()
    apply(tmp_path / "foreign", [delta_to(chain[1])], chain[1], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == chain[1].read_bytes()


@pytest.mark.parametrize("dtype", ["F16", "F32", "U8"])
def test_other_types_survive_the_trip(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "CHUNK_WORDS", 64)
    source = np.random.default_rng(0)
    first = {"x": tensor(source.integers(0, 256, 1003, np.uint8), "U8"), "w": tensor(weights(600, 1), dtype)}
    second = {name: one._replace(content=bytes([one.content[0] ^ 1]) + one.content[1:]) for name, one in first.items()}
    write(tmp_path / "0", first)
    expected = write(tmp_path / "1", dict(sorted(second.items())))
    assert delta.encode(tmp_path / "0", tmp_path / "1", tmp_path / "delta").num_changed == 2
    delta.apply(tmp_path / "0", [tmp_path / "delta"], tmp_path / "out", expected=expected)
    assert state_hash(tmp_path / "out") == expected


def test_an_empty_state(tmp_path: Path) -> None:
    expected = write_words(tmp_path / "0", {})
    delta.encode(tmp_path / "0", tmp_path / "0", tmp_path / "delta")
    delta.apply(tmp_path / "0", [tmp_path / "delta"], tmp_path / "out", expected=expected)
    assert (tmp_path / "out").read_bytes() == (tmp_path / "0").read_bytes()


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda words: words | {"new": weights(4, 0)}, "1 added, 0 removed, such as 'new'"),
        (lambda words: {"a": words["a"]}, "0 added, 2 removed, such as 'b'"),
        (lambda words: words | {"a": words["a"][:-2]}, r"'a' was BF16 \[1000\] and is BF16 \[998\]"),
        (lambda words: words | {"b": words["b"].reshape(-1)}, r"BF16 \[500, 4\] and is BF16 \[2000\]"),
    ],
)
def test_states_of_other_tensors_have_no_delta(
    chain: list[Path], tmp_path: Path, change: Callable[[Words], Words], reason: str
) -> None:
    write_words(tmp_path / "other", change(state()))
    with pytest.raises(DeltaError, match=reason):
        delta.encode(chain[0], tmp_path / "other", tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_a_tensor_of_another_type_has_no_delta(tmp_path: Path) -> None:
    for dtype in ("BF16", "F16"):
        write(tmp_path / dtype, {"w": tensor(weights(10, 0), dtype)})
    with pytest.raises(DeltaError, match="was BF16"):
        delta.encode(tmp_path / "BF16", tmp_path / "F16", tmp_path / "delta")


def refuse(parent: Path, deltas: list[Path], child: Path, reason: str) -> None:
    out = parent.with_name("out")
    with pytest.raises(BadRecord, match=reason):
        apply(parent, deltas, child, out)
    assert not out.exists()
    assert [path for path in out.parent.iterdir() if "staged" in path.name] == []


def test_a_wrong_parent_is_refused(chain: list[Path]) -> None:
    refuse(chain[1], [delta_to(chain[1])], chain[1], "starts from state|isn't there|than there are")
    refuse(chain[2], [delta_to(chain[2])], chain[2], "starts from state|isn't there|than there are")


def test_a_parent_that_differs_in_one_bit_is_told_from_a_wrong_delta(chain: list[Path]) -> None:
    damaged = bytearray(chain[0].read_bytes())
    damaged[-1] ^= 0x80  # a sign: the classes stay
    chain[0].write_bytes(damaged)
    refuse(chain[0], [delta_to(chain[1])], chain[1], "starts from state .* which is not the one given")


def test_a_parent_of_another_size_is_refused(chain: list[Path]) -> None:
    write_words(chain[0], {"a": weights(10, 0)})
    refuse(chain[0], [delta_to(chain[1])], chain[1], "a state of another size")


def test_deltas_in_another_order_or_with_a_gap_are_refused(chain: list[Path]) -> None:
    first, second, third = (delta_to(path) for path in chain[1:])
    refuse(chain[0], [second, first], chain[1], "don't follow each other")
    refuse(chain[0], [first, third], chain[3], "don't follow each other")
    refuse(chain[0], [first, first], chain[1], "don't follow each other")


def test_a_delta_to_another_version_is_refused(chain: list[Path]) -> None:
    refuse(chain[0], [delta_to(chain[1])], chain[2], "leads to state")


def test_a_delta_that_lies_about_where_it_leads_is_refused(chain: list[Path]) -> None:
    honest = delta_to(chain[1]).read_bytes()
    from blake3 import blake3

    forged = honest[:40] + state_hash(chain[2]) + honest[72:-32]
    delta_to(chain[1]).write_bytes(forged + blake3(forged).digest())
    refuse(chain[0], [delta_to(chain[1])], chain[2], "gives another state than it says")


def test_what_was_there_stays_when_a_delta_is_refused(chain: list[Path], tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"before")
    with pytest.raises(BadRecord):
        apply(chain[1], [delta_to(chain[1])], chain[1], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"before"


def test_a_refusal_in_the_middle_leaves_no_thread_at_work(chain: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "CHUNK_WORDS", 101)
    delta.encode(chain[0], chain[1], delta_to(chain[1]))
    before = threading.active_count()
    with pytest.raises(BadRecord):
        delta.apply(chain[2], [delta_to(chain[1])], chain[0].with_name("out"), expected=state_hash(chain[1]), threads=4)
    assert threading.active_count() == before


def test_files_that_cannot_be_read_or_written_are_store_errors(chain: list[Path], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="can't write"):
        delta.encode(chain[0], chain[1], tmp_path / "missing" / "delta")
    with pytest.raises(StoreError, match="can't read"):
        apply(chain[0], [tmp_path / "missing"], chain[1], tmp_path / "out")
    with pytest.raises(StoreError, match="can't write"):
        apply(chain[0], [delta_to(chain[1])], chain[1], tmp_path / "missing" / "out")


@pytest.mark.needs("root")
def test_a_full_disk_leaves_nothing(tmp_path: Path, small_disk: Callable[[int], SmallDisk]) -> None:
    disk = small_disk(2)
    words = {"w": weights(300_000, 0)}
    write_words(tmp_path / "0", words)
    expected = write_words(tmp_path / "1", step(words, 0))
    delta.encode(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    disk.fill(leave_bytes=2**18)
    with pytest.raises(StoreError, match="No space left"):
        delta.apply(tmp_path / "0", [tmp_path / "delta"], disk.path / "out", expected=expected)
    assert [path.name for path in disk.path.iterdir()] == ["ballast"]
    disk.free()
    delta.apply(tmp_path / "0", [tmp_path / "delta"], disk.path / "out", expected=expected)
