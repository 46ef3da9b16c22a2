"""Frames on a socket pair between the daemon and its children: 4-byte length, then one msgpack record.

In: records and a socket. Out: records. The socket is inherited (no path, nobody else can open it), so the other end is
trusted; lengths are capped all the same, since a child may be mad. Large things travel as files, not here.
"""

import asyncio
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from p2prl.errors import P2prlError

T = TypeVar("T")
MAX_FRAME_BYTES = 256 * 2**20
_HEADER = struct.Struct("<I")


class PipeClosed(P2prlError):
    """The other end is gone or speaks nonsense."""


class BlockingPipe(Generic[T]):
    """A child's end: `receive` blocks, `send` writes at once. `kind` is the (tagged union) type that arrives."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    def inherited(cls, fd: int, kind: Any) -> "BlockingPipe[T]":
        return cls(socket.socket(fileno=fd), kind)

    def fileno(self) -> int:
        return self._socket.fileno()

    def detach(self) -> socket.socket:
        """The socket itself, for who goes on with it in another way."""
        return self._socket

    def send(self, record: object) -> None:
        data = self._encoder.encode(record)
        try:
            self._socket.sendall(_HEADER.pack(len(data)) + data)
        except OSError as error:
            raise PipeClosed(f"the daemon is gone: {error}") from None

    def receive(self) -> T:
        (length,) = _HEADER.unpack(self._read(_HEADER.size))
        return self._decoder.decode(self._read(_checked(length)))

    def _read(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self._socket.recv(min(length - len(parts), 2**20))
            except OSError as error:
                raise PipeClosed(f"the daemon is gone: {error}") from None
            if not part:
                raise PipeClosed("the daemon closed the pipe")
            parts += part
        return bytes(parts)


class AsyncPipe(Generic[T]):
    """The daemon's end, on its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def open(cls, sock: socket.socket, kind: Any) -> "AsyncPipe[T]":
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, kind)

    async def send(self, record: object) -> None:
        data = self._encoder.encode(record)
        try:
            self._writer.write(_HEADER.pack(len(data)) + data)
            await self._writer.drain()
        except OSError as error:
            raise PipeClosed(f"the child is gone: {error}") from None

    async def receive(self) -> T:
        try:
            (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            data = await self._reader.readexactly(_checked(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise PipeClosed(f"the child is gone: {error}") from None
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise PipeClosed(f"the child speaks nonsense: {error}") from None

    def close(self) -> None:
        self._writer.close()


def _checked(length: int) -> int:
    if length > MAX_FRAME_BYTES:
        raise PipeClosed(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return length
