"""Which environments there are on this machine, by SOURCE:NAME.

In: what is installed, folders of data files. Out: names with what each is; nothing of an environment's own code runs,
except reasoning-gym's list.
"""

import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import distributions, entry_points
from pathlib import Path

import msgspec

GROUP = "p2prl.environments"
DATA_ENDINGS = (".jsonl", ".parquet", ".arrow")
_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # what `datasets` writes into a folder


class Entry(msgspec.Struct, frozen=True):
    name: str  # SOURCE:NAME
    version: str
    about: str = ""


def entries(folders: Sequence[Path] = ()) -> list[Entry]:
    """All of them, in the order of their sources."""
    found = [Entry("builtin:addition", _version("p2prl"), "two numbers, answers lowest digit first"), *_gym()]
    found += [Entry(f"dataset:{path.name}", "", f"a data file in {path.parent}") for path in data_files(folders)]
    found += [Entry(f"verifiers:{name}", version, "made for verifiers") for name, version in _tasksets()]
    found += [Entry(f"{source}:{name}", version, "a plug-in") for source, name, version in _plugins()]
    return found


def names(folders: Sequence[Path] = ()) -> list[str]:
    return [entry.name for entry in entries(folders)]


def plugin_sources() -> set[str]:
    return {source for source, _, _ in _plugins()}


def data_files(folders: Sequence[Path]) -> list[Path]:
    """The first of each name; a folder that holds one of these, or what `datasets` saves, counts as a file."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.suffix in DATA_ENDINGS or any((path / name).is_file() for name in _SAVED):
                found.setdefault(path.name, path)
    return list(found.values())


def source_of(distribution: str) -> str:
    """A package's name as a source: one spelling of it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


@cache
def _gym() -> tuple[Entry, ...]:
    version = _version("reasoning-gym")
    if not version:
        return ()
    from reasoning_gym.factory import DATASETS

    from p2prl.environments.reasoning_gym import UNSAFE

    def about(name: str) -> str:
        if name == "composite":
            return "several at once; needs the parameter datasets"
        return UNSAFE.get(name, "")

    return tuple(Entry(f"reasoning_gym:{name}", version, about(name)) for name in sorted(DATASETS))


def _tasksets() -> list[tuple[str, str]]:
    """Installed packages that need verifiers; whether one has a task set shows only when it is loaded."""
    found = []
    for distribution in distributions():
        needs = [re.split(r"[^A-Za-z0-9_.-]", need, maxsplit=1)[0] for need in distribution.requires or ()]
        if "verifiers" in needs and "extra" not in "".join(distribution.requires or ()):
            name = source_of(distribution.name).replace("-", "_")
            found.append((name, f"{distribution.name}=={distribution.version}"))
    return sorted(found)


def _plugins() -> list[tuple[str, str, str]]:
    """(source, name, package==version) of every entry point of the group."""
    found = []
    for point in entry_points(group=GROUP):
        package = point.dist
        source, version = (
            (source_of(package.name), f"{package.name}=={package.version}") if package else ("unknown", "")
        )
        found.append((source, point.name, version))
    return sorted(found)


def _version(package: str) -> str:
    from p2prl.environments.registry import package_version

    found = package_version(package)
    return found if found.startswith(f"{package}==") else ""
