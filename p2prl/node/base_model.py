"""Version 0 of the recipe's model on this disk, checked against the recipe.

In: a recipe, a home. Out: the weights file of version 0. Heavy sources are prepared in a child process, where an
objective that is more than the defaults is tried too.
"""

import asyncio
import json
import sys
from pathlib import Path

from p2prl.errors import ConfigError
from p2prl.paths import Home
from p2prl.recipe import Recipe

_KNOWN = ("gepo_vcpo", "gepo")  # nothing to find out about these, so torch need not be imported for it


async def prepare_base(recipe: Recipe, home: Home, progress: int | None = None, *, learns: bool = False) -> Path:
    """Raises ConfigError when the model can't be had or is another than the recipe's.

    `learns`: this node may lead, so it must be able to train by the recipe's objective; others need not know it.
    """
    objective = recipe.objective
    plain = objective.name in _KNOWN and not objective.options and objective.prox == "none"
    trial = () if plain or not learns else (recipe.model_dump_json(by_alias=True),)
    path, digest = await prepare_model(recipe.model.source, home, progress, *trial)
    if digest != recipe.model.hash:
        raise ConfigError(
            f"the model {recipe.model.source} here has hash {digest[:16]}, the recipe {recipe.name} wants "
            f"{recipe.model.hash[:16]}: it is another model or version. Use the very model that the recipe names"
        )
    return path


async def prepare_model(source: str, home: Home, progress: int | None = None, *trial: str) -> tuple[Path, str]:
    """(weights file, hash) of whatever lies at `source`, after the child's `trial`. Raises ConfigError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "p2prl.node.prepare_process", source, str(home.models), *trial,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=progress,
    )  # fmt: skip
    output, _ = await process.communicate()
    try:
        answer = json.loads(output.decode().strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise ConfigError(f"the model {source} can't be prepared; see the log") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return Path(answer["weights"]), answer["hash"]
