"""Data files to rows: JSONL, parquet, arrow, and the folders that Hugging Face `datasets` saves.

In: a file or folder on this disk. Out: its hash, its rows as dictionaries. Whatever is wrong with it is a sentence that
names the line.

A folder's rows are those of its data files in the order of their names. Parquet and arrow need pyarrow (p2prl[data]).
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from p2prl.environments.catalogue import DATA_ENDINGS, data_files
from p2prl.environments.registry import nearest
from p2prl.errors import ConfigError

MAX_BYTES = 2**31
MAX_LINE_BYTES = 2**24
_MAX_FOLDER_ENTRIES = 10_000
_CHUNK_BYTES = 2**20
Row = dict[str, Any]


def find_data(name: str, folders: Sequence[Path]) -> Path:
    """An absolute path is taken as it is; any other name is looked up in `folders`, where `saved/train` is one too."""
    try:
        return _found(name, folders)
    except (OSError, ValueError, RuntimeError) as error:  # no such home, a name too long, no right to look
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"can't look for the data file {name[:200]!r}: {error}; correct its name") from error


def _found(name: str, folders: Sequence[Path]) -> Path:
    path = Path(name).expanduser()
    if path.is_absolute():
        if not path.exists():
            raise ConfigError(f"there is no data file {path}; correct the name in the recipe")
        return path
    known = {found.name: found for found in data_files(folders)}
    if name in known:
        return known[name]
    inside = [folder / path for folder in folders if ".." not in path.parts and (folder / path).exists()]
    if inside and len(path.parts) > 1:
        return inside[0]
    hint = f"; did you mean {nearest(name, known)!r}?" if known else "."
    where = folders[0] if folders else "a folder"
    raise ConfigError(f"there is no data file {name!r} here{hint} Put it into {where}, or name its whole path")


def parts(path: Path) -> list[Path]:
    """The data files of a folder, or the file itself. Devices and pipes, which may never end, are none."""
    if not path.is_dir():
        if path.suffix not in DATA_ENDINGS:
            raise ConfigError(f"{path} ends in none of {', '.join(DATA_ENDINGS)}; convert it")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is a device or a pipe, no data file; name another")
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in path.iterdir() if part.is_dir())
        raise ConfigError(
            f"{path} holds several splits; name one of them: {', '.join(f'{path.name}/{s}' for s in splits)}"
        )
    entries = list(itertools.islice(path.rglob("*"), _MAX_FOLDER_ENTRIES + 1))
    if len(entries) > _MAX_FOLDER_ENTRIES:
        raise ConfigError(f"{path} holds more than {_MAX_FOLDER_ENTRIES} things; name a folder of data files alone")
    found = sorted(part for part in entries if part.suffix in DATA_ENDINGS and part.is_file())
    if not found:
        raise ConfigError(f"{path} holds no {', '.join(DATA_ENDINGS)}; name a data file or a folder of such")
    return found


def data_hash(path: Path) -> str:
    """blake3 of the content; of a folder: of its data files' names and hashes."""
    try:
        total = sum(part.stat().st_size for part in parts(path))
        if total > MAX_BYTES:
            raise ConfigError(f"{path} has {total} bytes, more than the {MAX_BYTES} that fit; make it smaller")
        if not path.is_dir():
            return _file_hash(path)
        listing = [f"{part.relative_to(path).as_posix()} {data_hash(part)}" for part in parts(path)]
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}; check the file and its rights") from error
    return blake3("\n".join(listing).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    digest = blake3()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_rows(path: Path) -> list[Row]:
    """Every row; raises ConfigError for an empty or broken file."""
    found = [row for part in parts(path) for row in _read(part)]
    if not found:
        raise ConfigError(f"{path} has no rows; an environment needs at least one")
    return found


def _read(path: Path) -> Iterator[Row]:
    if path.suffix == ".jsonl":
        return _lines(path)
    return iter(_table(path))


def _lines(path: Path) -> Iterator[Row]:
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(f"line {number} of {path} is longer than {MAX_LINE_BYTES} bytes; is it JSON Lines?")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"line {number} of {path} is not JSON: {str(error)[:100]}; correct it") from error
            if not isinstance(row, dict):
                raise ConfigError(f"line {number} of {path} is {type(row).__name__}, not an object; correct it")
            yield row


def _table(path: Path) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{path.name} needs the package pyarrow; install it with: pip install 'p2prl[data]'"
        ) from error
    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.ParquetFile(path).read(use_threads=False).to_pylist()
        with pyarrow.OSFile(str(path), "rb") as source:
            try:
                reader = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:  # the other of arrow's two formats
                source.seek(0)
                reader = pyarrow.ipc.open_file(source)
            return reader.read_all().to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {str(error)[:200]}; is it whole?") from error
