"""Two runs of one program give the same, whatever it asks of chance and of the clock."""

import pytest

from p2prl.environments.sandbox import Sandbox

pytestmark = pytest.mark.needs("bwrap")


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


def output(sandbox: Sandbox, program: str) -> str:
    outcome = sandbox.run(program, b"")
    assert outcome.trouble == "", outcome
    return outcome.output.decode()


PROGRAM = """
import os, random, secrets, time, uuid, datetime, tempfile
print(random.random(), random.Random().random(), random.randrange(10**9), random.SystemRandom().random())
random.seed()
print(random.random(), random.sample(range(100), 5), os.urandom(5), secrets.token_hex(4), uuid.uuid4())
print(time.time(), time.time_ns(), time.monotonic(), time.perf_counter_ns(), time.process_time())
print(time.localtime(), time.gmtime(), time.ctime(), time.asctime(), time.strftime("%c"))
print(datetime.datetime.now(), datetime.date.today(), datetime.datetime.now(datetime.timezone.utc))
print(hash("text"), {"b", "a", "c"}, os.getpid(), os.getppid())
"""


def test_chance_and_clock_are_the_same_each_time(sandbox: Sandbox) -> None:
    first = output(sandbox, PROGRAM)
    assert first == output(sandbox, PROGRAM)
    assert "2023-11-14" in first and len(set(first.split())) > 30


def test_what_a_seed_gives_is_what_python_gives(sandbox: Sandbox) -> None:
    """The fixed generators change nothing for a program that seeds its own."""
    import random

    program = "import random\nr = random.Random(7)\nrandom.seed('text')\nprint(r.random(), random.random())"
    mine, other = random.Random(7), random.Random("text")
    assert output(sandbox, program) == f"{mine.random()} {other.random()}\n"


def test_a_clock_goes_on_so_that_waiting_ends(sandbox: Sandbox) -> None:
    program = (
        "import time\nbegin = time.time()\ntime.sleep(3600)\nwoke = time.monotonic()\n"
        "while time.monotonic() < woke + 0.01: pass\n"
        "print(3600 <= time.time() - begin < 3601)\n"
        "try:\n    time.sleep(-1)\nexcept ValueError as error: print(error)\n"
        "print(time.gmtime(0).tm_year, time.strftime('%Y', time.gmtime(0)), time.clock_gettime(time.CLOCK_REALTIME) > 1)"
    )
    assert output(sandbox, program) == "True\nsleep length must be non-negative\n1970 1970 True\n"


def test_dates_work_as_ever(sandbox: Sandbox) -> None:
    program = (
        "from datetime import datetime, timedelta\nimport pickle\n"
        "day = datetime(2024, 2, 28) + timedelta(days=2)\n"
        "print(day, day.isoformat(), datetime.strptime('2024-05-06', '%Y-%m-%d'), pickle.loads(pickle.dumps(day)) == day)"
    )
    assert output(sandbox, program) == "2024-03-01 00:00:00 2024-03-01T00:00:00 2024-05-06 00:00:00 True\n"
