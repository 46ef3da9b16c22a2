"""The page and the control API as one ASGI app.

In: HTTP requests that passed the guard. Out: JSON of status records, metrics text, event streams, static files.

Routes are ux-facing and frozen by a test. Errors are `{"error": {"code", "message", "hint"}}`. Nothing here blocks:
what takes long is awaited, bodies are capped before they are read.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from p2prl.events import Ring
from p2prl.logs import LEVELS
from p2prl.metrics import Metrics
from p2prl.status import Status, encode
from p2prl.web.commands import Commands
from p2prl.web.guard import Guard, rules
from p2prl.web.login import CODE_S, SESSION_S, Logins
from p2prl.web.stream import BadQuery, Streams, kinds_of, since_of

STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 16 * 2**10
MAX_POINTS = 600
MAX_NAMES = 16
MAX_LOG_LINES = 1000
MAX_STEPS = 1000
MAX_STOP_S = 3600.0


@dataclass(frozen=True)
class Door:
    """How the port is bound and who may enter. `remote`: bound to more than loopback."""

    token: str
    port: int
    hosts: tuple[str, ...] = ()
    remote: bool = False

    @property
    def cookie(self) -> str:
        """Browsers share cookies between ports, and `demo` runs several pages on one host: so the port is in it."""
        return f"p2prl_{self.port}"


class LoginBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: str


class StopBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout_s: float = 60.0


class ApiError(HTTPException):
    def __init__(self, status: int, code: str, message: str, hint: str = "") -> None:
        super().__init__(status, message)
        self.code, self.hint = code, hint


def make_app(
    status: Callable[[], Status],
    commands: Commands,
    events: Ring,
    metrics: Metrics,
    door: Door,
    unix: Callable[[], float] = time.time,
) -> ASGIApp:
    """The guarded app. `status` is called for each request and must be cheap."""
    logins = Logins(door.token)
    api = Api(status, commands, events, metrics)
    entrance = Entrance(logins, door, unix)
    routes = [
        Route("/", page),
        Route("/login", page),
        Route("/login", entrance.login, methods=["POST"]),
        Route("/healthz", api.healthz),
        Route("/readyz", api.readyz),
        Route("/metrics", api.metrics),
        Route("/api/v1/login-code", entrance.code, methods=["POST"]),
        Route("/api/v1/status", api.status),
        Route("/api/v1/peers", api.peers),
        Route("/api/v1/weights", api.weights),
        Route("/api/v1/series", api.series),
        Route("/api/v1/steps", api.steps),
        Route("/api/v1/events", api.events),
        Route("/api/v1/logs", api.logs),
        Route("/api/v1/config", api.config),
        Route("/api/v1/recipe", api.recipe),
        Route("/api/v1/doctor", api.doctor, methods=["GET", "POST"]),
        Route("/api/v1/stop", api.stop, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _error, BadQuery: _bad_query})
    known = frozenset(route.path for route in routes)
    guard = Guard(
        app, rules=rules(door.port, door.hosts, remote=door.remote), logins=logins, cookie_name=door.cookie, unix=unix
    )
    return Counted(guard, metrics, known)


class Counted:
    """Counts requests by route and code; unknown paths are one label, so that nobody can make new series."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app, self._metrics, self.routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"]
                route = path if path in self.routes else "/static" if path.startswith("/static/") else "other"
                self._metrics.http_requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)


class Entrance:
    """Login codes for whoever holds the token, cookies for whoever brings a code."""

    def __init__(self, logins: Logins, door: Door, unix: Callable[[], float]) -> None:
        self._logins, self._door, self._unix = logins, door, unix

    async def code(self, request: Request) -> Response:
        return _json({"code": self._logins.issue_code(self._unix()), "expires_in_s": CODE_S})

    async def login(self, request: Request) -> Response:
        body = await _body(request, LoginBody)
        now = self._unix()
        if not self._logins.redeem(body.code, now):
            hint = "run `p2prl web` again for a new address"
            raise ApiError(403, "bad_code", "this login code is wrong, used or older than a minute", hint)
        response = _json({"ok": True})
        response.set_cookie(
            self._door.cookie, self._logins.session(now), max_age=int(SESSION_S), httponly=True, samesite="strict"
        )
        return response


class Api:
    """The reading routes and the commands."""

    def __init__(self, status: Callable[[], Status], commands: Commands, events: Ring, metrics: Metrics) -> None:
        self._status, self._commands, self._metrics = status, commands, metrics
        self._ring = events
        self._streams = Streams(events)

    async def healthz(self, request: Request) -> Response:
        return _json({"ok": True})

    async def readyz(self, request: Request) -> Response:
        status = self._status()
        if status.ready:
            return _json({"ok": True})
        return _json({"ok": False, "waiting_for": status.state.reasons or (status.state.now,)}, 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request) -> Response:
        return _json(self._status())

    async def peers(self, request: Request) -> Response:
        return _json(self._commands.peers())

    async def weights(self, request: Request) -> Response:
        return _json(self._commands.weights())

    async def series(self, request: Request) -> Response:
        names = tuple(name for name in request.query_params.get("name", "").split(",") if name)
        if not 1 <= len(names) <= MAX_NAMES:
            raise BadQuery(f"name must be 1 to {MAX_NAMES} names with commas between them")
        since_s = _number(request, "since_s", 21600.0, 0.0, 86400.0 * 366)
        points = int(_number(request, "points", MAX_POINTS, 1, MAX_POINTS))
        return _json(self._commands.series(names, since_s, points))

    async def steps(self, request: Request) -> Response:
        """The newest step events, oldest first: `StepRow`s."""
        limit = int(_number(request, "limit", 50, 1, MAX_STEPS))
        return _json([msgspec.Raw(event.data) for event in self._ring.recent(("step",), limit)])

    async def events(self, request: Request) -> Response:
        since, kinds = since_of(request), kinds_of(request)
        if self._streams.full:
            raise ApiError(503, "too_many_streams", "too many pages follow this node", "close one and try again")
        return self._streams.respond(since, kinds)

    async def logs(self, request: Request) -> Response:
        level = request.query_params.get("level", "debug")
        if level not in LEVELS:
            raise BadQuery(f"level must be one of {', '.join(LEVELS)}")
        since_s = _number(request, "since_s", 0.0, 0.0, 86400.0 * 366)
        limit = int(_number(request, "limit", 200, 1, MAX_LOG_LINES))
        return _json(self._commands.logs(level, request.query_params.get("component", ""), since_s, limit))

    async def config(self, request: Request) -> Response:
        return _json(self._commands.config())

    async def recipe(self, request: Request) -> Response:
        return _json(self._commands.recipe())

    async def doctor(self, request: Request) -> Response:
        return _json(await self._commands.doctor())

    async def stop(self, request: Request) -> Response:
        body = await _body(request, StopBody)
        if not 0 <= body.timeout_s <= MAX_STOP_S:
            raise BadQuery(f"timeout_s must be between 0 and {MAX_STOP_S:.0f}")
        self._commands.stop(body.timeout_s)
        return _json(self._status(), 202)


async def page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html; charset=utf-8")


def _json(value: object, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


Body = TypeVar("Body")


async def _body(request: Request, kind: type[Body]) -> Body:
    """The JSON body as a record; capped while it is read. An empty one is `{}`."""
    taken = bytearray()
    async for chunk in request.stream():
        taken += chunk
        if len(taken) > MAX_BODY_BYTES:
            raise ApiError(413, "too_large", f"the body is over {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(bytes(taken) or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(422, "bad_body", f"the body is wrong: {error}") from None


def _number(request: Request, name: str, default: float, least: float, most: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise BadQuery(f"{name} must be a number between {least:g} and {most:g}")
    return value


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "bad_method"}
    code = error.code if isinstance(error, ApiError) else codes.get(error.status_code, "error")
    hint = error.hint if isinstance(error, ApiError) else ""
    response = _json({"error": {"code": code, "message": error.detail, "hint": hint}}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _bad_query(request: Request, error: Exception) -> Response:
    return _json({"error": {"code": "bad_value", "message": str(error), "hint": ""}}, 400)
