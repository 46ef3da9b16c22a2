import asyncio
import signal
import subprocess
import sys
import time

import pytest

from p2prl.environments.judge import Judge, RanTooLong, RewardFailed
from p2prl.environments.messages import Failed, JudgeItem, JudgeReply, JudgeRequest, PromptsReply, PromptsRequest
from p2prl.environments.rewarder import LimitGuard, Limits, serve
from p2prl.errors import ConfigError
from p2prl.models.char_tokenizer import CharTokenizer
from p2prl.pipes import PipeClosed

GUARD = LimitGuard(Limits(call_s=0.1, memory_bytes=2**27))
# Zeros that no page is behind. More than this process may hold freed from earlier tests: that can be had again for nothing.
MUCH = 2**32


class Hostile:
    """An environment whose reward does what the answer says."""

    name = "hostile"
    version = "hostile==1"
    num_prompts = None

    def prompt(self, index: int) -> str:
        return "?" if index == 99 else f"{index}="

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        match answer:
            case "1":
                raise RuntimeError("broken")
            case "2":
                while True:
                    pass
            case "3":
                return len(bytes(MUCH)), ""
            case "4":
                raise SystemExit(3)
            case "5":
                return float("nan"), ""
            case "6":
                return "one", ""  # pyright: ignore[reportReturnType]
            case "7":
                return None  # pyright: ignore[reportReturnType]
            case "8":
                return self.reward(index, answer)
            case "9":
                self.swallow()
        return 1.0, "right"

    def swallow(self) -> None:
        while True:
            try:
                time.sleep(10)
            except Exception:  # noqa: BLE001, S112  # what careless third-party code does
                continue


class Requests:
    """A pipe with requests that were sent and replies that came."""

    def __init__(self, *requests: PromptsRequest | JudgeRequest) -> None:
        self.waiting = list(requests)
        self.replies: list = []

    def receive(self) -> PromptsRequest | JudgeRequest:
        if not self.waiting:
            raise PipeClosed("the daemon closed the pipe")
        return self.waiting.pop(0)

    def send(self, record: object) -> None:
        self.replies.append(record)


def test_whatever_a_reward_does_is_0_with_a_reason_and_the_loop_goes_on() -> None:
    tokenizer = CharTokenizer()
    answers = tuple(tuple(tokenizer.encode_prompt(str(number))) for number in range(10))
    prompt = tuple(tokenizer.encode_prompt("4="))
    pipe = Requests(JudgeRequest(1, (JudgeItem(4, prompt, answers),)), PromptsRequest(2, (5,)))
    serve(Judge(Hostile(), tokenizer, GUARD), pipe)
    judged, prompts = pipe.replies
    assert isinstance(judged, JudgeReply) and isinstance(prompts, PromptsReply)
    assert judged.items[0].prompt_ok
    assert judged.items[0].rewards == (1.0,) + (0.0,) * 9
    reasons = [
        "right", "RuntimeError: broken", "longer than 0.1 s", "more than 134217728 bytes", "SystemExit", "nan",
        "ValueError", "TypeError", "RecursionError", "longer than 0.1 s",
    ]  # fmt: skip
    for reason, detail in zip(reasons, judged.items[0].details, strict=True):
        assert reason in detail
    assert prompts.prompts[0].text == "5="


def test_a_prompt_the_model_cannot_read_fails_its_request_only() -> None:
    pipe = Requests(PromptsRequest(1, (99,)), PromptsRequest(2, (1,)))
    serve(Judge(Hostile(), CharTokenizer(), GUARD), pipe)
    assert isinstance(pipe.replies[0], Failed)
    assert pipe.replies[0].id == 1 and "'?'" in pipe.replies[0].message
    assert isinstance(pipe.replies[1], PromptsReply)


def test_memory_may_be_used_again_after_a_call() -> None:
    with pytest.raises(RewardFailed):
        GUARD(lambda: bytes(MUCH))
    assert len(bytes(MUCH)) == MUCH


def test_no_alarm_comes_after_a_call() -> None:
    assert GUARD(lambda: 5) == 5
    time.sleep(0.15)  # past the alarm, which would raise here


def test_what_no_alarm_interrupts_ends_the_process() -> None:
    """One call into C code that works for minutes; the daemon asks the next process without it."""
    code = """
import hashlib
from p2prl.environments import rewarder
rewarder._GRACE_S = 0.3
work = lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
rewarder.LimitGuard(rewarder.Limits(call_s=0.2))(work)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == -signal.SIGPROF


def test_a_config_error_passes() -> None:
    def refuse() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        GUARD(refuse)


class Unsayable(Exception):
    def __str__(self) -> str:
        raise KeyError("nested")


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("\ud800" + "x" * 10**6), r"\?xxx"), (Unsayable(), r"its text can't be made: KeyError")],
)
def test_whatever_is_raised_can_be_said(error: Exception, said: str) -> None:
    def work() -> None:
        raise error

    with pytest.raises(RewardFailed, match=said) as caught:
        GUARD(work)
    assert len(str(caught.value).encode()) < 2000


class Hanging(Exception):
    def __str__(self) -> str:
        time.sleep(10)
        return "never"


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseException("bare"),
        BaseExceptionGroup("tasks", [KeyboardInterrupt(), ValueError()]),
    ],
)  # fmt: skip
def test_nothing_that_is_raised_ends_the_process(error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(RewardFailed, match=f"raised {type(error).__name__}") as caught:
        GUARD(work)
    assert not isinstance(caught.value, RanTooLong)


async def _waits_in_a_task(wait) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(wait())
        await asyncio.sleep(10)


async def _sleeps() -> None:
    time.sleep(10)  # noqa: ASYNC251  # what is tested: a task that blocks


async def _turns_it_into_another() -> None:
    try:
        time.sleep(10)  # noqa: ASYNC251
    except BaseException as error:
        raise ValueError("no answer") from error


@pytest.mark.parametrize("wait", [_sleeps, _turns_it_into_another])
def test_a_timeout_in_a_group_of_tasks_is_a_timeout(wait) -> None:
    with pytest.raises(RanTooLong, match=r"longer than 0.1 s"):
        GUARD(lambda: asyncio.run(_waits_in_a_task(wait)))


def test_a_timeout_that_is_swallowed_or_comes_while_a_fault_is_told_is_one() -> None:
    def swallows() -> int:
        try:
            time.sleep(10)
        except BaseException:  # noqa: BLE001, S110  # what is tested
            pass
        return 1

    def raises() -> None:
        raise Hanging

    for work in (swallows, raises):
        with pytest.raises(RanTooLong, match=r"longer than 0.1 s"):
            GUARD(work)


def test_calls_share_the_time_that_they_are_given_together() -> None:
    guard = LimitGuard(Limits(call_s=20.0))
    began = time.monotonic()
    with guard.within(10.0):
        with guard.within(0.3):
            guard(lambda: time.sleep(0.1))
            with pytest.raises(RanTooLong, match=r"longer than 0.3 s"):
                guard(lambda: time.sleep(10))
        with guard.within(0.0), pytest.raises(RanTooLong, match="longer than 0 s"):
            guard(lambda: pytest.fail("begun though there is no time"))
        assert guard(lambda: 5) == 5
    assert time.monotonic() - began < 5.0
    with (
        guard.within(60.0),
        LimitGuard(Limits(call_s=0.1)).within(60.0),
        pytest.raises(RanTooLong, match=r"than 0.1 s"),
    ):
        GUARD(lambda: time.sleep(10))


def test_code_that_swallows_every_alarm_ends_with_its_process() -> None:
    code = """
import time
from p2prl.environments.rewarder import LimitGuard, Limits
def work():
    while True:
        try:
            time.sleep(10)
        except BaseException:  # what is tested: a task whose code catches all
            pass
LimitGuard(Limits(call_s=0.1))(work)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGALRM
