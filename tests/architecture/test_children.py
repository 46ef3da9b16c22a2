"""Processes that p2prl starts don't run what lies in the current folder."""

import re
from pathlib import Path

import p2prl

HERE = Path(p2prl.__file__).parent


def test_every_python_that_is_started_leaves_the_current_folder_out() -> None:
    starts = [
        (str(file.relative_to(HERE)), after)
        for file in HERE.rglob("*.py")
        for after in re.findall(r"sys\.executable, (\S+)", file.read_text())
    ]
    assert len(starts) > 9 and {after for _, after in starts} == {'"-P",'}, starts
    assert " -P -m p2prl " in (HERE.parent / "bin" / "p2prl").read_text()
