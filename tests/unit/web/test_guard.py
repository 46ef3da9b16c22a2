"""The door: host x origin x method x credential, and headers on every reply."""

import itertools

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.events import Ring
from p2prl.metrics import Metrics
from p2prl.web.app import Door, make_app
from p2prl.web.guard import HEADERS, Asked, refusal, rules
from p2prl.web.login import Logins
from tests.unit.web.nodes import TOKEN, Node

NOW = 1000.0
LOGINS = Logins(TOKEN)
HOSTS = {"127.0.0.1:8420": True, "localhost:8420": True, "LOCALHOST:8420": True, "[::1]:8420": True}
HOSTS |= {
    "127.0.0.1:8421": False,
    "127.0.0.1": False,
    "evil.example:8420": False,
    "localhost.evil.example:8420": False,
    "": False,
}
SITES = ("", "same-origin", "same-site", "cross-site", "none")
ORIGINS = ("", "http://{host}", "http://evil.example", "http://127.0.0.1:9999", "null")
CREDENTIALS = ("nothing", "token", "wrong token", "cookie", "wrong cookie")


def allowed(host: str, method: str, site: str, origin: str, credential: str) -> bool:
    """The rules of B3 in words of their own."""
    if not HOSTS[host]:
        return False
    if credential in ("nothing", "wrong token", "wrong cookie"):
        return False
    if credential == "token":
        return True
    same = site == "same-origin" if site else origin == "http://{host}"
    return same or (method == "GET" and site in ("", "none"))


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "DELETE", "OPTIONS"])
def test_the_matrix_of_the_api(method: str) -> None:
    cookies = {"cookie": LOGINS.session(NOW), "wrong cookie": LOGINS.session(NOW)[:-1] + "!"}
    for host, site, origin, credential in itertools.product(HOSTS, SITES, ORIGINS, CREDENTIALS):
        asked = Asked(
            method=method,
            path="/api/v1/stop",
            host=host,
            origin=origin.format(host=host),
            fetch_site=site,
            bearer={"token": TOKEN, "wrong token": "x" * 43}.get(credential),
            cookie=cookies.get(credential),
        )
        refused = refusal(asked, rules(8420), LOGINS, NOW)
        expected = allowed(host, "GET" if method == "GET" else "write", site, origin, credential)
        assert (refused is None) == expected, asked


@pytest.mark.parametrize(("path", "on_loopback", "remote"), [
    ("/healthz", True, True), ("/readyz", True, False), ("/metrics", True, False), ("/", True, True),
    ("/static/app.js", True, True), ("/api/v1/status", False, False), ("/apix", False, False),
])  # fmt: skip
def test_what_is_open_without_a_login(path: str, on_loopback: bool, remote: bool) -> None:
    asked = Asked(method="GET", path=path, host="localhost:8420")
    assert (refusal(asked, rules(8420), LOGINS, NOW) is None) == on_loopback
    assert (refusal(asked, rules(8420, remote=True), LOGINS, NOW) is None) == remote


def test_configured_hosts_get_the_port_when_they_lack_one() -> None:
    assert {"node.lan:8420", "node.lan:9000"} <= rules(8420, ("Node.lan", "node.lan:9000")).hosts


def test_a_session_ends() -> None:
    cookie = LOGINS.session(NOW)
    assert LOGINS.is_session(cookie, NOW)
    assert not LOGINS.is_session(cookie, NOW + 31 * 86400)
    assert not Logins("u" * 43).is_session(cookie, NOW)


@given(st.text())
def test_no_text_is_a_session_or_crashes(text: str) -> None:
    assert not LOGINS.is_session(text, NOW)
    assert not LOGINS.is_token(text)


def client(host: str = "127.0.0.1:8420") -> httpx2.AsyncClient:
    app = make_app(lambda: Node().status, Node(), Ring(), Metrics(), Door(TOKEN, 8420))
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url=f"http://{host}")


@pytest.mark.parametrize("path", ["/", "/healthz", "/nothing", "/static/app.js", "/static/../app.py", "/api/v1/status"])
async def test_every_reply_has_the_headers_and_no_cors(path: str) -> None:
    async with client() as http:
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}", "Origin": "http://evil.example"}):
            reply = await http.get(path, headers=headers)
            assert {name: reply.headers.get_list(name) for name in HEADERS} == {
                name: [value] for name, value in HEADERS.items()
            }
            assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_a_rebound_host_is_refused_even_with_the_token() -> None:
    async with client("evil.example:8420") as http:
        reply = await http.get("/api/v1/status", headers={"Authorization": f"Bearer {TOKEN}"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "bad_host")


async def test_a_login_code_works_once_and_gives_a_strict_cookie() -> None:
    async with client() as http:
        code = (await http.post("/api/v1/login-code", headers={"Authorization": f"Bearer {TOKEN}"})).json()["code"]
        crossing = await http.post("/login", json={"code": code}, headers={"Sec-Fetch-Site": "same-site"})
        assert crossing.status_code == 403
        same = {"Sec-Fetch-Site": "same-origin"}
        reply = await http.post("/login", json={"code": code}, headers=same)
        assert reply.status_code == 200
        cookie = reply.headers["set-cookie"].lower()
        assert cookie.startswith("p2prl_8420=") and "httponly" in cookie and "samesite=strict" in cookie
        assert (await http.get("/api/v1/status")).status_code == 200
        assert (await http.post("/api/v1/stop", headers={"Sec-Fetch-Site": "cross-site"})).status_code == 403
        assert (await http.post("/api/v1/stop", headers=same)).status_code == 202
        assert (await http.post("/login", json={"code": code}, headers=same)).status_code == 403
