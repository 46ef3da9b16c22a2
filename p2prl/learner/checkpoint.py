"""Masters and optimiser state on disk, so that a restarted learner goes on where it was.

In: a policy, a folder. Out: files `STEP-HASH.safetensors` with their manifest `STEP-HASH.json`; the policy restored.

Invariants: the manifest is written last, so a checkpoint that has one is whole, whenever the process was killed; what
a manifest names is checked against its blake3 before it is used; a corrupt one is set aside under a new name, never
deleted, and the next newest is taken.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from p2prl.errors import StoreError
from p2prl.learner.policy import Policy
from p2prl.records import Version

KEEP = 2
MAX_BEHIND = 100
_RULE = 1


class Manifest(msgspec.Struct, frozen=True):
    rule: int
    version: Version
    data: str  # file name
    data_hash: str
    saved_at: float


def save(policy: Policy, folder: Path, now: float, keep: int = KEEP) -> Path:
    """Write a checkpoint of what the policy holds, drop the oldest over `keep`; returns the manifest's path."""
    version = policy.version
    stem = f"{version.step:010d}-{version.hash.hex()[:16]}"
    data, manifest = folder / f"{stem}.safetensors", folder / f"{stem}.json"
    staged, staged_manifest = folder / f".{data.name}.staged", folder / f".{manifest.name}.staged"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        save_file(_tensors(policy), staged)
        digest = _file_hash(staged)
        manifest.unlink(missing_ok=True)  # an older one of this very version describes other bytes
        _settle(staged, data)
        staged_manifest.write_bytes(msgspec.json.encode(Manifest(_RULE, version, data.name, digest, now)))
        _settle(staged_manifest, manifest)
        _prune(folder, keep)
    except (OSError, SafetensorError) as error:  # safetensors' own when the disk is full
        for path in (staged, staged_manifest):
            path.unlink(missing_ok=True)  # what was begun must not keep the disk full
        _prune(folder, keep)
        raise StoreError(f"can't write a checkpoint in {folder}: {error}; free some space") from error
    return manifest


def restore_newest(policy: Policy, folder: Path, wanted: Version | None = None) -> tuple[Version | None, list[str]]:
    """Load the newest whole checkpoint (of `wanted` alone, if given): (its version or None, what is to be said)."""
    found, notes = _newest(policy, folder, lambda version: wanted is None or version == wanted)
    if found is None:
        return None, notes
    version, saved = found
    policy.restore(saved.masters, saved.moments, version)
    return version, notes


def restore_moments(policy: Policy, folder: Path) -> tuple[Version | None, list[str]]:
    """The optimiser's state of the newest whole checkpoint of up to MAX_BEHIND steps before what the policy holds.

    The masters stay: a state some steps old is a better beginning than none, old weights are not.
    """
    now = policy.version.step
    found, notes = _newest(policy, folder, lambda version: now - MAX_BEHIND <= version.step < now)
    if found is None:
        return None, notes
    version, saved = found
    policy.restore({name: master.clone() for name, master in policy.masters.items()}, saved.moments, policy.version)
    return version, notes


@dataclass
class Saved:
    masters: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[int, dict[str, Any]] = field(default_factory=dict)


Found = tuple[Version, Saved]


def _newest(policy: Policy, folder: Path, wanted: Callable[[Version], bool]) -> tuple[Found | None, list[str]]:
    notes: list[str] = []
    for path in sorted(folder.glob("*.json"), reverse=True):
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
            if not wanted(manifest.version):
                continue
            saved = _load(policy, folder, manifest)
        except (OSError, msgspec.MsgspecError, SafetensorError, StoreError) as error:
            notes.append(_set_aside(path, str(error)[:200]))
            continue
        return (manifest.version, saved), notes
    return None, notes


def _tensors(policy: Policy) -> dict[str, Tensor]:
    tensors = {f"master/{name}": master for name, master in policy.masters.items()}
    state = policy.optimiser.state_dict()["state"]
    for number, name in enumerate(policy.masters):
        for key, value in state.get(number, {}).items():
            tensors[f"adam.{key}/{name}"] = torch.as_tensor(value)
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _load(policy: Policy, folder: Path, manifest: Manifest) -> Saved:
    path = folder / Path(manifest.data).name
    if manifest.rule != _RULE or _file_hash(path) != manifest.data_hash:
        raise StoreError("its data is not what its manifest says")
    saved = Saved()
    numbers = {name: number for number, name in enumerate(policy.masters)}
    for name, tensor in load_file(path).items():
        kind, _, parameter = name.partition("/")
        if parameter not in numbers or not (kind == "master" or kind.startswith("adam.")):
            raise StoreError(f"it is of another model or of an older p2prl: it has {name[:64]!r}")
        if kind == "master":
            saved.masters[parameter] = tensor
        else:
            saved.moments.setdefault(numbers[parameter], {})[kind.removeprefix("adam.")] = tensor
    for name, value in policy.masters.items():
        if name not in saved.masters or saved.masters[name].shape != value.shape:
            raise StoreError(f"it is of another model: {name!r} is missing or has another shape")
    return saved


def _set_aside(manifest: Path, why: str) -> str:
    number = 1
    while (aside := manifest.with_name(f"{manifest.stem}.corrupt-{number}")).exists():
        number += 1
    data = manifest.with_suffix(".safetensors")
    try:
        if data.exists():
            data.rename(data.with_name(f"{aside.name}.safetensors"))
        manifest.rename(aside)
    except OSError as error:
        return f"checkpoint {manifest.stem} is corrupt ({why}) and can't be set aside: {error}"
    return f"checkpoint {manifest.stem} is corrupt ({why}); set aside as {aside.name}"


def _prune(folder: Path, keep: int) -> None:
    """The manifest goes first: data without a manifest is never loaded."""
    manifests = sorted(folder.glob("*.json"), key=_saved_at, reverse=True)
    for path in manifests[keep:]:
        path.unlink(missing_ok=True)
    kept = {path.stem for path in manifests[:keep]}
    for path in folder.glob("*.safetensors"):
        if path.stem not in kept and ".corrupt-" not in path.name:
            path.unlink(missing_ok=True)


def _saved_at(path: Path) -> float:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest).saved_at
    except (OSError, msgspec.MsgspecError):
        return 0.0


def _file_hash(path: Path) -> str:
    digest = blake3()
    with path.open("rb") as file:
        while part := file.read(4 * 2**20):
            digest.update(part)
    return digest.hexdigest()


def _settle(staged: Path, target: Path) -> None:
    """The staged file's bytes reach the disk before its name does."""
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    staged.rename(target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
