"""Deltas: any pair of states survives the trip, and whatever is not just that delta is refused and leaves no file."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2prl.errors import BadRecord
from p2prl.models.state import state_hash
from p2prl.weights import delta
from p2prl.weights.delta_format import HASH_BYTES
from tests.unit.weights.states import BYTES, Tensor, stepped, weights, write, write_words

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MOST_ELEMENTS = 300


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="p2prl-delta-") as path:
        yield Path(path)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, tuple[str, tuple[int, ...]]]:
    names = draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), unique=True, max_size=4))
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    return {name: (draw(st.sampled_from(sorted(BYTES))), draw(shapes)) for name in names}


@st.composite
def contents(draw: st.DrawFn, before: bytes | None, num_bytes: int) -> bytes:
    """Anything, or what was there before with a few bytes changed."""
    if before is None or draw(st.booleans()):
        return draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    changed = bytearray(before)
    for _ in range(draw(st.integers(0, 3)) if num_bytes else 0):
        changed[draw(st.integers(0, num_bytes - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


@st.composite
def chains(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Two to four states of the same tensors."""
    layout, states = draw(layouts()), []
    for _ in range(draw(st.integers(2, 4))):
        state = {}
        for name, (dtype, shape) in layout.items():
            before = states[-1][name].content if states else None
            state[name] = Tensor(dtype, shape, draw(contents(before, int(np.prod(shape)) * BYTES[dtype])))
        states.append(state)
    return states


@QUICK
@given(chains(), st.integers(1, 3))
def test_any_states_survive_the_trip_one_by_one_and_at_once(states: list[dict[str, Tensor]], threads: int) -> None:
    with folder() as home:
        paths, deltas = [], []
        for number, state in enumerate(states):
            # As foreign writers lay them out, except the last: what apply writes is in the order of the names.
            ordered = dict(sorted(state.items())) if number == len(states) - 1 else state
            paths.append(home / f"{number}.state")
            write(paths[-1], ordered)
        for parent, child in pairwise(paths):
            deltas.append(home / f"{child.name}.delta")
            info = delta.encode(parent, child, deltas[-1], threads=threads)
            header = delta.read_header(deltas[-1])
            assert (header.parent, header.child) == (state_hash(parent), state_hash(child))
            assert info.num_bytes == deltas[-1].stat().st_size
            assert (header.num_changed, header.num_parameters) == (info.num_changed, info.num_parameters)
        expected = state_hash(paths[-1])
        whole, last = home / "whole", home / "last"
        delta.apply(paths[0], deltas, whole, expected=expected, threads=threads)
        delta.apply(paths[-2], deltas[-1:], last, expected=expected, threads=threads)
        assert whole.read_bytes() == last.read_bytes()
        assert state_hash(whole) == expected
        delta.encode(whole, last, deltas[0], threads=threads)
        assert delta.read_header(deltas[0]).num_changed == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bytes]:
    """A parent, a delta of a step and the child's hash."""
    home = tmp_path_factory.mktemp("made")
    words = weights(3000, seed=1)
    write_words(home / "parent", {"w": words})
    expected = write_words(home / "child", {"w": stepped(words, seed=2, rate=1e-5)})
    delta.encode(home / "parent", home / "child", home / "delta")
    return home / "parent", home / "delta", expected


def refused(made: tuple[Path, Path, bytes], content: bytes) -> bool:
    """Whether it is; if not, the result must be the very child."""
    parent, _, expected = made
    with folder() as home:
        damaged, out = home / "delta", home / "out"
        damaged.write_bytes(content)
        try:
            delta.apply(parent, [damaged], out, expected=expected)
        except BadRecord:
            assert [path.name for path in home.iterdir()] == ["delta"]
            return True
        assert state_hash(out) == expected
        return False


def test_any_byte_flip_anywhere_is_refused(made: tuple[Path, Path, bytes]) -> None:
    content = made[1].read_bytes()
    assert not refused(made, content)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        assert refused(made, bytes(damaged)), f"byte {place} of {len(content)}"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_cut_off_or_added_is_refused(made: tuple[Path, Path, bytes], data: st.DataObject) -> None:
    content = made[1].read_bytes()
    begin = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(begin, len(content)))
    middle = data.draw(st.binary(max_size=40))
    changed = content[:begin] + middle + content[end:]
    assert refused(made, changed) == (changed != content)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_forger_who_makes_the_hashes_right_gets_no_other_state(
    made: tuple[Path, Path, bytes], data: st.DataObject
) -> None:
    forged = bytearray(made[1].read_bytes()[:-HASH_BYTES])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(forged) - 1))
        forged[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    hypothesis.event("refused" if refused(made, bytes(forged) + blake3(forged).digest()) else "the same state")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400))
def test_any_bytes_behind_a_right_header_are_refused(made: tuple[Path, Path, bytes], data: bytes) -> None:
    forged = made[1].read_bytes()[:88] + data
    assert refused(made, forged + blake3(forged).digest())
