"""The key file: private, whole or refused, never overwritten; signatures checked from the peer id alone."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl import identity
from p2prl.errors import ConfigError


def test_a_key_survives_its_file(tmp_path: Path) -> None:
    made = identity.Identity.create(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o400
    loaded = identity.Identity.load(tmp_path / "key")
    assert loaded.peer_id == made.peer_id
    assert identity.verify(made.peer_id, loaded.sign(b"text"), b"text")
    with pytest.raises(FileExistsError):
        identity.Identity.create(tmp_path / "key")
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: b"", lambda d: d[:40] + bytes(28), lambda d: b"x" + d[1:]]
)
def test_a_corrupt_file_is_refused(tmp_path: Path, damage) -> None:
    identity.Identity.create(tmp_path / "key")
    data = damage((tmp_path / "key").read_bytes())
    (tmp_path / "bad").write_bytes(data)
    (tmp_path / "bad").chmod(0o400)
    with pytest.raises(ConfigError, match="corrupt"):
        identity.Identity.load(tmp_path / "bad")


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    identity.Identity.create(tmp_path / "key")
    (tmp_path / "key").chmod(0o444)
    with pytest.raises(ConfigError, match="chmod 400"):
        identity.Identity.load(tmp_path / "key")


@given(st.text(max_size=70), st.binary(max_size=70), st.binary(max_size=20))
def test_verify_never_raises_and_never_accepts_noise(peer: str, signature: bytes, message: bytes) -> None:
    assert not identity.verify(peer, signature, message)


def test_friendly_names_never_change() -> None:
    assert identity.friendly_name("12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8") == "neat-zebra"
