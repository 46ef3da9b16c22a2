"""What the commands `p2prl env` find out, in a process of its own with PYTHONHASHSEED=0.

In: one question as JSON on stdin. Out: one answer, or `Failed`, as JSON on stdout; what an environment prints goes to
stderr. Prompts and rewards run inside the same guard as a node's.

    python -m p2prl.environments.workbench
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from p2prl.environments import catalogue
from p2prl.environments.guarded import Guarded
from p2prl.environments.judge import RewardFailed
from p2prl.environments.messages import Failed
from p2prl.environments.mixture import Mixture, converses
from p2prl.environments.parameters import parameters
from p2prl.environments.registry import HELD_OUT_FROM, Environment, full_name
from p2prl.environments.rows import data_hash, find_data
from p2prl.environments.spec import Spec
from p2prl.errors import ConfigError, P2prlError

NUM_CHECKED = 100
NUM_AGAIN = 10  # whose answers are judged twice
WRONG = ("", "I don't know.", "7", "\ufffd" * 50)
T = TypeVar("T")


class ListQuestion(msgspec.Struct, frozen=True, tag=True):
    folders: tuple[str, ...] = ()


class ShowQuestion(msgspec.Struct, frozen=True, tag=True):
    spec: Spec  # of one member, its version open
    count: int = 3


class ScoreQuestion(msgspec.Struct, frozen=True, tag=True):
    """`answers`: a text for each turn."""

    spec: Spec
    index: int
    answers: tuple[str, ...]


class CheckQuestion(msgspec.Struct, frozen=True, tag=True):
    spec: Spec


Question = ListQuestion | ShowQuestion | ScoreQuestion | CheckQuestion


class ListAnswer(msgspec.Struct, frozen=True, tag=True):
    environments: tuple[catalogue.Entry, ...]


class Shown(msgspec.Struct, frozen=True):
    """`said[t]`: what the environment said to `answers[t]`; `answer` is the first of those."""

    index: int
    prompt: str
    answer: str | None
    reward: float | None  # of those answers
    answers: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


class ShowAnswer(msgspec.Struct, frozen=True, tag=True):
    name: str
    version: str
    num_prompts: int | None
    prompts: tuple[Shown, ...]
    held_out: Shown
    unsafe: str = ""
    data_hash: str = ""
    parameters: tuple[str, ...] = ()
    turns: bool = False  # it answers back


class ScoreAnswer(msgspec.Struct, frozen=True, tag=True):
    """`said`: what the environment says after each answer, as far as it says something."""

    reward: float
    detail: str
    said: tuple[str, ...] = ()


class CheckAnswer(msgspec.Struct, frozen=True, tag=True):
    """Seconds are of this machine. `reference` and `wrong`: mean rewards; -1 where no answer is known."""

    name: str
    version: str
    members: dict[str, int]
    num_distinct: int
    longest_characters: int
    reference: float
    wrong: float
    prompt_s: float
    reward_s: float
    slowest_s: float
    problems: tuple[str, ...]
    num_turns: int = 1  # of the longest conversation with right answers


def _shown(bench: Guarded, index: int) -> Shown:
    text, right = bench.prompt(index), bench.answers(index)
    try:
        worth = bench.reward(index, right)[0] if right else None
        said = bench.said(index, right)
    except (RewardFailed, ConfigError):
        worth, said = None, ()
    return Shown(index, text, right[0] if right else None, worth, right, said)


def show(question: ShowQuestion) -> ShowAnswer:
    bench = Guarded(question.spec, strict=False)
    member, folders = question.spec.members[0], [Path(folder) for folder in question.spec.folders]
    environment, full = bench.environment, full_name(member.name, folders)
    source, _, rest = full.partition(":")
    return ShowAnswer(
        environment.name, environment.version, environment.num_prompts,
        tuple(_shown(bench, index) for index in range(question.count)), _shown(bench, HELD_OUT_FROM),
        getattr(environment, "unsafe", ""), data_hash(find_data(rest, folders)) if source == "dataset" else "",
        parameters(full, member.params), converses(environment),
    )  # fmt: skip


def score(question: ScoreQuestion) -> ScoreAnswer:
    bench = Guarded(question.spec, strict=False)
    try:
        said = bench.said(question.index, question.answers)
        return ScoreAnswer(*bench.reward(question.index, question.answers), said)
    except RewardFailed as error:
        return ScoreAnswer(0.0, str(error))


def check(question: CheckQuestion) -> CheckAnswer:
    """Draw 100 prompts, twice; score what should earn much and what should not."""
    bench = Guarded(question.spec, strict=True)
    problems: dict[str, None] = {}
    prompts, prompt_s, reward_s = [], [], []
    right, wrong, max_turns, num_turns = [], [], question.spec.rules.max_turns, 1
    if converses(bench.environment) and max_turns == 1:
        problems["it answers back, and the recipe gives it no second turn: set [environment] max_turns"] = None
    members: dict[str, int] = {}
    indices = [*range(NUM_CHECKED - NUM_CHECKED // 10), *(HELD_OUT_FROM + place for place in range(NUM_CHECKED // 10))]

    def timed(seconds: list[float], work: Callable[[], T]) -> T | None:
        started = time.perf_counter()
        try:
            return work()
        except RewardFailed as error:
            problems[str(error)[:200]] = None
            return None
        finally:
            seconds.append(time.perf_counter() - started)

    for index in indices:
        name = _member_name(bench.environment, index)
        members[name] = members.get(name, 0) + 1
        prompts.append(timed(prompt_s, lambda index=index: bench.prompt(index)))
        known = (timed([], lambda index=index: bench.answers(index)) or ())[:max_turns]
        if known:
            num_turns = max(num_turns, len(known))
            given = timed(reward_s, lambda index=index, known=known: bench.reward(index, known))
            right.append(0.0 if given is None else given[0])
        for text in WRONG:
            answers = timed([], lambda index=index, text=text: bench.repeated(index, text, max_turns)) or [text]
            given = timed(reward_s, lambda index=index, answers=answers: bench.reward(index, answers))
            wrong.append(0.0 if given is None else given[0])
    again = [timed([], lambda index=index: bench.prompt(index)) for index in indices]
    problems |= dict.fromkeys(
        [*_judged(prompts, again, right, wrong), *_forgets(bench, indices[:NUM_AGAIN], max_turns)]
    )
    made = [prompt for prompt in prompts if prompt is not None]
    return CheckAnswer(
        bench.environment.name, bench.environment.version, members, len(set(made)), max(map(len, made), default=0),
        statistics.fmean(right) if right else -1.0, statistics.fmean(wrong),
        statistics.fmean(prompt_s), statistics.fmean(reward_s), max(*prompt_s, *reward_s), tuple(problems), num_turns,
    )  # fmt: skip


def _forgets(bench: Guarded, indices: list[int], max_turns: int) -> list[str]:
    """What it says or gives otherwise when it is asked again."""
    found, so = [], "the second time: it is not deterministic, so receivers would refuse groups"
    for index in indices:
        try:
            answers = bench.repeated(index, WRONG[1], max_turns)
            if len({bench.said(index, answers) for _ in range(2)}) > 1:
                found.append(f"what it says to an answer was another {so}")
            if len({bench.reward(index, answers)[0] for _ in range(2)}) > 1:
                found.append(f"a reward was another {so}")
        except ConfigError:
            found.append(f"a conversation was over sooner {so}")
        except RewardFailed:
            continue  # a problem that is told already
    return found


def _judged(prompts: list, again: list, right: list[float], wrong: list[float]) -> list[str]:
    """What is wrong with an environment that gave these."""
    found = []
    if prompts != again:
        found.append("a prompt was another the second time: it is not deterministic, so receivers would refuse groups")
    if len(set(prompts)) < min(10, NUM_CHECKED // 10):
        found.append(f"only {len(set(prompts))} of {NUM_CHECKED} prompts differ: there is little to learn")
    if right and statistics.fmean(right) <= statistics.fmean(wrong):
        found.append("right answers earn no more than wrong ones: check grader, columns and extract")
    return found


def _member_name(environment: Environment, index: int) -> str:
    return environment.member(index).name if isinstance(environment, Mixture) else environment.name


def answer(question: Question) -> msgspec.Struct:
    match question:
        case ListQuestion(folders):
            return ListAnswer(tuple(catalogue.entries([Path(folder) for folder in folders])))
        case ShowQuestion():
            return show(question)
        case ScoreQuestion():
            return score(question)
        case CheckQuestion():
            return check(question)


def main() -> int:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
        reply, code = answer(question), 0
    except P2prlError as error:
        reply, code = Failed(str(error)), 2 if isinstance(error, ConfigError) else 1
    # An environment's texts and names of files may hold what UTF-8 can't carry.
    replies.write(json.dumps(msgspec.to_builtins(reply), ensure_ascii=False).encode("utf-8", "replace"))
    replies.close()
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, whatever environment runs
    sys.exit(main())
