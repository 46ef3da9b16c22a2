"""The node's Ed25519 key: its file, its peer id, its friendly name; signing and verifying.

In: a key file, a peer id. Out: signatures, verdicts on signatures.

The file is libp2p's protobuf private key (68 bytes), the one p2pd reads. An Ed25519 peer id contains its public key,
so any signature is checked from the peer id alone. The key never leaves this file and the process that read it.
"""

import os
from functools import lru_cache
from pathlib import Path

import base58
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from p2prl.errors import ConfigError
from p2prl.names import ADJECTIVES, ANIMALS

REMEMBERED_BYTES = 2048
_FILE_PREFIX = b"\x08\x01\x12\x40"  # protobuf: key type Ed25519, 64 bytes of data (seed + public key)
_PUBLIC_PREFIX = b"\x00\x24\x08\x01\x12\x20"  # identity multihash of the protobuf public key, 32 bytes of data


class Identity:
    """A private key and the peer id it proves."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id = base58.b58encode(_PUBLIC_PREFIX + self.public_key).decode()

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """A key from 32 bytes: for tests and simulations."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Read a key file. Raises ConfigError when it is missing, corrupt or readable by others."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise ConfigError(f"there is no identity {path} yet. The first `p2prl run` makes it") from None
        except OSError as error:
            raise ConfigError(
                f"can't read the identity {path}: {error.strerror}. Run p2prl as its owner, or use another --home"
            ) from None
        if len(data) != 68 or not data.startswith(_FILE_PREFIX):
            raise ConfigError(
                f"the identity {path} is corrupt ({len(data)} bytes, 68 expected). Restore it from your backup; "
                "or move it away for a new one, which starts without the old one's standing"
            )
        identity = cls(Ed25519PrivateKey.from_private_bytes(data[4:36]))
        if identity.public_key != data[36:]:
            raise ConfigError(f"the identity {path} is corrupt: its halves don't belong together. Restore your backup")
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"the identity {path} can be read by others. Run: chmod 400 {path}")
        return identity

    @classmethod
    def create(cls, path: Path) -> "Identity":
        """Make a key and write it, readable by its owner alone; never over an existing file."""
        return cls._write(cls(Ed25519PrivateKey.generate()), path)

    @classmethod
    def from_words(cls, words: str, path: Path) -> "Identity":
        """A key file that follows from words: for the reproducible identities of a demo, never for a real node."""
        return cls._write(cls.from_seed(blake3(words.encode()).digest()), path)

    @classmethod
    def _write(cls, identity: "Identity", path: Path) -> "Identity":
        seed = identity._key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
            file.write(_FILE_PREFIX + seed + identity.public_key)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(staged, path)  # fails when the file exists, unlike a rename
        finally:
            staged.unlink()
        return identity

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    @property
    def name(self) -> str:
        return friendly_name(self.peer_id)


def verify(peer_id: str, signature: bytes, message: bytes) -> bool:
    """Whether `peer_id` signed `message`. False, never an exception, for anything else."""
    if len(message) <= REMEMBERED_BYTES:
        return _verify_once(peer_id, signature, message)
    return _verify(peer_id, signature, message)


@lru_cache(maxsize=1024)
def _verify_once(peer_id: str, signature: bytes, message: bytes) -> bool:
    """Small records come again: votes in manifests, gossip after minutes, and to every node of a simulated swarm."""
    return _verify(peer_id, signature, message)


def _verify(peer_id: str, signature: bytes, message: bytes) -> bool:
    key = _public_key(peer_id)
    if key is None:
        return False
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def is_peer_id(text: str) -> bool:
    """Whether the text is an Ed25519 peer id."""
    return _public_key(text) is not None


def friendly_name(peer_id: str) -> str:
    """Two words that stay the same for a peer id, for people: not proof of anything."""
    digest = blake3(peer_id.encode()).digest()
    first, second = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
    return f"{ADJECTIVES[first % len(ADJECTIVES)]}-{ANIMALS[second % len(ANIMALS)]}"


@lru_cache(maxsize=4096)
def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    if not 46 <= len(peer_id) <= 64:
        return None
    try:
        raw = base58.b58decode(peer_id)
        if len(raw) != 38 or not raw.startswith(_PUBLIC_PREFIX):
            return None
        return Ed25519PublicKey.from_public_bytes(raw[6:])
    except ValueError:
        return None
