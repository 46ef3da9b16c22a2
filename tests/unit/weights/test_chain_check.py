"""Manifests that contradict themselves, or name what their version can't be made of, are refused."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import BadRecord
from p2prl.records import PIECE_BYTES, Content
from p2prl.weights import chain
from p2prl.weights.contents import content_name
from tests import factories
from tests.factories import version

ANCHOR = factories.content(b"anchor", 1000)


def delta(step: int, base: int) -> Content:
    return factories.content(f"delta {base} {step}".encode(), 100, version(base))


@pytest.mark.parametrize(
    "contents",
    [
        (factories.content(b"a", 0),),
        (factories.content(b"a", 2**41),),
        (factories.content(b"a", 5 * 2**20),),
        (msgspec.structs.replace(factories.content(b"a", 10), pieces=()),),
        (msgspec.structs.replace(factories.content(b"a", 10), kind="patch"),),
        (msgspec.structs.replace(factories.content(b"a", 10), kind="delta"),),
        (msgspec.structs.replace(delta(5, 4), kind="anchor"),),
        (delta(6, 5),),
        (delta(5, 4), delta(5, 4)),
    ],
)
def test_a_manifest_that_lies_about_its_ways_is_refused(contents: tuple[Content, ...]) -> None:
    with pytest.raises(BadRecord, match="the manifest of version"):
        chain.check(factories.manifest(5, contents=contents))


@given(st.integers(1, 2**26), st.integers(1, 2**26))
@settings(deadline=None)
def test_sizes_must_fit_their_pieces_and_the_model(num_bytes: int, most: int) -> None:
    def of(pieces: tuple[bytes, ...]) -> Content:
        return Content("anchor", None, content_name(num_bytes, pieces), num_bytes, pieces)

    honest = of(tuple(bytes(32) for _ in range(-(-num_bytes // PIECE_BYTES))))
    try:
        chain.check(factories.manifest(5, contents=(honest,)), most)
        assert num_bytes <= most
    except BadRecord:
        assert num_bytes > most
    for extra in (honest.pieces[1:], (*honest.pieces, bytes(32))):
        with pytest.raises(BadRecord, match="pieces"):
            chain.check(factories.manifest(5, contents=(of(extra),)))


@pytest.mark.parametrize(
    "lie",
    [
        {"content_bytes": 1},
        {"content_bytes": ANCHOR.content_bytes - 1},
        {"pieces": (bytes(32),)},
        {"content_hash": bytes(32)},
    ],
)
def test_a_name_stands_for_one_size_and_one_list(lie: dict[str, Any]) -> None:
    """Nobody says of an honest content that it is shorter, or of other pieces."""
    false = msgspec.structs.replace(ANCHOR, **lie)
    with pytest.raises(BadRecord, match="a name that is not that of its pieces"):
        chain.check(factories.manifest(5, contents=(false,)))


def test_every_case_of_kind_and_base_is_covered() -> None:
    kinds, bases = ("anchor", "delta", "other"), (None, version(1))
    good = []
    for kind, base in itertools.product(kinds, bases):
        try:
            chain.check(factories.manifest(5, contents=(msgspec.structs.replace(ANCHOR, kind=kind, base=base),)))
            good.append((kind, base))
        except BadRecord:
            continue
    assert good == [("anchor", None), ("delta", version(1))]
