"""Other Pythons of this machine: python -m tests.pythons 3.13  prints the path of one; exit 1 where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


def find(version: str) -> str | None:
    """On PATH, or among pyenv's. A pyenv shim that leads nowhere doesn't count."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = (pyenv / "versions").glob(f"{version}.*/bin/python")
    for candidate in (shutil.which(f"python{version}"), *map(str, sorted(installed))):
        if candidate is not None:
            said = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False).stdout
            if said.startswith(f"Python {version}."):
                return candidate
    return None


if __name__ == "__main__":
    found = find(sys.argv[1])
    print(found or f"no Python {sys.argv[1]} here")
    sys.exit(found is None)
