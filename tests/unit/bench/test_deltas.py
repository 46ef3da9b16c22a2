"""The schemes that ours stands beside lose nothing either: each one's file has all that makes the child of the parent."""

from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.bench import deltas
from tests.unit.weights.states import stepped, weights, write_words

SHAPE = (64, 300)


@pytest.fixture
def states(tmp_path: Path) -> tuple[Path, Path]:
    words = {"a": weights(SHAPE[0] * SHAPE[1], 0).reshape(SHAPE), "b": weights(500, 1)}
    after = {name: stepped(one.reshape(-1), 2, rate=1e-5).reshape(one.shape) for name, one in words.items()}
    write_words(tmp_path / "parent", words)
    write_words(tmp_path / "child", after)
    return tmp_path / "parent", tmp_path / "child"


def unpacked(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).readall()


@pytest.mark.parametrize("step", [1, 2])
def test_every_scheme_is_measured_and_no_file_is_left(states: tuple[Path, Path], tmp_path: Path, step: int) -> None:
    pair = deltas.measure(*states, tmp_path, rate=1e-5, step=step, threads=2)
    assert pair.num_bytes.keys() == set(deltas.SCHEMES)
    assert pair.wall_s.keys() == pair.cpu_s.keys() == {*deltas.SCHEMES, "apply"}
    assert all(seconds > 0 for seconds in pair.wall_s.values())
    assert (pair.step, pair.rate, pair.num_parameters) == (step, 1e-5, 64 * 300 + 500)
    assert 0 < pair.num_changed < pair.num_parameters
    assert pair.num_bytes["delta"] < pair.num_bytes["pulse"] < pair.num_bytes["zstd"] < pair.full_bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "parent"]


def test_zstd_and_xor_hold_the_whole_child(states: tuple[Path, Path], tmp_path: Path) -> None:
    parent, child = states
    deltas.zstd(child, tmp_path / "zstd", 1)
    deltas.xor_zstd(parent, child, tmp_path / "xor", 1)
    assert unpacked(tmp_path / "zstd") == child.read_bytes()
    mixed = np.frombuffer(unpacked(tmp_path / "xor"), np.uint8) ^ np.frombuffer(parent.read_bytes(), np.uint8)
    assert mixed.tobytes() == child.read_bytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.sets(st.integers(0, 40_000), max_size=200))
def test_pulse_tells_every_place_and_value(num_columns: int, chosen: set[int]) -> None:
    places = np.array(sorted(chosen), np.int64)
    values = np.arange(len(places), dtype=np.uint16)
    number, rows, columns, kept = deltas.pulse_tensor(places, values, num_columns)
    count = int.from_bytes(number, "little")
    assert count == len(places)
    assert kept == values.tobytes()
    if not count:
        return
    row_steps, column_steps = (np.frombuffer(one, f"<u{len(one) // count}").astype(int) for one in (rows, columns))
    found, row, column = [], 0, 0
    for number_of, (down, right) in enumerate(zip(row_steps, column_steps, strict=True)):
        column = right if down or number_of == 0 else column + right
        row += down
        found.append(row * num_columns + column)
    assert found == places.tolist()


def test_integers_are_as_narrow_as_they_can_be() -> None:
    for most, least, width in ((0, 1, 1), (255, 1, 1), (256, 1, 2), (255, 2, 2), (65536, 2, 4)):
        assert deltas.narrowest(np.array([0, most]), least_bytes=least).itemsize == width
