"""Log lines: one record for all destinations, set up once by the process that runs the loops.

In: structlog loggers of our loops (`get("rollout")`), stdlib loggers of libraries. Out: the console (stderr), a rotated
JSON file, the newest lines in memory for `p2prl logs`, and "log" events in the ring.

Control characters never reach a terminal: text of peers may be in any value. Lines about peers (with a `peer` value)
that repeat are folded: the first shows, the others are counted and told once a minute. Tracebacks go to the file, and to
the console at debug only.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

import msgspec
import structlog

from p2prl.events import Ring
from p2prl.status import rfc3339

ROOT = "p2prl"
SHORT = {"warning": "warn", "critical": "crit"}
LEVELS = ("debug", "info", "warning", "error", "critical")
FOLD_S = 60.0
MAX_FOLDS = 256
MAX_VALUE_CHARS = 2000
FILE_BYTES = 8 * 2**20
NUM_FILES = 5
TAIL_LINES = 2000
_COLOURS = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31;1m"}
_JOURNAL = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
# Chatty at levels above ours; what they say matters only when it is bad.
_QUIET = ("hivemind", "vllm", "transformers", "uvicorn", "sse_starlette", "asyncio", "urllib3", "filelock", "httpx2")


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line; `values` are ours and peers' words, control characters already escaped."""

    t: str = ""
    level: str = "info"
    component: str = ""
    event: str = ""
    values: dict[str, str | int | float | bool | None] = {}
    exc: str = ""


class Fold(msgspec.Struct, frozen=True):
    """How often a line repeated since `since_s` (monotonic)."""

    line: LogLine
    since_s: float
    num_repeats: int = 0


Folds = dict[tuple[str, str, str], Fold]


def get(component: str) -> structlog.stdlib.BoundLogger:
    """The logger of a loop. Silent about debug and info until `set_up` has run."""
    return structlog.wrap_logger(
        logging.getLogger(f"{ROOT}.{component}"),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def escape(text: str) -> str:
    """The text with control characters (newlines, ANSI, bidirectional overrides) written out."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def fold(folds: Folds, line: LogLine, now: float) -> tuple[Folds, list[LogLine]]:
    """What to show now of a line about a peer, and of folds that have run out."""
    key = (line.component, line.level, line.event)
    folds, shown = expire(folds, now)
    known = folds.get(key)
    if known is not None:
        return folds | {key: Fold(line, known.since_s, known.num_repeats + 1)}, shown
    if len(folds) < MAX_FOLDS:
        folds = folds | {key: Fold(line, now)}
    return folds, [*shown, line]


def expire(folds: Folds, now: float) -> tuple[Folds, list[LogLine]]:
    """Folds older than FOLD_S end; those that repeated are told with the newest line's values."""
    ended = {key: held for key, held in folds.items() if now - held.since_s >= FOLD_S}
    if not ended:
        return folds, []
    told = [_told(held, now) for held in ended.values() if held.num_repeats]
    return {key: held for key, held in folds.items() if key not in ended}, told


def _told(held: Fold, now: float) -> LogLine:
    line = held.line
    text = f"x{held.num_repeats} in {now - held.since_s:.0f} s"
    return msgspec.structs.replace(line, values={**line.values, "repeated": text})


class Logs:
    """The destinations. `close` puts logging back as it was, so that tests and embedders can set up again."""

    def __init__(
        self, destinations: list[Callable[[LogLine], None]], level: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._destinations = destinations
        self._monotonic = monotonic
        self._lines: deque[LogLine] = deque(maxlen=TAIL_LINES)
        self._folds: Folds = {}
        self._lock = threading.RLock()
        self._handler = _Handler(self.take)
        self._root = logging.getLogger()
        self._before = (self._root.level, self._root.handlers[:])
        self._levels: dict[str, int] = {}
        self._root.handlers[:] = [self._handler]
        self._root.setLevel(logging.WARNING)
        self.set_level(level)
        self._own_ways: dict[str, tuple[list[logging.Handler], bool]] = {}
        for name in _QUIET:
            self._set(name, logging.WARNING)
            library = logging.getLogger(name)  # hivemind prints by itself: its lines shall come here instead
            self._own_ways[name] = (library.handlers[:], library.propagate)
            library.handlers[:], library.propagate = [], True

    def take(self, line: LogLine) -> None:
        """One line to every destination, folded when it is about a peer; from any thread."""
        with self._lock:
            shown = [line]
            if "peer" in line.values:
                self._folds, shown = fold(self._folds, line, self._monotonic())
            for each in shown:
                self._show(each)

    def flush(self) -> None:
        """Tell the folds that have run out; to be called now and then."""
        with self._lock:
            self._folds, told = expire(self._folds, self._monotonic())
            for line in told:
                self._show(line)

    def tail(self, level: str = "debug", component: str = "", since_s: float = 0.0, limit: int = 200) -> list[LogLine]:
        """The newest lines at `level` or above, oldest first; `since_s` seconds back, 0 for any time."""
        lowest = LEVELS.index(level)
        earliest = rfc3339(time.time() - since_s) if since_s else ""
        with self._lock:
            lines = list(self._lines)
        found = [
            line
            for line in lines
            if LEVELS.index(line.level) >= lowest and line.t >= earliest and component in ("", line.component)
        ]
        return found[-limit:] if limit > 0 else []

    def set_level(self, level: str, component: str = "") -> None:
        """Change the level of all our loops, or of one, while running."""
        self._set(f"{ROOT}.{component}" if component else ROOT, getattr(logging, level.upper()))

    def close(self) -> None:
        with self._lock:
            for held in self._folds.values():
                if held.num_repeats:
                    self._show(_told(held, self._monotonic()))
            self._folds = {}
        self._root.level, self._root.handlers[:] = self._before[0], self._before[1]
        self._root.setLevel(self._before[0])
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        for name, (handlers, propagate) in self._own_ways.items():
            logging.getLogger(name).handlers[:], logging.getLogger(name).propagate = handlers, propagate
        for destination in self._destinations:
            if isinstance(destination, _File):
                destination.close()

    def _set(self, name: str, level: int) -> None:
        logger = logging.getLogger(name)
        self._levels.setdefault(name, logger.level)
        logger.setLevel(level)

    def _show(self, line: LogLine) -> None:
        self._lines.append(line)
        for destination in self._destinations:
            destination(line)


def set_up(
    level: str = "info",
    *,
    file: Path | None = None,
    ring: Ring | None = None,
    stream: TextIO | None = None,
    style: str = "auto",
    extra: tuple[Callable[[LogLine], None], ...] = (),
) -> Logs:
    """Console on stderr, the JSON file and the ring. `style`: auto, text, json, journal; `extra`: more destinations."""
    console = stream or sys.stderr
    if style == "auto":
        style = "journal" if os.environ.get("JOURNAL_STREAM") else "text"
    destinations: list[Callable[[LogLine], None]] = [_Console(console, style, debug=level == "debug"), *extra]
    if file is not None:
        destinations.append(_File(file))
    if ring is not None:
        destinations.append(lambda line: _publish(ring, line))
    return Logs(destinations, level)


def text_of(line: LogLine, *, colour: bool = False, stamp: bool = True) -> str:
    """`12:04:31.220 info  rollout   group done  task=addition reward=0.62`."""
    when = f"{line.t[11:23]} " if stamp else ""
    values = " ".join(f"{key}={_value(value)}" for key, value in line.values.items())
    exc = f"  exc={line.exc.splitlines()[-1]}" if line.exc else ""
    level = SHORT.get(line.level, line.level)
    text = f"{when}{level:<5} {line.component:<9} {line.event}{'  ' + values if values else ''}{exc}"
    tint = _COLOURS.get(line.level, "") if colour else ""
    return f"{tint}{text}\x1b[0m" if tint else text


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if " " in text or not text else text


def line_of(record: logging.LogRecord) -> LogLine:
    """A stdlib record, of structlog or of a library, as a line with everything escaped and capped."""
    values = dict(record.msg) if isinstance(record.msg, dict) else {}
    event = values.pop("event", "") if isinstance(record.msg, dict) else _message(record)
    component = record.name.removeprefix(f"{ROOT}.")
    return LogLine(
        t=rfc3339(record.created),
        level=_level(record.levelno),  # not by name: hivemind renames levels
        component=component,
        event=_plain(event),
        values={
            escape(key): value if isinstance(value, (bool, int, float)) else _plain(value)
            for key, value in values.items()
        },
        exc="".join(escape(part) + "\n" for part in _traceback(record)).rstrip(),
    )


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # a library's format string that doesn't fit its arguments
        return str(record.msg)


def _traceback(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:
        return []
    return "".join(traceback.format_exception(record.exc_info[1])).rstrip().splitlines()


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    return escape(text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "...")


def _to_record(logger: logging.Logger, name: str, event: structlog.typing.EventDict) -> tuple[tuple, dict]:
    """Hand structlog's event to stdlib as the record's `msg`; exceptions as stdlib knows them."""
    exc_info = event.pop("exc_info", None)
    return (dict(event),), {"exc_info": exc_info}


def _publish(ring: Ring, line: LogLine) -> None:
    ring.publish("log", line)


class _Handler(logging.Handler):
    def __init__(self, take: Callable[[LogLine], None]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(line_of(record))


class _Console:
    def __init__(self, stream: TextIO, style: str, *, debug: bool) -> None:
        self._stream, self._style, self._debug = stream, style, debug
        self._colour = style == "text" and stream.isatty() and "NO_COLOR" not in os.environ
        self._colour = self._colour and os.environ.get("TERM") != "dumb"

    def __call__(self, line: LogLine) -> None:
        if self._style == "json":
            text = _json(line).decode()
        elif self._style == "journal":
            text = f"<{_JOURNAL[line.level]}>{text_of(line, stamp=False)}"
        else:
            text = text_of(line, colour=self._colour)
        if self._debug and line.exc and self._style != "json":
            text = f"{text}\n{line.exc}"
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the terminal went away: the file and the ring still have it
            return


class _File:
    """One JSON object a line. A full disk loses lines, never the node."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handler = RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=NUM_FILES, encoding="utf-8")
        self._handler.handleError = lambda record: None

    def __call__(self, line: LogLine) -> None:
        self._handler.handle(logging.LogRecord("", logging.INFO, "", 0, _json(line).decode(), None, None))

    def close(self) -> None:
        self._handler.close()


def _json(line: LogLine) -> bytes:
    """Flat, as log tools like it; our own keys win over a value of the same name."""
    flat = {**line.values, "t": line.t, "level": line.level, "loop": line.component, "event": line.event}
    return msgspec.json.encode({**flat, "exc": line.exc} if line.exc else flat)


def _level(number: int) -> str:
    return next((name for name in reversed(LEVELS) if number >= getattr(logging, name.upper())), LEVELS[0])
