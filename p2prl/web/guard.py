"""The door of the local port: who may ask what, decided before any route runs; headers on every reply.

In: an ASGI request. Out: the request passed on, or a refusal in JSON.

1. Host must be ours, with its port: a name that an attacker's DNS points at 127.0.0.1 is refused.
2. Everything under /api needs the bearer token, or a session cookie of a same-origin (or, for reads, direct) request.
   A write by cookie needs `Sec-Fetch-Site: same-origin`, or an Origin that equals the Host where a browser lacks it.
3. On a remote bind /metrics and /readyz need the token too. No CORS header is ever sent.
"""

import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from p2prl.web.login import Logins

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
READS = ("GET", "HEAD")
OPEN_EVERYWHERE = ("/healthz", "/login", "/")
OPEN_ON_LOOPBACK = ("/readyz", "/metrics")
STATIC = "/static/"


class Asked(msgspec.Struct, frozen=True):
    """What the decision looks at; header texts are as sent, "" when absent."""

    method: str
    path: str
    host: str
    origin: str = ""
    fetch_site: str = ""
    bearer: str | None = None
    cookie: str | None = None


class Refusal(msgspec.Struct, frozen=True):
    status: int
    code: str
    message: str
    hint: str = ""


class Rules(msgspec.Struct, frozen=True):
    """What is allowed here: Host texts in lower case, whether the bind is remote."""

    hosts: frozenset[str]
    remote: bool = False


def rules(port: int, hosts: tuple[str, ...] = (), *, remote: bool = False) -> Rules:
    """Loopback names and the configured ones (`name` or `name:port`), each with a port."""
    named = [host.lower() if _has_port(host) else f"{host.lower()}:{port}" for host in hosts]
    loopback = [f"{name}:{port}" for name in ("localhost", "127.0.0.1", "[::1]")]
    return Rules(frozenset([*loopback, *named]), remote)


def refusal(asked: Asked, rules: Rules, logins: Logins, now: float) -> Refusal | None:
    """None when the request may pass."""
    if asked.host.lower() not in rules.hosts:
        hint = "use the address that `p2prl web` prints, or add the name to web.hosts"
        return Refusal(403, "bad_host", "this page does not answer to that host name", hint)
    write = asked.method not in READS
    if asked.path == "/login" and write:
        return None if _same_origin(asked) else Refusal(403, "cross_site", "the login comes from another site")
    if _is_open(asked.path, rules) and not write:
        return None
    if asked.bearer is not None:
        return None if logins.is_token(asked.bearer) else Refusal(401, "bad_token", "the token is wrong", _HINT)
    if asked.cookie is not None and logins.is_session(asked.cookie, now):
        direct = not write and asked.fetch_site in ("", "none")
        return (
            None if direct or _same_origin(asked) else Refusal(403, "cross_site", "the request comes from another site")
        )
    return Refusal(403 if write else 401, "not_logged_in", "this needs the token or a login", _HINT)


_HINT = "run `p2prl web` on this machine and open the address it prints"


def _is_open(path: str, rules: Rules) -> bool:
    if path in OPEN_EVERYWHERE or path.startswith(STATIC):
        return True
    return path in OPEN_ON_LOOPBACK and not rules.remote


def _same_origin(asked: Asked) -> bool:
    if asked.fetch_site:
        return asked.fetch_site == "same-origin"
    return asked.origin.lower() in (f"http://{asked.host.lower()}", f"https://{asked.host.lower()}")


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdigit() and (not host.startswith("[") or "]:" in host)


class Guard:
    """The ASGI layer around every route; nothing may be mounted outside it."""

    def __init__(
        self, app: ASGIApp, *, rules: Rules, logins: Logins, cookie_name: str, unix: Callable[[], float] = time.time
    ) -> None:
        self._app, self._rules, self._logins = app, rules, logins
        self._cookie_name, self._unix = cookie_name, unix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # a websocket: there are none
            return await send({"type": "websocket.close", "code": 1008})

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _with_headers(message.get("headers", ()), scope["path"])}
            await send(message)

        refused = refusal(asked_of(scope, self._cookie_name), self._rules, self._logins, self._unix())
        if refused is None:
            return await self._app(scope, receive, guarded)
        await _refuse(refused, guarded)


def asked_of(scope: Scope, cookie_name: str) -> Asked:
    """The request's headers; one that comes twice where it decides something counts as wrong."""
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))

    def one(name: str) -> str:
        values = found.get(name, [""])
        return values[0] if len(values) == 1 else "\0"

    scheme, _, credential = one("authorization").partition(" ")
    return Asked(
        method=scope["method"],
        path=scope["path"],
        host=one("host"),
        origin=one("origin"),
        fetch_site=one("sec-fetch-site"),
        bearer=credential.strip() if scheme.lower() == "bearer" else None,
        cookie=_cookie("; ".join(found.get("cookie", [])), cookie_name),
    )


def _cookie(header: str, name: str) -> str | None:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return None
    return morsel.value if morsel else None


def _with_headers(headers: list[tuple[bytes, bytes]], path: str) -> list[tuple[bytes, bytes]]:
    fixed = dict(HEADERS)
    fixed["cache-control"] = "no-cache" if path.startswith(STATIC) else "no-store"
    ours = [(name.encode(), value.encode()) for name, value in fixed.items()]
    return [pair for pair in headers if pair[0].decode("latin-1").lower() not in fixed] + ours


async def _refuse(refused: Refusal, send: Send) -> None:
    error = {"code": refused.code, "message": refused.message, "hint": refused.hint}
    body = msgspec.json.encode({"error": error})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
