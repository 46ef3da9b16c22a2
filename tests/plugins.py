"""A package with environments, as pip would have installed it."""

from pathlib import Path


def install(site: Path, name: str, modules: dict[str, str], **environments: str) -> Path:
    """`modules`: name -> source; `environments`: name -> "module:Class". Returns `site`, for PYTHONPATH."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    entries = "".join(f"{key} = {value}\n" for key, value in environments.items())
    (info / "entry_points.txt").write_text(f"[p2prl.environments]\n{entries}")
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
    return site
