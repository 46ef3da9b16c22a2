"""A real child with an environment that its answers can kill."""

import asyncio

import msgspec
import pytest

from p2prl import recipe
from p2prl.environments.messages import JudgeItem, Judgement, JudgeRequest, PromptsRequest
from p2prl.models.char_tokenizer import CharTokenizer
from p2prl.node.children import ChildDied
from p2prl.node.environment_client import EnvironmentClient
from p2prl.paths import Home
from tests.plugins import install

DEADLY = """
import os
class Deadly:
    def prompt(self, index):
        if index == 13:
            os._exit(3)
        return f"{index}="
    def reward(self, index, answer):
        if answer == "9":
            os._exit(3)
        return float(answer == "1")
"""
TEXT = """
name = "deadly"
[model]
source = "builtin:addition"
hash = "{hash}"
[environment]
name = "deadly:deadly"
version = "deadly==1.0"
""".format(hash="0" * 64)


def ids(text: str) -> tuple[int, ...]:
    return tuple(CharTokenizer().encode_prompt(text))


@pytest.fixture
async def client(tmp_path, monkeypatch):
    site = install(tmp_path / "site", "deadly", {"deadly": DEADLY}, deadly="deadly:Deadly")
    monkeypatch.setenv("PYTHONPATH", str(site))
    made = EnvironmentClient(recipe.parse(TEXT, "x"), Home.locate(tmp_path / "home"))
    await made.start()
    yield made
    await made.stop()


async def test_only_the_answer_that_ends_the_process_is_worth_nothing(client: EnvironmentClient) -> None:
    items = (
        JudgeItem(4, ids("4="), (ids("1"), ids("9"), ids("2"), ids("1"))),
        JudgeItem(5, ids("5="), (ids("1"), ids("2"))),
    )
    told: list[str] = []
    client.on_death(told.append)
    deadly, other = await client.judge_items(items)
    assert told and "exit code 3" in told[0]
    assert deadly.prompt_ok and deadly.rewards == (1.0, 0.0, 0.0, 1.0)
    assert "ended the environment process" in deadly.details[1]
    assert other.rewards == (1.0, 0.0)


async def test_after_two_the_rest_of_the_group_is_not_judged(client: EnvironmentClient) -> None:
    (judged,) = await client.judge_items((JudgeItem(4, ids("4="), (ids("9"), ids("9"), ids("9"), ids("1"))),))
    assert judged.rewards == (0.0,) * 4
    assert "not judged: 2 answers" in judged.details[3]


async def test_a_deadly_answer_to_a_wrong_prompt_costs_nothing(client: EnvironmentClient) -> None:
    (judged,) = await client.judge_items((JudgeItem(4, ids("5="), (ids("9"),)),))
    assert not judged.prompt_ok


async def test_a_prompt_that_ends_the_process_is_an_error_and_the_next_request_works(client: EnvironmentClient) -> None:
    with pytest.raises(ChildDied):
        await client.prompts([13])
    with pytest.raises(ChildDied):
        await client.judge_items((JudgeItem(13, ids("1"), (ids("1"),)),))
    assert [prompt.text for prompt in await client.prompts(range(20, 40))] == [f"{index}=" for index in range(20, 40)]


async def test_nothing_is_asked_again_of_a_stopped_child(client: EnvironmentClient) -> None:
    await client.stop()
    starts = client._child.num_starts
    client._stopped = True
    item = JudgeItem(4, ids("4="), (ids("9"),))
    client._child.request = _died  # pyright: ignore[reportAttributeAccessIssue]  # it died in the middle of a stop
    client._alive = _nothing  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ChildDied):
        await client.judge_items((item,))
    assert client._child.num_starts == starts
    assert msgspec.to_builtins(item)


async def _died(*args: object, **options: object) -> None:
    raise ChildDied("stopped")


async def _nothing() -> None:
    return None


async def test_requests_that_find_it_dead_at_once_start_one_child(client: EnvironmentClient) -> None:
    """The loops that draw and that judge both ask; each that starts one more would end the other's."""
    await client._child.stop()
    before = client._child.num_starts
    item = JudgeItem(4, ids("4="), (ids("1"),))
    first, second, (judged,) = await asyncio.gather(
        client.prompts([4]), client.prompts([5]), client.judge_items((item,))
    )
    assert (first[0].index, second[0].index, judged.rewards) == (4, 5, (1.0,))
    assert client._child.num_starts == before + 1


async def test_a_prompt_is_made_between_two_groups_that_are_judged(client: EnvironmentClient) -> None:
    """A leader judges dozens of groups at once: who draws must not wait for them all, nor end the child for it."""
    asked: list[type] = []
    request = client._child.request

    async def noted(make, *, timeout_s: float):
        asked.append(type(make(0)))
        return await request(make, timeout_s=timeout_s)

    client._child.request = noted  # pyright: ignore[reportAttributeAccessIssue]
    item = JudgeItem(4, ids("4="), (ids("1"),))
    judged, prompts = await asyncio.gather(client.judge_items((item,) * 4), client.prompts([4]))
    assert [each.rewards for each in judged] == [(1.0,)] * 4 and prompts[0].index == 4
    assert asked == [JudgeRequest, PromptsRequest, *[JudgeRequest] * 3]


async def test_alone_too_an_answer_that_ends_otherwise_says_which_it_is(
    client: EnvironmentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = client._ask

    async def unsure(item: JudgeItem) -> Judgement:
        found = await ask(item)
        if item.answers == (ids("2"),):
            return msgspec.structs.replace(found, bad_turns=0, details=("answer 0: other words",))
        return found

    monkeypatch.setattr(client, "_ask", unsure)
    (judged,) = await client.judge_items((JudgeItem(4, ids("4="), (ids("9"), ids("1"), ids("2"))),))
    assert judged.refused and judged.bad_turns == 2 and judged.rewards == (0.0,) * 3
    assert set(judged.details) == {"answer 2: other words"}
