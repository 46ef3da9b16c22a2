"""Text for terminals: no control characters, whatever peers say; sizes and times."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.cli.render import peers_text, plain, size, span, status_text, table
from p2prl.status import HealthItem, NodeStatus, PeerRow, Status

WORDS = st.text(max_size=30)


@given(WORDS, WORDS, WORDS)
def test_no_control_character_reaches_the_terminal(name: str, role: str, message: str) -> None:
    text = peers_text([PeerRow(name=name, role=role, version=message)])
    text += status_text(
        Status(node=NodeStatus(name=name), health=(HealthItem(message=message, fix=role),)), datetime.now(UTC)
    )
    assert text.replace("\n", "").isprintable()


def test_columns_line_up() -> None:
    assert table(("A", "LONG"), [("wide cell", 1)], right=(1,)) == "A          LONG\nwide cell     1"


def test_long_cells_are_cut() -> None:
    assert len(plain("x" * 1000)) == 64


@pytest.mark.parametrize(("seconds", "text"), [
    (0.023, "23 ms"), (8, "8 s"), (723, "12m 3s"), (11520, "3h 12m"), (187200, "2d 4h"),
])  # fmt: skip
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1200, "1.2 kB"), (7.4e9, "7.4 GB"), (5e15, "5000.0 TB")]
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text
