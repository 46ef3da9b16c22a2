"""The engine process with a real vLLM on the CPU: exact log-probs over changes of weights, loopback alone, a clean end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from p2prl.errors import P2prlError
from p2prl.models.load import load_module, prepare
from p2prl.models.lora import find_targets, merge
from p2prl.models.lora_rule import Lora
from p2prl.models.stop_strings import load_stop_strings
from p2prl.models.tensors import load_into, write_state, write_tensors
from p2prl.node.children import Child
from p2prl.records import Completion, Sampling, Tokens, Version
from p2prl.rollout import messages
from p2prl.rollout.decoding import filtered_logprobs
from tests import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.needs("vllm"), pytest.mark.timeout(900)]
LONGEST = 900  # two loads come before its end, whatever else the machine does
PROMPTS = tuple(tuple(range(5, 5 + length)) for length in (3, 40, 17))
MANY_PROMPTS = tuple(tuple(5 + (7 * row + place) % 240 for place in range(250)) for row in range(16))
SHORT, LONG = Sampling(1.0, 1.0, 0, 8), Sampling(0.8, 1.0, 0, LONGEST)
LORA = Lora(2, 4.0, ("q_proj", "up_proj"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("tiny") / "model")


class Engine:
    def __init__(
        self, model: Path, folder: Path, lora: Lora | None = None, stop: tuple[str, ...] = (), adapters: str = "merged"
    ) -> None:
        self.source, self.cache = f"folder:{model}", folder / "cache"
        self.files = prepare(self.source, self.cache, lambda _: None)
        stop_ids = (1,) if stop else ()  # without, each answer is as long as it may be
        self.setup = messages.Setup(
            self.source, str(self.cache), stop_ids, 0, engine="vllm", dtype="float32", lora=lora, group_size=4,
            max_new_tokens=LONGEST, most_batch_tokens=32768, stop=stop, adapters=adapters,
        )  # fmt: skip
        self.child = Child(
            "p2prl.rollout.engine_process", (), messages.Reply, environ={"OMP_NUM_THREADS": "1"}, patience_s=30.0
        )
        self.notices: list[object] = []
        self.child.on_notice = self.notices.append

    async def load(self, path: Path, version: Version) -> None:
        await self.child.request(lambda number: messages.Load(number, str(path), version), timeout_s=60)

    async def draw(
        self, version: Version, seed: int, sampling: Sampling, prompts: tuple[Tokens, ...] = PROMPTS
    ) -> messages.Generated | messages.Outdated:
        return await self.child.request(
            lambda number: messages.Generate(number, version, prompts, 4, sampling, seed), timeout_s=60
        )

    def module(self, path: Path | None = None) -> torch.nn.Module:
        """The model in float32 with the weights of a file, or with its own."""
        found = load_module(self.source, self.cache, torch.float32)
        if path is not None:
            load_into(found, path)
        return found


@pytest.fixture
async def engine(model: Path, tmp_path: Path) -> AsyncIterator[Engine]:
    made = Engine(model, tmp_path)
    await made.child.start(made.setup, timeout_s=600)
    yield made
    await made.child.stop()


def check(
    modules: dict[Version, torch.nn.Module],
    generated: messages.Generated,
    sampling: Sampling,
    prompts: tuple[Tokens, ...] = PROMPTS,
) -> None:
    """Each token's log-prob is that of a fresh forward under the version it is stamped with."""
    for prompt, group in zip(prompts, generated.completions, strict=True):
        for answer in group:
            first, drawn = 0, np.frombuffer(answer.logprobs, "<f4")
            for part in answer.segments:
                own = slice(first, first + part.num_tokens)
                expected = fresh(modules[generated.versions[part.version]], prompt, answer, sampling)
                np.testing.assert_allclose(
                    drawn[own], expected[own], atol=5e-3, rtol=0
                )  # of another version: .1 and more
                first += part.num_tokens
            assert first == len(answer.token_ids)


def fresh(module: torch.nn.Module, prompt: tuple[int, ...], answer: Completion, sampling: Sampling) -> np.ndarray:
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return filtered_logprobs(logits, sampling).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0].numpy()


def versions(engine: Engine, folder: Path) -> dict[Version, Path]:
    """The base, and two that differ from it a lot."""
    found = {Version(0, 0, engine.files.hash): engine.files.weights}
    for step in (1, 2):
        module = engine.module()
        torch.manual_seed(step)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        path = folder / f"{step}"
        found[Version(1, step, write_state(module, path))] = path
    return found


def adapted(engine: Engine, path: Path, step: int) -> torch.nn.Module:
    """Writes a version's adapters; the model with them, as vLLM is to have it by this setup."""
    module, pairs, source = engine.module(), {}, torch.Generator().manual_seed(step)
    with torch.no_grad():
        for name, target in find_targets(module, LORA.targets).items():
            a = (0.3 * torch.randn(LORA.rank, target.num_inputs, generator=source)).bfloat16()
            b = (0.3 * torch.randn(target.num_outputs, LORA.rank, generator=source)).bfloat16()
            pairs |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
            if engine.setup.adapters == "merged":
                target.weight.copy_(merge(target.weight, (a, b), LORA.scale))
            else:
                target.weight.add_(LORA.scale * (b.float() @ a.float()))
    write_tensors(pairs, path)
    return module


async def draw_over_loads(engine: Engine, paths: dict[Version, Path]) -> list[messages.Generated]:
    """What is begun under the first version by LONG, with the others loaded in the midst of it."""
    base, *later = paths
    await engine.load(paths[base], base)
    drawing = [asyncio.create_task(engine.draw(base, seed, LONG)) for seed in range(2)]
    for version in later:
        await asyncio.sleep(0)  # what was asked for is on its way; a load waits until each answer of it has begun
        await engine.load(paths[version], version)
    used, found = set[Version](), []
    for generated in await asyncio.gather(*drawing):
        assert isinstance(generated, messages.Generated)
        assert generated.versions[0] == base
        assert [len(group) for group in generated.completions] == [4, 4, 4]
        used |= set(generated.versions)
        found.append(generated)
    assert used == set(paths), "no load came in mid-answer: this shows nothing"
    return found


async def test_weights_change_in_mid_answer_and_nothing_is_lost(engine: Engine, tmp_path: Path) -> None:
    paths = versions(engine, tmp_path)
    base, _, two = paths
    modules = {version: engine.module(path) for version, path in paths.items()}
    for generated in await draw_over_loads(engine, paths):
        check(modules, generated, LONG)
    outdated = await engine.draw(base, 1, SHORT)
    assert isinstance(outdated, messages.Outdated) and outdated.version == two
    filtered = Sampling(1.2, 0.9, 20, 16)
    generated = await engine.draw(two, 1, filtered)
    assert isinstance(generated, messages.Generated)
    again = await engine.draw(two, 1, filtered)
    assert isinstance(again, messages.Generated) and again.completions == generated.completions
    check(modules, generated, filtered)
    generated = await engine.draw(two, 4, SHORT, MANY_PROMPTS)  # more tokens at once than a step of vLLM takes
    assert isinstance(generated, messages.Generated)
    check(modules, generated, SHORT, MANY_PROMPTS)
    with pytest.raises(P2prlError, match="no such|No such"):
        await engine.load(tmp_path / "missing", base)
    write_tensors({"other.weight": torch.zeros(2, 2)}, tmp_path / "other")
    with pytest.raises(P2prlError, match="of another model"):
        await engine.load(tmp_path / "other", base)
    assert isinstance(await engine.draw(two, 3, filtered), messages.Generated)


async def test_it_talks_on_loopback_alone_and_leaves_nothing_behind(engine: Engine, wait_gone) -> None:
    await engine.load(engine.files.weights, base := Version(0, 0, engine.files.hash))
    await engine.draw(base, 1, SHORT)
    process = psutil.Process(engine.child.pid)
    tree = [process, *process.children(recursive=True)]
    sockets = [found for one in tree for found in one.net_connections("inet")]
    assert any(found.status == psutil.CONN_LISTEN for found in sockets), "none was found: this shows nothing"
    ends = {end.ip for found in sockets for end in (found.laddr, found.raddr) if end}
    assert ends <= {"127.0.0.1", "::1"}
    shared = {mapped.path for one in tree for mapped in one.memory_maps() if mapped.path.startswith("/dev/shm/")}
    assert isinstance(engine.notices[0], messages.Planned)
    await engine.child.stop()
    await asyncio.to_thread(wait_gone, tree)  # multiprocessing's tracker clears up last
    assert [path for path in shared if Path(path).exists()] == []


async def test_killed_it_takes_all_of_vllm_with_it(engine: Engine, wait_gone) -> None:
    process = psutil.Process(engine.child.pid)
    tree = [process, *process.children(recursive=True)]
    assert any(one.name().startswith("VLLM") for one in tree), "there is nothing that could stay"
    process.kill()
    wait_gone(tree)  # our loop stands still meanwhile: no daemon clears up


@pytest.mark.parametrize("adapters", ["merged", "name"])
async def test_adapters_change_in_mid_answer_merged_or_by_name(model: Path, tmp_path: Path, adapters: str) -> None:
    engine = Engine(model, tmp_path, LORA, adapters=adapters)
    base = Version(0, 0, engine.files.hash)
    paths = {base: engine.files.weights} | {Version(1, step, bytes(32)): tmp_path / f"{step}" for step in (1, 2)}
    modules = {base: engine.module()}
    modules |= {version: adapted(engine, paths[version], version.step) for version in paths if version != base}
    await engine.child.start(engine.setup, timeout_s=600)
    try:
        for generated in await draw_over_loads(engine, paths):
            check(modules, generated, LONG)
        with pytest.raises(P2prlError, match="of another recipe"):
            await engine.load(engine.files.weights, Version(1, 3, bytes(32)))
        generated = await engine.draw(Version(1, 2, bytes(32)), 4, SHORT)
        assert isinstance(generated, messages.Generated)
        check(modules, generated, SHORT)
    finally:
        await engine.child.stop()


async def test_an_answer_ends_by_a_stop_string_and_says_so(model: Path, tmp_path: Path) -> None:
    engine = Engine(model, tmp_path, stop=("w7", "w12 w"))
    base = Version(0, 0, engine.files.hash)
    stops = load_stop_strings(engine.setup.stop, engine.source, engine.cache, (1,))
    await engine.child.start(engine.setup, timeout_s=600)
    try:
        await engine.load(engine.files.weights, base)
        sampling = Sampling(1.0, 1.0, 0, LONGEST, engine.setup.stop)
        rounds = [await engine.draw(base, seed, sampling) for seed in range(3)]  # what ended made room again
        for generated in rounds:
            assert isinstance(generated, messages.Generated)
            check({base: engine.module()}, generated, sampling)
            answers = [answer for group in generated.completions for answer in group]
            assert all(stops.ends_as_said(answer.token_ids, answer.finish_reason) for answer in answers)
            assert any(answer.finish_reason == "stop" and answer.token_ids[-1] != 1 for answer in answers)
            assert generated.num_tokens == sum(len(answer.token_ids) for answer in answers)
        with pytest.raises(P2prlError, match="stop strings"):
            await engine.draw(base, 1, Sampling(1.0, 1.0, 0, LONGEST))
    finally:
        await engine.child.stop()
