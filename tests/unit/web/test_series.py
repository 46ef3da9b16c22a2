"""Columns: bounded, of equal length, means that stay within the values."""

from hypothesis import given
from hypothesis import strategies as st

from p2prl.web.series import Series

ROWS = st.lists(st.dictionaries(st.sampled_from(["a", "b"]), st.floats(-1e6, 1e6)), max_size=60)


@given(ROWS, st.integers(1, 20), st.integers(4, 32))
def test_columns_are_bounded_and_equal(rows: list[dict[str, float]], points: int, max_rows: int) -> None:
    series = Series(max_rows)
    for at, row in enumerate(rows):
        series.record(float(at), row)
    columns = series.columns(("a", "b", "unknown"), 0.0, points)
    assert len(columns["t"]) <= min(points, max_rows)
    assert {len(column) for column in columns.values()} == {len(columns["t"])}
    assert columns["t"] == sorted(columns["t"])
    for name in ("a", "b"):
        known = [row[name] for row in rows if name in row]
        assert all(min(known) - 1e-6 <= value <= max(known) + 1e-6 for value in columns[name] if value is not None)
    assert set(columns["unknown"]) <= {None}


def test_what_json_has_no_word_for_is_left_out_and_since_cuts() -> None:
    series = Series()
    series.record(1.0, {"a": float("nan"), "b": 1.0})
    series.record(2.0, {"a": 2.0})
    assert series.columns(("a", "b"), 0.0, 10) == {"t": [1.0, 2.0], "a": [None, 2.0], "b": [1.0, None]}
    assert series.columns(("a",), 2.0, 10) == {"t": [2.0], "a": [2.0]}
