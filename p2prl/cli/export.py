"""`p2prl export`: a version as a folder that other software reads.

In: the node's home, a version's number, a new folder. Out: a Hugging Face folder with a card, or with --adapter a PEFT
folder; JSON or text about it. The work needs torch, so it runs in a child (`models/export.py`).
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from p2prl.cli.reading import home_of, print_json, reading, wants_json
from p2prl.errors import ConfigError, P2prlError, StoreError

if TYPE_CHECKING:
    from p2prl.cli.versions import Versions
    from p2prl.recipe import Recipe
    from p2prl.records import Version

MAX_ANSWER_BYTES = 2**20


class Answer(msgspec.Struct, frozen=True):
    """The child's line; `error` when it failed."""

    error: str = ""
    exit_code: int = 1
    folder: str = ""
    kind: str = ""
    weights_hash: str = ""
    num_bytes: int = 0
    files: tuple[str, ...] = ()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--version", "step", type=click.IntRange(min=0), metavar="N", help="Which; default: the newest.")
@click.option("--adapter", is_flag=True, help="Of a LoRA recipe: the adapters alone, as the peft library reads them.")
@reading
def export(ctx: click.Context, folder: Path, step: int | None, adapter: bool, as_json: bool) -> None:
    """Write a version as a Hugging Face folder, ready for AutoModelForCausalLM.from_pretrained.

    DIR is made anew. The daemon may run or not.
    """
    from p2prl.cli.versions import read_versions

    check_folder(folder)
    versions = read_versions(home_of(ctx))
    version = versions.version(versions.head.step if step is None else step)
    target = folder.absolute()
    with _scratch(target) as scratch:
        state = versions.state_of(version, scratch, lambda: base_of(versions)) if version.step else ""
        answer = run_child(request_of(versions, version, str(state), target, adapter))
    if wants_json(ctx, as_json):
        facts = {name: getattr(answer, name) for name in ("folder", "kind", "weights_hash", "num_bytes", "files")}
        print_json({"schema": 1, "version": str(version), "step": version.step, **facts})
        return
    kinds = {"whole": "weights", "merged": "weights with the adapters merged", "adapter": "adapters"}
    click.echo(
        f"{folder} has the {kinds[answer.kind]} of version {version} of {versions.recipe.name}: "
        f"{answer.num_bytes / 1e6:.1f} MB, {', '.join(answer.files)}"
    )


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """On the disk of the target, and gone afterwards."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{target.name[:100]}.", dir=target.parent)
    except OSError as error:
        raise ConfigError(f"can't write to {target.parent}: {error.strerror or error}; name another folder") from None
    with folder as path:
        yield Path(path)


def check_folder(folder: Path) -> None:
    """Before anything is read; the child looks again."""
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise ConfigError(f"can't look into {folder}: {error.strerror}; name another folder") from None
    if taken:
        raise ConfigError(f"{folder} is not empty; name a new folder, or empty this one first")


def base_of(versions: "Versions") -> Path:
    """Version 0's file, where deltas begin at it."""
    import asyncio

    from p2prl.node.base_model import prepare_base

    return asyncio.run(prepare_base(versions.recipe, versions.home))


def request_of(versions: "Versions", version: "Version", state: str, target: Path, adapter: bool) -> bytes:
    from p2prl.models.card import training_of
    from p2prl.models.lora_rule import lora_of

    recipe = versions.recipe
    training = training_of(
        version,
        versions.line[: version.step],
        swarm=recipe.swarm_id.hex(),
        recipe_name=recipe.name,
        recipe_text=versions.recipe_text,
        environment=" ".join([recipe.environment.name, recipe.environment.version]).strip(),
        objective=describe_objective(recipe),
        source=recipe.model.source,
    )
    request = {
        "source": recipe.model.source,
        "base_hash": recipe.model.hash,
        "models_cache": str(versions.home.models),
        "state": state,
        "target": str(target),
        "adapter": adapter,
        "lora": lora_of(recipe.learner),
        "training": training,
    }
    return msgspec.json.encode(request)


def describe_objective(recipe: "Recipe") -> str:
    options = recipe.objective.model_dump(exclude={"name"})
    own = options.pop("options")
    said = ", ".join(f"{name} = {value}" for name, value in (options | own).items() if value is not None)
    return f"{recipe.objective.name}: {said}"


def run_child(request: bytes) -> Answer:
    """Progress goes to our stderr. Raises what the child says."""
    command = [sys.executable, "-P", "-m", "p2prl.models.export"]
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, check=False)
    try:
        answer = msgspec.json.decode(done.stdout[-MAX_ANSWER_BYTES:].strip().splitlines()[-1], type=Answer)
    except (IndexError, msgspec.DecodeError):
        if done.returncode == 130:
            raise KeyboardInterrupt from None
        raise StoreError(f"the export ended with code {done.returncode}; what it said is above") from None
    if answer.error:
        failure = next((kind for kind in (ConfigError,) if kind.exit_code == answer.exit_code), P2prlError)
        raise failure(answer.error)
    return answer
