"""A tiny swarm without a swarm: groups sampled by plain torch from the built-in policy."""

import msgspec
import numpy
import pytest
import torch

from p2prl.environments.registry import load_environment
from p2prl.learner.policy import Policy
from p2prl.models.char_tokenizer import END_ID, CharTokenizer
from p2prl.recipe import Recipe, find
from p2prl.records import Completion, Group, Sampling, Segment, StepInput, Trajectory, Version

LONGEST = 5
MAKER = "12D3KooW" + "A" * 44


@pytest.fixture
def recipe() -> Recipe:
    return find("addition")[0]


@pytest.fixture
def policy(recipe: Recipe, tmp_path) -> Policy:
    torch.set_num_threads(1)
    return Policy.load(recipe, tmp_path / "models")


@torch.no_grad()
def sample(
    module: torch.nn.Module, prompts: torch.Tensor, source: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their log-probs, [B, LONGEST], at temperature 1."""
    ids, logps = prompts, []
    for _ in range(LONGEST):
        logp = torch.log_softmax(module(input_ids=ids, use_cache=False).logits[:, -1].float(), -1)
        token = torch.multinomial(logp.exp(), 1, generator=source)
        logps.append(logp.gather(1, token))
        ids = torch.cat([ids, token], 1)
    return ids[:, prompts.shape[1] :], torch.cat(logps, 1)


def make_step(policy: Policy, num_groups: int, seed: int, *, group_size: int = 8, age: int = 0, rho_on: float = 1.0):
    """A `StepInput` of groups drawn under the policy's present weights."""
    environment, tokenizer = load_environment("addition", {"digits": 2}), CharTokenizer()
    indices = [seed * 10_000 + number for number in range(num_groups)]
    prompts = [tokenizer.encode_prompt(environment.prompt(index)) for index in indices]
    rows = torch.tensor([prompt for prompt in prompts for _ in range(group_size)])
    tokens, logps = sample(policy.module, rows, torch.Generator().manual_seed(seed))
    groups = []
    for number, index in enumerate(indices):
        mine = range(number * group_size, (number + 1) * group_size)
        answers = [(tokens[row].tolist(), logps[row].numpy()) for row in mine]
        trajectories = [_trajectory(environment, tokenizer, index, *answer) for answer in answers]
        groups.append(_group(index, prompts[number], tuple(trajectories), policy.version))
    ids = tuple(number.to_bytes(32, "little") for number in range(num_groups))
    return StepInput(tuple(groups), ids, ((age,),) * num_groups, policy.version, 1, rho_on)


def _trajectory(environment, tokenizer, index: int, tokens: list[int], logps: numpy.ndarray) -> Trajectory:
    num = tokens.index(END_ID) + 1 if END_ID in tokens else len(tokens)
    reward, _ = environment.reward(index, tokenizer.decode(tokens[:num]))
    reason = "stop" if END_ID in tokens else "length"
    data = logps[:num].astype("<f4").tobytes()
    return Trajectory(Completion(tuple(tokens[:num]), data, (Segment(0, num),), reason), reward)


def _group(index: int, prompt: list[int], trajectories: tuple[Trajectory, ...], version: Version) -> Group:
    return Group(
        maker=MAKER,
        counter=0,
        environment="addition",
        environment_version="1",
        tokenizer_hash=CharTokenizer().hash,
        prompt_index=index,
        prompt_ids=tuple(prompt),
        versions=(version,),
        trajectories=trajectories,
        sampling=Sampling(1.0, 1.0, 0, LONGEST),
        engine="plain torch",
        made_at=0.0,
    )


def with_reward(step: StepInput, group: int, answer: int, reward: float) -> StepInput:
    """The step with one reward replaced."""
    changed = list(step.groups[group].trajectories)
    changed[answer] = msgspec.structs.replace(changed[answer], reward=reward)
    groups = list(step.groups)
    groups[group] = msgspec.structs.replace(groups[group], trajectories=tuple(changed))
    return msgspec.structs.replace(step, groups=tuple(groups))


class Tools:
    """The functions above for tests, which can't import a conftest."""

    make_step = staticmethod(make_step)
    with_reward = staticmethod(with_reward)


@pytest.fixture
def tools() -> type[Tools]:
    return Tools
