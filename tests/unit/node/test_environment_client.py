"""A real child with an environment that its answers can kill."""

import asyncio
import os
import signal
from pathlib import Path

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


async def test_what_ends_the_process_is_no_other_requests_end(client: EnvironmentClient) -> None:
    """A peer's deadly answers would end the loop that draws, and its engine, with the prompts that it waits for."""
    deadly = JudgeItem(4, ids("4="), (ids("9"), ids("9"), ids("1")))
    judging = asyncio.create_task(client.judge_items((deadly,) * 2))
    made = 0
    while not judging.done():
        asked = await asyncio.gather(*(client.prompts([20 + number]) for number in range(3)))
        assert [each[0].text for each in asked] == ["20=", "21=", "22="]
        assert await client.texts([ids("1")]) == ("1",)
        honest = (await client.judge_items((JudgeItem(5, ids("5="), (ids("1"), ids("2"))),)))[0]
        assert honest.rewards == (1.0, 0.0), "nobody else's answer is taken for deadly"
        made += 1
    assert made and [each.rewards for each in judging.result()] == [(0.0, 0.0, 0.0)] * 2


async def test_prompts_are_asked_for_again_where_the_kernel_ends_the_process(client: EnvironmentClient) -> None:
    told: list[str] = []
    client.on_death(told.append)
    request, pid = client._child.request, client._child.pid

    async def killed(make, *, timeout_s: float):
        if client._child.pid == pid:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        return await request(make, timeout_s=timeout_s)

    client._child.request = killed  # pyright: ignore[reportAttributeAccessIssue]
    assert [prompt.text for prompt in await client.prompts([4, 5])] == ["4=", "5="]
    assert len(told) == 1 and client._child.num_starts == 2


async def test_who_waits_when_it_is_stopped_starts_no_other(client: EnvironmentClient) -> None:
    waiting = [asyncio.create_task(client.prompts([number])) for number in range(4)]
    await asyncio.sleep(0)
    await client.stop()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, ChildDied) for each in done[1:])
    assert not client._child.alive and client._child.num_starts == 1


async def test_a_module_in_the_current_folder_is_not_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verifiers:json` in a recipe would run ./json.py of whoever joins, before its version is looked at."""
    for name in ("deadly", "msgspec", "p2prl"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    site = install(tmp_path / "site", "deadly", {"deadly": DEADLY}, deadly="deadly:Deadly")
    monkeypatch.setenv("PYTHONPATH", str(site))
    made = EnvironmentClient(recipe.parse(TEXT, "x"), Home.locate(tmp_path / "home"))
    assert (await made.start()).environment_version == "deadly==1.0"
    await made.stop()


async def test_answers_that_take_too_long_alone_are_not_judged(
    client: EnvironmentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2prl.node.environment_client.group_s", lambda count: -1.0 if count == 3 else 30.0)
    item = JudgeItem(4, ids("4="), (ids("9"), ids("1"), ids("1")))
    monkeypatch.setattr(client, "_patience_s", 60.0)
    (judged,) = await client.judge_items((item,))
    assert judged.too_slow and judged.refused and all("took longer than" in detail for detail in judged.details)


async def test_who_waits_for_the_child_loses_none_of_its_time(
    client: EnvironmentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of which an answer ended the child is asked again beside others' groups: that is not judging it."""
    monkeypatch.setattr("p2prl.node.environment_client.group_s", lambda count: 0.5 if count == 3 else 30.0)
    timed = client._timed

    async def late(make, timeout_s: float):
        await asyncio.sleep(0.4)  # until its turn comes
        return await timed(make, timeout_s)

    monkeypatch.setattr(client, "_timed", late)
    monkeypatch.setattr(client, "_patience_s", 60.0)
    (judged,) = await client.judge_items((JudgeItem(4, ids("4="), (ids("9"), ids("1"), ids("1"))),))
    assert not judged.refused and judged.rewards == (0.0, 1.0, 1.0)


async def test_nothing_is_asked_again_of_a_stopped_child(client: EnvironmentClient) -> None:
    await client.stop()
    starts = client._child.num_starts
    client._stopped = True
    item = JudgeItem(4, ids("4="), (ids("9"),))
    client._child.request = _died  # pyright: ignore[reportAttributeAccessIssue]  # it died in the middle of a stop
    with pytest.raises(ChildDied):
        await client.judge_items((item,))
    assert client._child.num_starts == starts


async def _died(*args: object, **options: object) -> None:
    raise ChildDied("stopped")


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

    async def unsure(item: JudgeItem) -> tuple[Judgement, float]:
        found, seconds = await ask(item)
        if item.answers == (ids("2"),):
            found = msgspec.structs.replace(found, bad_turns=0, details=("answer 0: other words",))
        return found, seconds

    monkeypatch.setattr(client, "_ask", unsure)
    (judged,) = await client.judge_items((JudgeItem(4, ids("4="), (ids("9"), ids("1"), ids("2"))),))
    assert judged.refused and judged.bad_turns == 2 and judged.rewards == (0.0,) * 3
    assert set(judged.details) == {"answer 2: other words"}
