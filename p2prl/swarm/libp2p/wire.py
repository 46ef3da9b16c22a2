"""The bytes of calls and streams, apart from any I/O.

In: methods, bodies, errors. Out: bytes, and back. A request is the method's length (1 byte), the method, the body; a
reply is a status byte and a body, or a code, a zero byte and a message. Everything is capped before it is built.
"""

import re

from p2prl import errors
from p2prl.errors import BadRecord, PeerError, TooLarge
from p2prl.swarm.transport import MAX_CALL_BYTES

MAX_METHOD_BYTES = 128
MAX_ERROR_BYTES = 1024
SHARED = "p2prl/"  # methods that every swarm speaks begin so
_OK, _FAILED = b"\0", b"\1"
_CODE = re.compile(r"[a-z][a-z_]{0,39}")
_CLASSES: dict[str, type[PeerError]] = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PeerError)
}


def kind_of(name: str) -> str:
    """What traffic is counted under: the last component of a method or topic."""
    return name.rsplit("/", 1)[-1]


def encode_request(method: str, body: bytes) -> bytes:
    name = method.encode()
    if len(name) > MAX_METHOD_BYTES:
        raise TooLarge(f"a method's name has at most {MAX_METHOD_BYTES} bytes, not {len(name)}")
    if len(body) > MAX_CALL_BYTES:
        raise TooLarge(f"a request of {len(body)} bytes is over the limit of {MAX_CALL_BYTES}; send more by stream")
    return bytes([len(name)]) + name + body


def decode_request(data: bytes) -> tuple[str, bytes]:
    if len(data) > 1 + MAX_METHOD_BYTES + MAX_CALL_BYTES:
        raise TooLarge(f"a request of {len(data)} bytes is over the limit of {MAX_CALL_BYTES}")
    if not data or len(data) < 1 + data[0]:
        raise BadRecord("a request without a method")
    body = data[1 + data[0] :]
    if len(body) > MAX_CALL_BYTES:
        raise TooLarge(f"a request of {len(body)} bytes is over the limit of {MAX_CALL_BYTES}")
    try:
        return data[1 : 1 + data[0]].decode(), body
    except UnicodeDecodeError:
        raise BadRecord("a method's name that is not text") from None


def encode_reply(body: bytes) -> bytes:
    if len(body) > MAX_CALL_BYTES:
        raise TooLarge(f"the reply of {len(body)} bytes is over the limit of {MAX_CALL_BYTES}; ask by stream")
    return _OK + body


def encode_failure(error: PeerError) -> bytes:
    return _FAILED + encode_error(error)


def decode_reply(data: bytes, peer: str) -> bytes:
    """The body, or the PeerError that the peer sent."""
    if len(data) > 1 + MAX_CALL_BYTES:
        raise TooLarge(
            f"a reply of {len(data)} bytes is over the limit of {MAX_CALL_BYTES}",
            peer=peer,
        )
    if data[:1] == _OK:
        return data[1:]
    if data[:1] == _FAILED:
        raise decode_error(data[1:], peer)
    raise BadRecord("a reply without a status", peer=peer)


def encode_error(error: PeerError) -> bytes:
    return error.code.encode() + b"\0" + str(error).encode()[: MAX_ERROR_BYTES - 64]


def decode_error(data: bytes, peer: str) -> PeerError:
    code, _, message = data[:MAX_ERROR_BYTES].decode(errors="replace").partition("\0")
    kind = _CLASSES.get(code, PeerError)
    error = kind(message, peer=peer)
    if kind is PeerError and _CODE.fullmatch(code):
        error.code = code
    return error


def unknown_method(method: str) -> PeerError:
    error = PeerError(f"the method {method[:80]!r} is unknown here")
    error.code = "unknown_method"
    return error


def handler_failure(error: Exception) -> PeerError:
    """What a caller is told of an exception that a handler did not mean: its type, no insides."""
    failure = PeerError(f"the peer's handler failed: {type(error).__name__}")
    failure.code = "handler_failed"
    return failure
