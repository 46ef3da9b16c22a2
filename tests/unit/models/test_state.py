import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2prl.errors import BadRecord, StoreError
from p2prl.models.state import MAX_HEADER_BYTES, Payload, open_state, parse_header, state_hash, write_payloads

Entries = dict[str, tuple[str, list[int], bytes]]


def payload(name: str, shape: tuple[int, ...], seed: int = 0) -> Payload:
    content = np.random.default_rng(seed).integers(0, 2**16, size=shape, dtype=np.uint16)
    return Payload(name, shape, lambda: content.reshape(-1).data)


def safetensors_bytes(tree: object, data: bytes) -> bytes:
    header = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return struct.pack("<Q", len(header)) + header + data


def laid_out(entries: Entries, metadata: dict | None = None) -> bytes:
    """A valid file with the tensors in the given order, as another writer might lay it out."""
    tree: dict = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (dtype, shape, content) in entries.items():
        tree[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return safetensors_bytes(tree, data)


def hash_of(folder: Path, content: bytes) -> bytes:
    path = folder / "state.safetensors"
    path.write_bytes(content)
    return state_hash(path)


def test_written_state_has_the_hash_that_was_returned(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.safetensors"
    digest = write_payloads(path, [payload("b", (3, 2)), payload("a", (5,)), payload("c", ()), payload("e", (0, 4))])
    assert state_hash(path) == digest
    with open_state(path) as (places, _):
        assert [place.name for place in places] == ["a", "b", "c", "e"]
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_the_order_of_writing_does_not_matter(tmp_path: Path) -> None:
    payloads = [payload("b", (3, 2)), payload("a", (5,))]
    first, second = tmp_path / "first", tmp_path / "second"
    assert write_payloads(first, payloads) == write_payloads(second, payloads[::-1])
    assert first.read_bytes() == second.read_bytes()


def test_the_hash_is_pinned(tmp_path: Path) -> None:
    content = laid_out({"w": ("BF16", [2, 1], b"\x01\x02\x03\x04")})
    assert hash_of(tmp_path, content).hex() == "e04639c3370a4debf51d1356021eb209c6b0bf37f3a8d038efa37dca23541762"


def test_layout_and_metadata_do_not_change_the_hash(tmp_path: Path) -> None:
    first: Entries = {"a": ("BF16", [2], b"1234"), "b": ("F32", [1], b"5678")}
    second = dict(reversed(first.items()))
    assert hash_of(tmp_path, laid_out(first)) == hash_of(tmp_path, laid_out(second, {"format": "pt"}))


@pytest.mark.parametrize(
    "other",
    [
        {"a": ("BF16", [2], b"1234"), "b": ("BF16", [2], b"5679")},
        {"a": ("BF16", [2], b"1234"), "c": ("BF16", [2], b"5678")},
        {"a": ("BF16", [2, 1], b"1234"), "b": ("BF16", [2], b"5678")},
        {"a": ("F16", [2], b"1234"), "b": ("BF16", [2], b"5678")},
        {"a": ("BF16", [4], b"12345678")},
    ],
)
def test_every_part_changes_the_hash(tmp_path: Path, other: Entries) -> None:
    entries: Entries = {"a": ("BF16", [2], b"1234"), "b": ("BF16", [2], b"5678")}
    assert hash_of(tmp_path, laid_out(entries)) != hash_of(tmp_path, laid_out(other))


def tensor(begin: int, end: int, shape: list | None = None, dtype: str = "BF16") -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 2] if shape is None else shape, "data_offsets": [begin, end]}


MALFORMED = {
    "empty": b"",
    "short": b"\x01\x02",
    "header past the end": struct.pack("<Q", 100) + b"{}",
    "header over the cap": struct.pack("<Q", MAX_HEADER_BYTES + 1) + b" " * (MAX_HEADER_BYTES + 1),
    "huge header claim": struct.pack("<Q", 2**64 - 1) + b"{}",
    "no JSON": safetensors_bytes(b"{", b""),
    "not UTF-8": safetensors_bytes(b'{"\xff": 1}', b""),
    "a list": safetensors_bytes([], b""),
    "deep nesting": safetensors_bytes(b"[" * 200_000, b""),
    "NaN": safetensors_bytes(b'{"a": NaN}', b""),
    "huge number": safetensors_bytes(b'{"a": ' + b"9" * 10_000 + b"}", b""),
    "duplicate name": safetensors_bytes(b'{"a": %s, "a": %s}' % ((json.dumps(tensor(0, 2)).encode(),) * 2), b"12"),
    "overlap": safetensors_bytes({"a": tensor(0, 4), "b": tensor(2, 6)}, b"123456"),
    "same place twice": safetensors_bytes({"a": tensor(0, 4), "b": tensor(0, 4)}, b"1234"),
    "hole": safetensors_bytes({"a": tensor(0, 2), "b": tensor(4, 6)}, b"123456"),
    "hole at the start": safetensors_bytes({"a": tensor(2, 4)}, b"1234"),
    "trailing bytes": safetensors_bytes({"a": tensor(0, 2)}, b"123"),
    "cut short": safetensors_bytes({"a": tensor(0, 4)}, b"123"),
    "unknown type": safetensors_bytes({"a": tensor(0, 2, dtype="BF17")}, b"12"),
    "type is a list": safetensors_bytes({"a": tensor(0, 2, dtype=[])}, b"12"),  # pyright: ignore[reportArgumentType]
    "negative offset": safetensors_bytes({"a": tensor(-2, 0)}, b""),
    "negative dimensions": safetensors_bytes({"a": tensor(0, 2, [-1, -1])}, b"12"),
    "true for one": safetensors_bytes({"a": tensor(0, 2, [True])}, b"12"),
    "fraction": safetensors_bytes({"a": tensor(0, 2, [1.0])}, b"12"),
    "shape too small": safetensors_bytes({"a": tensor(0, 4, [1])}, b"1234"),
    "too many dimensions": safetensors_bytes({"a": tensor(0, 2, [1] * 9)}, b"12"),
    "unknown key": safetensors_bytes({"a": tensor(0, 2) | {"extra": 1}}, b"12"),
    "missing key": safetensors_bytes({"a": {"dtype": "BF16", "shape": [1]}}, b"12"),
    "no name": safetensors_bytes({"": tensor(0, 2)}, b"12"),
    "long name": safetensors_bytes({"a" * 513: tensor(0, 2)}, b"12"),
    "surrogate name": safetensors_bytes(b'{"\\ud800": %s}' % json.dumps(tensor(0, 2)).encode(), b"12"),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_a_bad_record(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BadRecord):
        hash_of(tmp_path, content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(st.binary(max_size=200), st.integers(0, 400))
def test_any_header_is_parsed_or_refused(header: bytes, file_bytes: int) -> None:
    try:
        parse_header(header, file_bytes)
    except BadRecord:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 8) | st.floats() | st.sampled_from(["BF16", "dtype", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "b", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(JSON, st.integers(0, 12))
def test_any_tree_is_parsed_or_refused(tree: object, data_bytes: int) -> None:
    header = json.dumps(tree).encode()
    try:
        places = parse_header(header, 8 + len(header) + data_bytes)
    except BadRecord:
        return
    assert sum(place.end - place.begin for place in places) == data_bytes


def test_an_absent_file_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no-such"):
        state_hash(tmp_path / "no-such.safetensors")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    digest = write_payloads(path, [payload("a", (5,))])

    def full_disk() -> memoryview:
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="No space left"):
        write_payloads(path, [Payload("a", (5,), full_disk)])
    assert state_hash(path) == digest
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_without_the_wait_for_the_disk_a_file_is_the_same(tmp_path: Path) -> None:
    payloads = [payload("b", (3, 2)), payload("a", (4,), 1)]
    assert write_payloads(tmp_path / "scratch", payloads, durable=False) == write_payloads(tmp_path / "kept", payloads)
    assert (tmp_path / "scratch").read_bytes() == (tmp_path / "kept").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "scratch"]
