"""The decisions of the rollout loop: how many groups may be drawn, which prompts, and what a group says.

In: counters, an engine's completions, the environment's judgement. Out: draws, judge items, `records.Group`s, headers.

Invariants: at most `max_in_flight` groups of ours wait for the learner; all answers of a group start under one version
with the recipe's sampling; a prompt index follows from maker, version and counter.
"""

import math
from collections.abc import Sequence

import msgspec

from p2prl.environments.conversation import runs_of
from p2prl.environments.messages import JudgeItem, Judgement
from p2prl.errors import EngineError
from p2prl.records import Completion, Group, GroupHeader, Prompt, Sampling, Tokens, Trajectory, Version
from p2prl.rollout.lottery import prompt_index
from p2prl.rollout.stamps import of_group

AHEAD_S = 0.5
GROUPS_PER_BATCH = 8
BATCHES = 8  # of an engine that works on many requests at once: small ones, so that none waits for the longest answer


class Draw(msgspec.Struct, frozen=True):
    """A group to make: our counter and the prompt that the lottery gives for it."""

    counter: int
    prompt_index: int


Begun = tuple[Draw, Prompt, Sequence[Completion]]  # a group whose answers were drawn


class Origin(msgspec.Struct, frozen=True):
    """What all groups of one node have in common."""

    maker: str
    environment: str
    environment_version: str
    tokenizer_hash: bytes
    sampling: Sampling
    engine: str


def allowed(made_waiting: int, max_in_flight: int) -> int:
    """How many more groups may be drawn while `made_waiting` of ours are in no manifest and young enough."""
    return max(0, max_in_flight - made_waiting)


def draws_at_once(batch_s: float) -> int:
    """How many batches to have in work when one takes the engine `batch_s`.

    With two the engine never waits for judging, signing and the pipe between batches. Of slow batches that wait is a
    thousandth, and a second one in the queue would only be old when its turn comes.
    """
    return 2 if batch_s < AHEAD_S else 1


def in_work(num_answers: int, group_size: int, batch_s: float) -> tuple[int, int]:
    """(groups of a batch, batches in work) for an engine that works on `num_answers` at once (0: request by request)."""
    if num_answers == 0:
        return GROUPS_PER_BATCH, draws_at_once(batch_s)
    num_groups = max(1, num_answers // group_size)
    size = -(-num_groups // BATCHES)
    return size, -(-num_groups // size) + 1  # one more waits at the door


def next_batch(maker: str, version: Version, counters: Sequence[int], num_prompts: int | None) -> tuple[Draw, ...]:
    """One draw a counter, all under the version that the engine has loaded."""
    return tuple(Draw(counter, prompt_index(maker, version, counter, num_prompts)) for counter in counters)


def call_seed(boot_id: bytes, counter: int) -> int:
    """The engine's seed for the call that begins with `counter`: differs between nodes, starts and calls."""
    return (int.from_bytes(boot_id, "little") ^ (counter * 0x9E3779B97F4A7C15)) % 2**63


def turn_seed(seed: int, number: int) -> int:
    """Of call `number` (0: the first) of those that draw the turns of what a call with `seed` began."""
    return (seed + number * 0xD1B54A32D192ED03) % 2**63


def judge_item(prompt: Prompt, completions: Sequence[Completion]) -> JudgeItem:
    """What to ask the environment process about a prompt's answers."""
    return JudgeItem(prompt.index, prompt.token_ids, *_answers(completions))


def judge_group(group: Group) -> JudgeItem:
    """The same question about somebody's group."""
    completions = [trajectory.completion for trajectory in group.trajectories]
    return JudgeItem(group.prompt_index, group.prompt_ids, *_answers(completions))


def _answers(
    completions: Sequence[Completion],
) -> tuple[tuple[Tokens, ...], tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Their tokens, how each says that it ends, and its turns."""
    token_ids = tuple(each.token_ids for each in completions)
    finishes = tuple(each.finish_reason for each in completions)
    return token_ids, finishes, tuple(runs_of(each.segments) for each in completions)


def make_group(
    origin: Origin,
    draw: Draw,
    prompt: Prompt,
    completions: Sequence[Completion],
    versions: Sequence[Version],
    judgement: Judgement,
    made_at: float,
) -> Group:
    """The group of one prompt's answers, whose segments index `versions`. Raises EngineError when the parts don't fit."""
    if not judgement.prompt_ok or prompt.index != draw.prompt_index:
        raise EngineError(f"prompt {draw.prompt_index} is not what the environment makes of it; restart the node")
    if not len(completions) == len(judgement.rewards) == len(judgement.details):
        raise EngineError(f"{len(completions)} answers but {len(judgement.rewards)} rewards; restart the node")
    used, stamped = of_group(versions, completions)
    trajectories = tuple(
        Trajectory(completion, reward, detail)
        for completion, reward, detail in zip(stamped, judgement.rewards, judgement.details, strict=True)
    )
    return Group(
        maker=origin.maker,
        counter=draw.counter,
        environment=origin.environment,
        environment_version=origin.environment_version,
        tokenizer_hash=origin.tokenizer_hash,
        prompt_index=draw.prompt_index,
        prompt_ids=prompt.token_ids,
        versions=used,
        trajectories=trajectories,
        sampling=origin.sampling,
        engine=origin.engine,
        made_at=made_at,
    )


def reward_mean(group: Group) -> float:
    return sum(trajectory.reward for trajectory in group.trajectories) / len(group.trajectories)


def mean_and_error(rewards: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean reward over prompts, and its standard error from how their means differ; `rewards[p][a]` of answer `a`."""
    means = [math.fsum(of_prompt) / len(of_prompt) for of_prompt in rewards]
    mean = math.fsum(means) / len(means)
    if len(means) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in means) / (len(means) - 1) / len(means))


def header(group: Group, group_id: bytes, content_bytes: int) -> GroupHeader:
    """What gossip says of a sealed group of `content_bytes` bytes."""
    return GroupHeader(group_id, content_bytes, group.versions[0], len(group.trajectories), reward_mean(group))
