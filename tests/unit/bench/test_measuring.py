"""A measuring child says what it found, and ends with its benchmark."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

CHILD = """
import asyncio, sys
from p2prl.bench.measuring import run
async def measure(folder):
    try:
        if (folder / "stay").exists():
            print("begun", flush=True)
            await asyncio.Event().wait()
        return {"folder": folder.name}
    finally:
        (folder / "tidied").touch()
sys.exit(run(measure))
"""


def _start(folder: Path) -> tuple[subprocess.Popen, int]:
    """(child, write end of the pipe it holds)"""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-c", CHILD, str(read_end), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(read_end,))
    os.close(read_end)
    return process, write_end


def test_the_result_is_one_json_line(tmp_path: Path) -> None:
    process, write_end = _start(tmp_path)
    output, _ = process.communicate(timeout=30)
    os.close(write_end)
    assert process.returncode == 0
    assert json.loads(output) == {"folder": tmp_path.name}


def test_sigterm_lets_it_tidy_up(tmp_path: Path) -> None:
    (tmp_path / "stay").touch()
    process, write_end = _start(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    os.close(write_end)
    process.stdout.close()
    assert (tmp_path / "tidied").exists()


def test_it_ends_when_the_benchmark_is_gone(tmp_path: Path) -> None:
    (tmp_path / "stay").touch()
    process, write_end = _start(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    os.close(write_end)  # as kill -9 of the benchmark does
    assert process.wait(30) == 130
    process.stdout.close()
    assert (tmp_path / "tidied").exists()
