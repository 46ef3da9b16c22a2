"""Lines: nothing that steers a terminal, one format for all loggers, repeats about peers folded, levels live."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl import logs
from p2prl.events import Ring
from p2prl.logs import FOLD_S, Folds, LogLine, Logs, fold, line_of, text_of


@contextmanager
def set_up(stream: io.StringIO, **options: object) -> Iterator[Logs]:
    made = logs.set_up(stream=stream, style=str(options.pop("style", "text")), **options)  # pyright: ignore
    try:
        yield made
    finally:
        made.close()


def test_a_line_reads_event_first_then_values() -> None:
    out = io.StringIO()
    with set_up(out):
        logs.get("rollout").info("group done", task="addition", reward=0.625, note="two words")
    stamp, text = out.getvalue().split(" ", 1)
    assert len(stamp) == 12 and text == "info  rollout   group done  task=addition reward=0.625 note='two words'\n"


@given(st.text(), st.text())
def test_no_control_character_gets_through(event: str, value: str) -> None:
    record = logging.LogRecord("hivemind", logging.INFO, "", 0, {"event": event, "value": value}, None, None)
    assert text_of(line_of(record)).isprintable()
    plain = logging.LogRecord("hivemind.p2p", logging.INFO, "", 0, "%s", (event,), None)
    assert text_of(line_of(plain)).isprintable()


def test_a_library_whose_format_does_not_fit_is_still_logged() -> None:
    record = logging.LogRecord("hivemind", logging.WARNING, "", 0, "%d peers", ("many",), None)
    assert line_of(record).event == "%d peers"


def test_libraries_are_levelled_down_and_in_the_same_format() -> None:
    out = io.StringIO()
    with set_up(out):
        logging.getLogger("hivemind.dht").info("chatter")
        logging.getLogger("hivemind.dht").warning("bad %s", "news")
        logging.getLogger("something").info("more chatter")
    assert [line.split(" ", 1)[1] for line in out.getvalue().splitlines()] == ["warn  hivemind.dht bad news"]


def test_the_file_is_one_json_object_a_line_with_the_traceback(tmp_path: Path) -> None:
    file, out = tmp_path / "logs/p2prl.jsonl", io.StringIO()
    with set_up(out, file=file):
        try:
            raise ValueError("boom\x1b[31m")
        except ValueError:
            logs.get("train").exception("step failed", step=3)
    (entry,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (entry["level"], entry["loop"], entry["event"], entry["step"]) == ("error", "train", "step failed", 3)
    assert "Traceback" in entry["exc"] and "\x1b" not in entry["exc"]
    assert out.getvalue().count("\n") == 1 and "exc=ValueError: boom" in out.getvalue()


def test_systemd_gets_a_priority_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    out = io.StringIO()
    with set_up(out, style="auto"):
        logs.get("web").warning("slow")
    assert out.getvalue() == "<4>warn  web       slow\n"


def test_the_ring_and_the_tail_get_the_lines() -> None:
    ring = Ring()
    with set_up(io.StringIO(), ring=ring) as made:
        logs.get("web").info("one")
        logs.get("train").error("two")
        assert [line.event for line in made.tail()] == ["one", "two"]
        assert [line.event for line in made.tail("warning")] == ["two"]
        assert [line.event for line in made.tail(component="web", since_s=60)] == ["one"]
        assert [line.event for line in made.tail(limit=1)] == ["two"]
    assert [msgspec.json.decode(event.data, type=LogLine).event for event in ring.recent(("log",))] == ["one", "two"]


def test_levels_change_while_running_and_go_back_at_the_end() -> None:
    before = logging.getLogger().handlers[:]
    out = io.StringIO()
    with set_up(out) as made:
        logs.get("train").debug("hidden")
        made.set_level("debug", "train")
        logs.get("train").debug("shown")
        logs.get("web").debug("hidden")
    assert "shown" in out.getvalue() and "hidden" not in out.getvalue()
    assert logging.getLogger().handlers == before


def line(event: str, number: int) -> LogLine:
    return LogLine(component="receive", level="warning", event=event, values={"peer": "x", "n": number})


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 40)), max_size=60))
def test_folding_loses_no_count(arrivals: list[tuple[str, float]]) -> None:
    folds: Folds = {}
    now, shown = 0.0, []
    for number, (event, pause_s) in enumerate(arrivals):
        now += pause_s
        folds, lines = fold(folds, line(event, number), now)
        shown += lines
    folds, told = logs.expire(folds, now + FOLD_S + 1)
    repeats = [str(each.values["repeated"]) for each in shown + told if "repeated" in each.values]
    first = [each for each in shown if "repeated" not in each.values]
    assert len(first) + sum(int(text[1:].split()[0]) for text in repeats) == len(arrivals)
    assert folds == {}


def test_a_thousand_complaints_about_a_peer_are_two_lines() -> None:
    out = io.StringIO()
    with set_up(out):
        for number in range(1000):
            logs.get("receive").warning("refused", peer=f"peer {number}")
    assert len(out.getvalue().splitlines()) == 2 and "x999 in" in out.getvalue()


def test_a_closed_terminal_does_not_stop_the_node() -> None:
    out = io.StringIO()
    with set_up(out) as made:
        out.close()
        logs.get("web").info("still here")
        assert made.tail()[-1].event == "still here"
