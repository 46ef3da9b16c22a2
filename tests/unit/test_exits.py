import signal
import subprocess
import sys

import pytest

from p2prl.exits import KILLED, MEANINGS, describe_exit


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, KILLED),
        (-24, "ended by SIGXCPU: it used more of the processor than it may"),
        (-25, "ended by SIGXFSZ: it wrote a larger file than it may"),
        (-27, "ended by SIGPROF: it used more of the processor than it may, in code that nothing can interrupt"),
        (-int(signal.SIGUSR1), "ended by SIGUSR1"),
        (-63, "ended by signal 63"),
    ],
)
def test_an_end_is_said_in_words(code: int, says: str) -> None:
    assert describe_exit(code) == says


def test_each_meaning_is_of_a_signal_that_there_is() -> None:
    assert set(MEANINGS) <= {one.name for one in signal.Signals}


def test_what_a_process_really_ends_with() -> None:
    done = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 27)"], check=False)
    assert describe_exit(done.returncode).startswith("ended by SIGPROF")
