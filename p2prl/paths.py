"""Where a node keeps its things: XDG folders, or one folder with `--home` / `P2PRL_HOME`.

In: an optional home. Out: a `Home`. Making folders is a separate, explicit step; all are private to their owner (0700).

Weights lie by the swarm that they are of, so that a node that runs another recipe collects nobody else's: `Home.of`.
"""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs


@dataclass(frozen=True)
class Home:
    """A node's folders. `cache` is always safe to delete; `state` holds the identity: back it up."""

    config: Path
    state: Path
    cache: Path
    swarm: str = ""  # the one whose weights `states`, `blobs` and `checkpoints` are; "": above all of them

    @classmethod
    def locate(cls, home: str | os.PathLike | None = None) -> "Home":
        """The home of `--home`, else of P2PRL_HOME, else the XDG folders."""
        root = home or os.environ.get("P2PRL_HOME")
        if root:
            path = Path(root).expanduser().absolute()
            return cls(path / "config", path / "state", path / "cache")
        dirs = platformdirs.PlatformDirs("p2prl", appauthor=False)
        return cls(dirs.user_config_path, dirs.user_state_path, dirs.user_cache_path)

    def of(self, swarm: bytes) -> "Home":
        """The same home for one swarm; b"" for all."""
        return replace(self, swarm=swarm.hex()[:16])

    @property
    def command(self) -> str:
        """How a command for this home begins, as a user types it."""
        dirs = platformdirs.PlatformDirs("p2prl", appauthor=False)
        return "p2prl" if self.state == dirs.user_state_path else f"p2prl --home {shlex.quote(str(self.state.parent))}"

    def create(self) -> None:
        for folder in (self.config, self.state, self.cache):  # what lies above is nobody else's to change either
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        below = (self.logs, self.checkpoints, self.states, self.blobs, self.models)
        for folder in (self.config, self.state, self.cache, *below):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def config_file(self) -> Path:
        return self.config / "config.toml"

    @property
    def recipes(self) -> Path:
        return self.config / "recipes"

    @property
    def datasets(self) -> Path:
        """Data files that recipes name; the user puts them there."""
        return self.config / "datasets"

    @property
    def identity(self) -> Path:
        return self.state / "identity.key"

    @property
    def token(self) -> Path:
        return self.state / "api.token"

    @property
    def lock(self) -> Path:
        return self.state / "lock"

    @property
    def node_file(self) -> Path:
        """{pid, url, started_at, version} of the running daemon."""
        return self.state / "node.json"

    @property
    def database(self) -> Path:
        return self.state / "node.db"

    @property
    def checkpoints(self) -> Path:
        return self.state / "checkpoints" / self.swarm

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def log_file(self) -> Path:
        """The daemon's, one JSON object a line."""
        return self.logs / "p2prl.jsonl"

    @property
    def children_log(self) -> Path:
        """What the daemon's children print."""
        return self.logs / "children.log"

    @property
    def states(self) -> Path:
        """Versions' state files, by state hash."""
        return self.cache / "states" / self.swarm

    @property
    def blobs(self) -> Path:
        """Deltas, and anchors on their way, by content hash."""
        return self.cache / "blobs" / self.swarm

    @property
    def models(self) -> Path:
        return self.cache / "models"
