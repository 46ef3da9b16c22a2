"""A fake engine for tests and simulations: no torch, no weights, answers that get better with each version.

In: prompts of the `addition` environment in the built-in tokenizer (or any prompts with an `answer` of your own). Out:
completions that follow from (seed, version.step, prompt, position) alone.
"""

import math
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from p2prl.errors import EngineError
from p2prl.models.char_tokenizer import END_ID, CharTokenizer
from p2prl.records import Completion, Sampling, Segment, Version
from p2prl.rollout.engine import Between, Drawn, nothing_between
from p2prl.rollout.stamps import Stamps

Answer = Callable[[Sequence[int]], tuple[int, ...]]


def addition_answer(prompt: Sequence[int]) -> tuple[int, ...]:
    """The right answer to "12+34=", last digit first, with its end token; just the end for anything else."""
    tokenizer = CharTokenizer()
    first, plus, second = tokenizer.decode(prompt).removesuffix("=").partition("+")
    if not plus or not first.isdigit() or not second.isdigit():
        return (END_ID,)
    return (*tokenizer.encode_prompt(str(int(first) + int(second))[::-1]), END_ID)


def rising_quality(step: int) -> float:
    """Chance of a right answer: .5 for the base model, .95 after some hundred steps."""
    return 0.95 - 0.45 * math.exp(-step / 50)


class ScriptedEngine:
    """Implements `engine.Engine`."""

    name = "scripted 1"
    vocab_size: int | None = None

    def __init__(self, answer: Answer = addition_answer, quality: Callable[[int], float] = rising_quality) -> None:
        self._answer, self._quality = answer, quality
        self._version: Version | None = None

    @property
    def version(self) -> Version | None:
        return self._version

    def load(self, weights: Path, version: Version) -> None:
        self._version = version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_answers: int,
        sampling: Sampling,
        seed: int,
        between: Between = nothing_between,
    ) -> Drawn:
        begun = self._version
        if begun is None:
            raise EngineError("no weights are loaded yet; send Load first")
        completions = [
            [
                self._complete(prompt, begun.step, sampling, _source(seed, begun.step, row, answer))
                for answer in range(num_answers)
            ]
            for row, prompt in enumerate(prompts)
        ]
        between(True)
        return stamped(completions, begun, self._version or begun)

    def _complete(self, prompt: Sequence[int], step: int, sampling: Sampling, source: random.Random) -> Completion:
        right = self._answer(prompt)
        quality = self._quality(step)
        good = source.random() < quality
        # A wrong answer: one digit too few, so that it is wrong whatever the environment.
        tokens = right if good or len(right) < 2 else (*right[:-2], right[-1])
        chance = quality if good else 1.0 - quality
        kept = tokens[: sampling.max_new_tokens]
        logprob = math.log(max(chance, 1e-6)) / len(kept)
        reason = "stop" if len(kept) == len(tokens) else "length"
        return Completion(kept, struct.pack(f"<{len(kept)}f", *[logprob] * len(kept)), (Segment(0, len(kept)),), reason)


def stamped(completions: list[list[Completion]], begun: Version, ended: Version) -> Drawn:
    """As if `ended` was loaded when half of each answer was drawn."""
    versions = [begun]

    def stamp(completion: Completion) -> Completion:
        stamps, num_tokens = Stamps(versions), len(completion.token_ids)
        stamps.add(begun, num_tokens - num_tokens // 2)
        stamps.add(ended, num_tokens // 2)
        return msgspec.structs.replace(completion, segments=stamps.segments(num_tokens))

    if begun == ended:
        return Drawn(completions, (begun,))
    return Drawn([[stamp(completion) for completion in answers] for answers in completions], tuple(versions))


def _source(*parts: int) -> random.Random:
    digest = blake3(b"p2prl scripted\0" + b",".join(b"%d" % part for part in parts)).digest(length=16)
    return random.Random(int.from_bytes(digest, "little"))
