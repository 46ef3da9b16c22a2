"""Answers in turns: the rollout loop with a real engine and a real environment, and the same decisions on their own."""

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from p2prl import codec, recipe
from p2prl.buffer import admission
from p2prl.buffer.store import Store
from p2prl.clock import SystemClock
from p2prl.config import NodeConfig
from p2prl.environments.conversation import parts_of, runs_of
from p2prl.environments.messages import JudgeItem, Ready, TurnItem
from p2prl.errors import EngineError
from p2prl.events import Ring
from p2prl.identity import Identity
from p2prl.models.builtin import WEIGHTS
from p2prl.models.char_tokenizer import END_ID, CharTokenizer
from p2prl.node.children import Child
from p2prl.node.conversations import Conversations
from p2prl.node.environment_client import EnvironmentClient
from p2prl.node.rollout_loop import RolloutLoop
from p2prl.node.state import NodeState
from p2prl.paths import Home
from p2prl.records import Completion, Group, Prompt, Segment, Trajectory, Version
from p2prl.rollout import messages
from p2prl.rollout.lottery import prompt_index
from p2prl.rollout.worker import Draw
from p2prl.swarm import election
from p2prl.swarm.head import Chain
from p2prl.swarm.membership import Membership
from p2prl.swarm.memory_transport import MemoryNetwork
from p2prl.swarm.metered_transport import MeteredTransport
from tests import factories
from tests.factories import completion, version
from tests.plugins import install

PATIENCE_S = 60.0
SUMS = """
import os
class Sums:
    '''Two sums; the second is asked for once the first was answered. Falls silent after a 9, dies of a 77.'''
    def prompt(self, index):
        return f"{10 + index % 40}+{10 + index % 7}="
    def respond(self, index, answers):
        if answers[0] == "77":
            os._exit(3)
        if answers[0].startswith("9"):
            raise LookupError("no second sum")
        return None if len(answers) == 2 else f"{20 + index % 40}+{10 + index % 5}="
    def reward(self, index, answers):
        right = [str(20 + index % 40 + index % 7)[::-1], str(30 + index % 40 + index % 5)[::-1]]
        return sum(a == b for a, b in zip(answers, right)) / 2, f"{len(answers)} answers"
    def answer(self, index):
        return [str(20 + index % 40 + index % 7)[::-1], str(30 + index % 40 + index % 5)[::-1]]
"""
TEXT = """
name = "sums"
[model]
source = "builtin:addition"
hash = "{hash}"
[environment]
name = "sums:sums"
version = "sums==1.0"
max_turns = {max_turns}
max_given_tokens = 12
[sampling]
group_size = 4
max_new_tokens = 5
[learner]
max_in_flight = 6
[eval]
prompts = 4
"""


def ids(text: str) -> tuple[int, ...]:
    return tuple(CharTokenizer().encode_prompt(text))


def sums(max_turns: int = 4) -> recipe.Recipe:
    known, _ = recipe.find("addition")
    return recipe.parse(TEXT.format(hash=known.model.hash, max_turns=max_turns), "sums")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = install(tmp_path / "site", "sums", {"sums": SUMS}, sums="sums:Sums")
    monkeypatch.setenv("PYTHONPATH", str(site))
    return site


@pytest.fixture
async def environment(tmp_path: Path, site: Path) -> AsyncIterator[EnvironmentClient]:
    made = EnvironmentClient(sums(), Home.locate(tmp_path / "home"))
    await made.start()
    yield made
    await made.stop()


class NoLearner:
    """Of the receive loop only what the rollout loop tells it."""

    def set_vocab_size(self, size: int | None) -> None:
        return None

    def offer_own(self, sealed: bytes) -> None:
        return None


@pytest.fixture
async def state(tmp_path: Path) -> AsyncIterator[NodeState]:
    chosen, home = sums(), Home.locate(tmp_path / "home")
    home.create()
    identity = Identity.create(home.identity)
    base, clock = Version(0, 0, bytes.fromhex(chosen.model.hash)), SystemClock()
    transport = MeteredTransport(MemoryNetwork(0).transport(identity.peer_id), clock)
    await transport.start()
    made = NodeState(
        home=home, config=NodeConfig(), recipe=chosen, identity=identity, boot_id=bytes(8), clock=clock,
        transport=transport, store=Store.open(home.database, clock.unix()), events=Ring(100), base=base,
        base_path=WEIGHTS, chain=Chain(base), membership=Membership(identity.peer_id, bytes(8)),
        election=election.ElectionState(identity.peer_id, chosen.swarm_id), name="one", started_at=clock.unix(),
    )  # fmt: skip
    made.election = msgspec.structs.replace(made.election, role=election.Role.LEADER)  # so that it evaluates too
    yield made
    await transport.stop()
    made.store.close()


@pytest.fixture
async def groups(state: NodeState, environment: EnvironmentClient) -> AsyncIterator[list[Group]]:
    """What a real loop with a real engine draws and stores."""
    engine = Child("p2prl.rollout.engine_process", (), messages.Reply, environ={"OMP_NUM_THREADS": "1"})
    loop = RolloutLoop(state, environment, NoLearner(), engine, 1, asyncio.Event())  # pyright: ignore[reportArgumentType]
    running = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while state.num_waiting() < sums().learner.max_in_flight and not running.done():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        if running.done():
            running.result()
        bodies = [state.store.body(row.id) for row in state.store.own_waiting()]
        yield [codec.unseal(body, Group, state.swarm).record for body in bodies if body is not None]
    finally:
        running.cancel()
        await asyncio.wait([running])
        await engine.stop()


def rules_for(ready: Ready | None) -> admission.AdmissionRules:
    assert ready is not None
    return admission.rules_of(sums(), ready.tokenizer_hash, ready.stop_ids, ready.num_prompts, 17)


async def test_a_node_draws_turns_that_every_receiver_admits_and_no_other(
    groups: list[Group], state: NodeState, environment: EnvironmentClient
) -> None:
    made = groups
    completions = [trajectory.completion for group in made for trajectory in group.trajectories]
    turns = [len(parts_of(each.token_ids, runs_of(each.segments)).drawn) for each in completions]
    assert len(made) == 6 and 2 in turns, turns
    assert state.eval_step == 0 and 0.1 < (state.eval_reward or 0.0) <= 1.0, "whole conversations were evaluated"
    known = factories.knowledge(
        age_of=lambda version: 0, lottery=lambda maker, under, counter: prompt_index(maker, under, counter, None)
    )
    rules = rules_for(environment.ready)
    reasons = {admission.examine(group, bytes(32), state.me, rules, known) for group in made}
    assert reasons == {""}
    verdicts = [
        admission.conclude(group, bytes(32), judgement)
        for group, judgement in zip(made, await environment.judge(made), strict=True)
    ]
    assert [verdict.reason for verdict in verdicts] == [""] * 6
    for each in completions:
        parts = parts_of(each.token_ids, runs_of(each.segments))
        for turn in parts.drawn[:-1]:
            assert turn[-1] == END_ID
        values = struct.unpack(f"<{len(each.token_ids)}f", each.logprobs)
        flags = [part.drawn for part in each.segments for _ in range(part.num_tokens)]
        assert not any(value for value, drawn in zip(values, flags, strict=True) if not drawn)

    whole = next(
        (group, place)
        for group in made
        for place, each in enumerate(group.trajectories)
        if len(each.completion.segments) == 3
    )
    for forged in (other_words(*whole), cut_short(*whole)):
        assert admission.examine(forged, bytes(32), state.me, rules, known) == ""
        (judgement,) = await environment.judge([forged])
        verdict = admission.conclude(forged, bytes(32), judgement)
        assert verdict.reason == "wrong_turns" and f"answer {whole[1]}" in verdict.message


def with_completion(group: Group, place: int, made: Completion) -> Group:
    trajectories = list(group.trajectories)
    trajectories[place] = Trajectory(made, trajectories[place].reward, trajectories[place].detail)
    return msgspec.structs.replace(group, trajectories=tuple(trajectories))


def other_words(group: Group, place: int) -> Group:
    """As if the environment had said something easier."""
    old = group.trajectories[place].completion
    begin = old.segments[0].num_tokens
    token_ids = (*old.token_ids[:begin], *ids("0"), *old.token_ids[begin + 1 :])
    return with_completion(group, place, msgspec.structs.replace(old, token_ids=token_ids))


def cut_short(group: Group, place: int) -> Group:
    """As if it were over after the first turn."""
    old = group.trajectories[place].completion
    first = old.segments[0]
    cut = Completion(old.token_ids[: first.num_tokens], old.logprobs[: 4 * first.num_tokens], (first,), "stop")
    return with_completion(group, place, cut)


async def test_what_the_environment_says_is_what_is_given(environment: EnvironmentClient) -> None:
    said = await environment.turns(
        [
            TurnItem(3, (*ids("61"), END_ID), (3,)),
            TurnItem(3, (*ids("9"), END_ID), (2,)),  # it raises: over, worth 0 with the reason
            TurnItem(3, (*ids("61"), END_ID, *ids("23+13="), *ids("62"), END_ID), (3, 6, 3)),
        ]
    )
    assert said == (ids("23+13="), (), ())


async def test_an_answer_that_ends_the_environment_is_over_and_the_others_go_on(environment: EnvironmentClient) -> None:
    told: list[str] = []
    environment.on_death(told.append)
    said = await environment.turns([TurnItem(3, (*ids("77"), END_ID), (3,)), TurnItem(3, (*ids("61"), END_ID), (3,))])
    assert said == ((), ids("23+13=")) and "exit code 3" in told[0]


async def test_judging_finds_the_answer_whose_turns_end_the_environment(environment: EnvironmentClient) -> None:
    environment.on_death(lambda why: None)
    deadly, right = (*ids("77"), END_ID), (*ids("62"), END_ID, *ids("23+13="), *ids("63"), END_ID)
    other = (*right[:3], *ids("23+14="), *right[9:])
    runs = ((3,), (3, 6, 3), (3, 6, 3))
    item = JudgeItem(3, ids("13+13="), (deadly, right, other), ("stop",) * 3, runs)
    (judged,) = await environment.judge_items((item,))
    assert judged.rewards == (0.0,) * 3 and judged.bad_turns == 2
    assert judged.details[0].startswith("answer 2: what it was given after turn 1")
    (judged,) = await environment.judge_items((JudgeItem(3, ids("13+13="), (deadly, right), ("stop",) * 2, runs[:2]),))
    assert judged.rewards == (0.0, 1.0) and not judged.refused
    assert "ended the environment process" in judged.details[0] and judged.details[1] == "2 answers"


async def test_what_deadly_answers_were_given_and_what_comes_after_them_is_not_admitted(
    environment: EnvironmentClient,
) -> None:
    environment.on_death(lambda why: None)
    deadly, lie = (*ids("77"), END_ID), (*ids("62"), END_ID, *ids("11+11="), *ids("22"), END_ID)
    lie_of_deadly = (*deadly, *lie[3:])
    for answers, bad in (((lie_of_deadly, deadly), 0), ((deadly, deadly, lie), 2), ((deadly, deadly, deadly), -1)):
        runs = tuple((3, 6, 3) if len(answer) > 3 else (3,) for answer in answers)
        item = JudgeItem(3, ids("13+13="), answers, ("stop",) * len(answers), runs)
        (judged,) = await environment.judge_items((item,))
        assert judged.bad_turns == bad and set(judged.rewards) == {0.0}
        assert bad < 0 or judged.details[0].startswith(f"answer {bad}: what it was given can't be compared")


class Narrow:
    """An engine with little context, which is never asked."""

    alive = True
    on_notice = staticmethod(lambda notice: None)

    async def start(self, setup: object, *, timeout_s: float = 0.0) -> messages.Ready:
        assert isinstance(setup, messages.Setup) and setup.max_new_tokens == 4 * 5 + 12, "memory is for all turns"
        return messages.Ready("narrow", 17, context=30)

    async def request(self, make, *, timeout_s: float) -> messages.Loaded:
        request = make(0)
        assert isinstance(request, messages.Load), "what may not fit is not begun"
        return messages.Loaded(0, request.version)

    async def stop(self) -> None:
        return None


async def test_turns_that_may_not_fit_the_engines_context_are_a_sentence_before_the_first(
    state: NodeState, environment: EnvironmentClient
) -> None:
    state.election = msgspec.structs.replace(state.election, role=election.Role.FOLLOWER)
    loop = RolloutLoop(state, environment, NoLearner(), Narrow(), 1, asyncio.Event())  # pyright: ignore[reportArgumentType]
    with pytest.raises(EngineError, match=r"may have 38 tokens, over the engine's context of 30; run a recipe with"):
        await asyncio.wait_for(loop.run(), PATIENCE_S)


# -- decisions alone ------------------------------------------------------------------------------------------------


class Echo:
    """An environment port that says one more thing until it has said `times`; it hears of no more than it is asked."""

    ready = None

    def __init__(self, times: int) -> None:
        self.times = times
        self.asked: list[list[TurnItem]] = []

    async def turns(self, items: Sequence[TurnItem]) -> tuple[tuple[int, ...], ...]:
        self.asked.append(list(items))
        return tuple((7, 7) if len(item.runs) // 2 < self.times else () for item in items)


class Engine:
    """Gives each prompt one token and an end; replies in `script` come first."""

    def __init__(self, *script: messages.Outdated | str) -> None:
        self.script = list(script)
        self.calls: list[tuple[Version, tuple[tuple[int, ...], ...], int, int]] = []

    async def generate(
        self, under: Version, prompts: tuple[tuple[int, ...], ...], num_answers: int, seed: int
    ) -> messages.Generated | messages.Outdated:
        self.calls.append((under, prompts, num_answers, seed))
        step = self.script.pop(0) if self.script else ""
        if isinstance(step, messages.Outdated):
            return step
        answers: list[tuple[Completion, ...]] = [(completion(3, END_ID),) for _ in prompts]
        if step == "lose":
            answers[0] = ()
        return messages.Generated(0, tuple(answers), (under,), 2 * len(prompts), 0.5)


def begun(*answers: Completion) -> list:
    return [(Draw(1, 40), Prompt(40, "?", (5, 6)), list(answers))]


def first(*answers: Completion, under: Version | None = None) -> messages.Generated:
    return messages.Generated(0, (answers,), (under or version(1),), 10, 1.0)


async def test_answers_go_on_until_the_environment_is_done() -> None:
    environment, engine = Echo(times=2), Engine()
    talks = Conversations(environment, engine.generate, max_turns=8)  # pyright: ignore[reportArgumentType]
    cut = completion(3, 3, finish_reason="length")
    groups, drawn = await talks.go_on(begun(completion(4, END_ID), cut), first(completion(), cut), seed=9)
    assert drawn.versions == (version(1),) and drawn.num_tokens == 14 and drawn.wall_s == 2.0
    ((_, _, answers),) = groups
    assert answers[1] == cut  # no end: nobody speaks to it
    assert answers[0].token_ids == (4, END_ID, 7, 7, 3, END_ID, 7, 7, 3, END_ID)
    assert [(part.version, part.num_tokens, part.drawn) for part in answers[0].segments] == [
        (0, 2, True), (0, 2, False), (0, 2, True), (0, 2, False), (0, 2, True),
    ]  # fmt: skip
    assert answers[0].logprobs == factories.logprobs(-0.5, -0.5, 0, 0, -0.5, -0.5, 0, 0, -0.5, -0.5)
    assert [call[1] for call in engine.calls] == [
        ((5, 6, 4, END_ID, 7, 7),),
        ((5, 6, 4, END_ID, 7, 7, 3, END_ID, 7, 7),),
    ]
    assert len({call[3] for call in engine.calls} | {9}) == 3
    assert [len(items) for items in environment.asked] == [1, 1, 1]


async def test_the_last_turn_is_not_spoken_to() -> None:
    environment, engine = Echo(times=9), Engine()
    talks = Conversations(environment, engine.generate, max_turns=2)  # pyright: ignore[reportArgumentType]
    ((_, _, (answer,)),), _ = await talks.go_on(begun(completion(4, END_ID)), first(completion()), seed=0)
    assert runs_of(answer.segments) == (2, 2, 2) and len(environment.asked) == 1


async def test_one_turn_asks_nobody() -> None:
    talks = Conversations(Echo(times=1), Engine().generate, max_turns=1)  # pyright: ignore[reportArgumentType]
    whole, made = begun(completion()), first(completion())
    assert await talks.go_on(whole, made, seed=0) == (whole, made)


async def test_later_turns_are_drawn_under_whatever_is_loaded_by_then() -> None:
    later, latest = version(2), version(3)
    engine = Engine(messages.Outdated(0, later), "lose", messages.Outdated(0, latest))
    talks = Conversations(Echo(times=1), engine.generate, max_turns=2)  # pyright: ignore[reportArgumentType]
    two = [completion(4, END_ID), completion(3, 4, END_ID)]
    ((_, _, answers),), drawn = await talks.go_on(begun(*two), first(*two), seed=0)
    assert [call[0] for call in engine.calls] == [version(1), later, later, latest]
    assert len({call[3] for call in engine.calls}) == 4, "what is asked again has another seed"
    assert drawn.versions == (version(1), later, latest)
    assert [part.version for part in answers[0].segments] == [0, 0, 2]
    assert [part.version for part in answers[1].segments] == [0, 0, 1]


async def test_a_group_of_more_versions_than_a_record_holds_is_left_out() -> None:
    many = tuple(map(version, range(1, 66)))
    full = completion(*[3] * 64, END_ID, segments=tuple(Segment(place, 1) for place in range(65)))
    made = msgspec.structs.replace(first(full), versions=many)
    talks = Conversations(Echo(times=0), Engine().generate, max_turns=2)  # pyright: ignore[reportArgumentType]
    groups, _ = await talks.go_on(begun(full), made, seed=0)
    assert groups == []
