"""From a home to the HTTP API of the daemon that runs in it, by urllib.

In: the home's node.json {pid, url} and api.token. Out: JSON replies; NoDaemon, Refused or P2prlError in words.

Proxies of the environment are never asked: the daemon is on this machine, and the token stays on it.
"""

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from p2prl.errors import NoDaemon, P2prlError, Refused
from p2prl.paths import Home

TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 45.0  # three missed pings
MAX_REPLY_BYTES = 32 * 2**20
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Decoded = TypeVar("Decoded")


class NodeFile(msgspec.Struct, frozen=True):
    """state/node.json, written by the daemon."""

    pid: int
    url: str


class Daemon:
    """The running daemon of a home."""

    def __init__(self, home: Home, node: NodeFile, token: str) -> None:
        self._home, self._token = home, token
        self.pid, self.url = node.pid, node.url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @classmethod
    def find(cls, home: Home) -> "Daemon":
        """Raises NoDaemon when none runs, Refused when its token can't be read."""
        try:
            node = msgspec.json.decode(home.node_file.read_bytes(), type=NodeFile)
        except (FileNotFoundError, msgspec.DecodeError):
            raise no_daemon(home) from None
        except OSError as error:
            raise Refused(f"can't read {home.node_file}: {error.strerror}. It belongs to another user?") from None
        if not is_running(node.pid) or urllib.parse.urlsplit(node.url).hostname not in LOOPBACK:
            raise no_daemon(home)
        try:
            token = home.token.read_text("utf-8").strip()
        except OSError as error:
            raise Refused(f"can't read the API token {home.token}: {error.strerror}") from None
        return cls(home, node, token)

    def get(self, path: str, **query: object) -> bytes:
        return self._ask("GET", path, query, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        return self._ask("POST", path, {}, json.dumps(body or {}).encode())

    def read(self, path: str, kind: type[Decoded], **query: object) -> Decoded:
        return decode(self.get(path, **query), kind)

    def events(self, types: str, since: int | None = None) -> Iterator[tuple[str, bytes]]:
        """(type, JSON) of each event until the daemon ends the stream."""
        query: dict[str, object] = {"types": types}
        if since is not None:
            query["since"] = since
        with self._open("GET", "/api/v1/events", query, None, STREAM_TIMEOUT_S) as reply:
            kind, data = "", b""
            try:
                for raw in reply:
                    line = raw.rstrip(b"\r\n")
                    if line.startswith(b"event: "):
                        kind = line[7:].decode()
                    elif line.startswith(b"data: "):
                        data += line[6:]
                    elif not line and kind:
                        yield kind, data
                        kind, data = "", b""
            except (TimeoutError, OSError, http.client.HTTPException):
                return

    def _ask(self, method: str, path: str, query: dict[str, object], body: bytes | None) -> bytes:
        with self._open(method, path, query, body, TIMEOUT_S) as reply:
            try:
                return reply.read(MAX_REPLY_BYTES)
            except (OSError, http.client.HTTPException):
                raise P2prlError(f"the daemon cut its reply to {path} short. Is it stopping? See: p2prl logs") from None

    def _open(
        self, method: str, path: str, query: dict[str, object], body: bytes | None, timeout_s: float
    ) -> http.client.HTTPResponse:
        url = self.url + path + (f"?{urllib.parse.urlencode(query)}" if query else "")
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, data=body, headers=headers, method=method)
        try:
            return self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, error.read(MAX_REPLY_BYTES)) from None
        except TimeoutError:
            raise self._silent() from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._silent() from None
            raise no_daemon(self._home) from None
        except (OSError, http.client.HTTPException):
            raise no_daemon(self._home) from None

    def _silent(self) -> P2prlError:
        return P2prlError(
            f"the daemon (pid {self.pid}) does not answer within {TIMEOUT_S:.0f} s. See {self._home.log_file}"
        )


def no_daemon(home: Home) -> NoDaemon:
    return NoDaemon(f"no p2prl daemon is running for {home.state}. Start one with: {home.command} run")


def is_running(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def decode(reply: bytes, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(reply, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise P2prlError(f"the daemon's reply makes no sense here: {error}. Is it of another release?") from None


def _refusal(status: int, body: bytes) -> P2prlError:
    try:
        error = msgspec.json.decode(body, type=dict[str, dict[str, str]])["error"]
        text = f"{error['message']}" + (f". {error['hint']}" if error.get("hint") else "")
    except (msgspec.DecodeError, KeyError):
        text = f"HTTP status {status}"
    return Refused(f"the daemon refused: {text}") if status in (401, 403) else P2prlError(f"the daemon said: {text}")
