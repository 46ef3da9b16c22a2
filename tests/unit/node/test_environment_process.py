import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2prl.environments.addition import Addition
from p2prl.environments.messages import (
    Failed,
    JudgeItem,
    JudgeReply,
    JudgeRequest,
    PromptsReply,
    PromptsRequest,
    Ready,
    Reply,
    TextsReply,
    TextsRequest,
)
from p2prl.errors import ConfigError
from p2prl.models.char_tokenizer import CharTokenizer
from p2prl.node import environment_process
from p2prl.pipes import BlockingPipe

ADDITION = '{"members": [{"name": "addition"}]}'
CHAIN_SUM = '{"members": [{"name": "reasoning_gym:chain_sum", "version": "reasoning-gym==0.1.25"}]}'


class Child:
    def __init__(self, folder: Path, spec: str, hash_seed: str, *stop: str) -> None:
        mine, theirs = socket.socketpair()
        command = [sys.executable, "-m", "p2prl.node.environment_process", str(theirs.fileno())]
        command += ["builtin:addition", str(folder), spec, *stop]
        surroundings = os.environ | {"PYTHONHASHSEED": hash_seed}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=surroundings)
        theirs.close()
        mine.settimeout(30)
        self.socket = mine
        self.pipe: BlockingPipe[Reply] = BlockingPipe(mine, Reply)

    def close(self) -> int:
        self.socket.close()
        return self.process.wait(30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    children: list[Child] = []

    def begin(spec: str = ADDITION, hash_seed: str = "0", stop: str = "") -> Child:
        children.append(Child(tmp_path, spec, hash_seed, *([stop] if stop else [])))
        return children[-1]

    yield begin
    for child in children:
        child.socket.close()
        child.process.kill()
        child.process.wait()


def test_it_serves_prompts_and_rewards_and_ends_with_the_pipe(start) -> None:
    child = start()
    ready = child.pipe.receive()
    assert isinstance(ready, Ready)
    assert ready.tokenizer_hash == CharTokenizer().hash
    child.process.send_signal(signal.SIGINT)  # Ctrl-C is the daemon's business
    child.pipe.send(PromptsRequest(1, (0, 2**40)))
    prompts = child.pipe.receive()
    assert isinstance(prompts, PromptsReply)
    assert [prompt.text for prompt in prompts.prompts] == ["76+14=", "41+19="]
    tokenizer = CharTokenizer()
    answers = tuple(tuple(tokenizer.encode_prompt(text)) for text in ("09", "90"))
    child.pipe.send(JudgeRequest(2, (JudgeItem(0, prompts.prompts[0].token_ids, answers),)))
    judged = child.pipe.receive()
    assert isinstance(judged, JudgeReply)
    assert judged.items[0].rewards == (1.0, 0.0)
    assert child.close() == 0


@pytest.mark.parametrize(
    ("spec", "hash_seed", "message"),
    [
        ('{"members": [{"name": "additon"}]}', "0", "did you mean 'addition'"),
        ("{", "0", "can't be read"),
        ("[]", "0", "can't be read"),
        (ADDITION, "1", "PYTHONHASHSEED=0"),
        ('{"members": [{"name": "reasoning_gym:chain_sum"}]}', "0", 'write version = "reasoning-gym=='),
        (CHAIN_SUM, "0", "can't read 'S'"),
    ],
)
def test_what_keeps_it_from_starting_is_said(start, spec: str, hash_seed: str, message: str) -> None:
    child = start(spec, hash_seed)
    failed = child.pipe.receive()
    assert isinstance(failed, Failed)
    assert failed.id == -1 and message in failed.message
    assert child.process.wait(30) == 1


def test_a_model_that_takes_no_second_turn_keeps_a_recipe_with_turns_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneTurn(CharTokenizer):
        def encode_turn(self, text: str, last: int) -> list[int]:
            raise ConfigError("its template takes one message")

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(environment_process, "load_tokenizer", lambda *_: OneTurn())
    monkeypatch.setattr(environment_process, "open_environment", lambda _: Addition("p2prl==1"))
    assert environment_process._start("", tmp_path, ADDITION, "[]")[1].num_prompts is None
    with pytest.raises(ConfigError, match="one message"):
        environment_process._start("", tmp_path, ADDITION[:-1] + ', "rules": {"max_turns": 2}}', "[]")


def test_it_knows_the_recipes_stop_strings(start) -> None:
    child = start(stop='["0"]')
    child.pipe.receive()
    encode = CharTokenizer().encode_prompt
    child.pipe.send(TextsRequest(1, tuple(tuple(encode(part)) for part in ("1203", "7081", "12"))))
    assert child.pipe.receive() == TextsReply(1, ("120", "7081", "12")), "what was given between turns is whole"
    child.pipe.send(PromptsRequest(2, (0,)))
    prompts = child.pipe.receive()
    assert isinstance(prompts, PromptsReply)
    answers = tuple(encode("12")), tuple(encode("1203"))
    child.pipe.send(JudgeRequest(3, (JudgeItem(0, prompts.prompts[0].token_ids, answers, ("length", "length")),)))
    reply = child.pipe.receive()
    assert isinstance(reply, JudgeReply) and reply.items[0].bad_finish == 1
    assert child.close() == 0
