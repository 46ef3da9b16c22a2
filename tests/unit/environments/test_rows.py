import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from p2prl.environments import rows
from p2prl.environments.rows import data_hash, find_data, read_rows
from p2prl.errors import ConfigError

ROWS = [{"question": f"q{number}", "answer": str(number), "choices": ["a", "b"]} for number in range(6)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


def test_json_lines(jsonl: Path) -> None:
    assert read_rows(jsonl) == ROWS


def test_parquet_and_both_kinds_of_arrow(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for name, make in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with make(str(tmp_path / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table)
    for name in ("rows.parquet", "stream.arrow", "file.arrow"):
        assert read_rows(tmp_path / name) == ROWS


def test_a_folder_is_its_data_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    for number in (2, 1):
        (folder / f"data-{number}.jsonl").write_text(json.dumps({"question": number}))
    assert read_rows(folder) == [{"question": 1}, {"question": 2}]
    assert find_data("saved", [tmp_path]) == folder
    before = data_hash(folder)
    (folder / "state.json").write_text('{"other": 1}')  # not a row
    assert data_hash(folder) == before
    (folder / "data-1.jsonl").write_text(json.dumps({"question": 3}))
    assert data_hash(folder) != before


def test_the_hash_is_of_the_bytes(jsonl: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.jsonl").write_bytes(jsonl.read_bytes())
    assert data_hash(jsonl) == data_hash(tmp_path / "copy.jsonl")
    (tmp_path / "copy.jsonl").write_bytes(jsonl.read_bytes() + b"\n")
    assert data_hash(jsonl) != data_hash(tmp_path / "copy.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b"\n \n", "has no rows"),
        (b'{"a": 1}\n{"a": ', "line 2 of .* is not JSON"),
        (b'{"a": 1}\n\xff\xfe', "line 2 of .* is not JSON"),
        (b"[" * 100_000, "line 1 of .* is not JSON"),
        (b"[1, 2]", "line 1 of .* is list, not an object"),
        (b" " * (2**24 + 2), "line 1 of .* is longer than"),
    ],
)
def test_a_broken_file_is_a_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(path)


@pytest.mark.parametrize("name", ["cut.parquet", "cut.arrow"])
def test_a_table_cut_short_is_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="can't be read"):
        read_rows(tmp_path / name)


def test_a_name_is_looked_up_in_the_folders_in_turn(jsonl: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    (second / "rows.jsonl").write_text("{}")
    (second / "other.jsonl").write_text("{}")
    folders = [tmp_path, second, tmp_path / "absent"]
    assert find_data("rows.jsonl", folders) == jsonl
    assert find_data("other.jsonl", folders) == second / "other.jsonl"
    assert find_data(str(second / "rows.jsonl"), []) == second / "rows.jsonl"
    with pytest.raises(ConfigError, match="no data file 'row.jsonl' here; did you mean 'rows.jsonl'"):
        find_data("row.jsonl", folders)
    with pytest.raises(ConfigError, match="there is no data file /nowhere/rows.jsonl"):
        find_data("/nowhere/rows.jsonl", folders)
    with pytest.raises(ConfigError, match="Put it into"):
        find_data("rows.jsonl", [tmp_path / "absent"])


def test_a_folder_of_splits_is_asked_for_one(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "both" / split).mkdir(parents=True)
        (tmp_path / "both" / split / "data.jsonl").write_text(json.dumps({"question": split}))
    (tmp_path / "both" / "dataset_dict.json").write_text("{}")
    with pytest.raises(ConfigError, match="name one of them: both/test, both/train"):
        read_rows(find_data("both", [tmp_path]))
    assert read_rows(find_data("both/train", [tmp_path])) == [{"question": "train"}]
    with pytest.raises(ConfigError, match="there is no data file"):
        find_data("both/../../secret", [tmp_path / "both"])


def test_an_empty_folder_and_another_ending_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        read_rows(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(ConfigError, match="ends in none of"):
        read_rows(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    "name", ["/dev/zero", "/dev/null", "~nobody-of-this-name/x", "/" + "x" * 300, "x/" * 3000, "a\0b/c"]
)
def test_a_name_that_is_no_data_file_is_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="data file|convert it"):
        data_hash(find_data(name, [tmp_path]))


def test_a_device_or_a_pipe_is_never_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "zero.jsonl"):
        with pytest.raises(ConfigError, match="a device or a pipe"):
            data_hash(find_data(name, [tmp_path]))


def test_a_folder_with_too_much_in_it_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_MAX_FOLDER_ENTRIES", 3)
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match="more than 3 things"):
        data_hash(tmp_path)
