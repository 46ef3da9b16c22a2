"""Who may use the control API: the token, one-time login codes, the session cookie.

In: the token of state/api.token, codes that browsers bring. Out: yes or no.

A cookie is an expiry and its HMAC under a key made from the token: it outlives a restart, ends with the token, and
nothing is stored. All comparisons take constant time.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from p2prl.errors import ConfigError

CODE_S = 60.0
MAX_CODES = 16
SESSION_S = 30 * 86400.0
MIN_TOKEN_CHARS = 32


class Logins:
    """One-time codes (60 s) and sessions for one token."""

    def __init__(self, token: str) -> None:
        if len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(
                f"the API token has {len(token)} characters, {MIN_TOKEN_CHARS} at least; delete it for a new one"
            )
        self._token = token.encode()
        self._key = hashlib.blake2b(self._token, person=b"p2prl-session").digest()
        self._codes: dict[str, float] = {}

    def is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token)

    def issue_code(self, now: float) -> str:
        """A code for one login; the oldest one goes when there are too many."""
        self._codes = {code: until for code, until in self._codes.items() if until > now}
        while len(self._codes) >= MAX_CODES:
            del self._codes[next(iter(self._codes))]
        code = secrets.token_urlsafe(24)
        self._codes[code] = now + CODE_S
        return code

    def redeem(self, code: str, now: float) -> bool:
        """Whether the code is good; it is no more, after this."""
        found = [known for known in self._codes if hmac.compare_digest(known.encode(), code.encode())]
        return bool(found) and self._codes.pop(found[0]) > now

    def session(self, now: float) -> str:
        until = str(int(now + SESSION_S))
        return f"{until}.{self._mac(until)}"

    def is_session(self, cookie: str, now: float) -> bool:
        until, _, mac = cookie.partition(".")
        good = hmac.compare_digest(mac.encode(), self._mac(until).encode())
        return good and until.isascii() and until.isdigit() and len(until) < 16 and int(until) > now

    def _mac(self, until: str) -> str:
        return hmac.new(self._key, until.encode(), "sha256").hexdigest()


def ensure_token(path: Path) -> str:
    """The token in the file, made (32 random bytes, 0600) when there is none. ConfigError when others can read it."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"the API token {path} can be read by others. Run: chmod 600 {path}") from None
    except OSError as error:
        raise ConfigError(f"can't write the API token {path}: {error.strerror}") from None
    return path.read_text("utf-8").strip()
