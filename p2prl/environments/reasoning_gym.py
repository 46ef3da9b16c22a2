"""Any data set of reasoning-gym as an environment: `reasoning_gym:NAME`.

In: a data set's name and its own parameters; `score = "last_integer"` for reward 1 when the last integer of the answer
is the right one, else the data set's own score. Out: prompts and rewards by index.

Each index has its own seed. A tenth of the questions, told by their text, is held out: indices from `HELD_OUT_FROM` on
draw those, lower ones the others, within `_MAX_DRAWS` draws (a data set of one question can't be split).
"""

import dataclasses
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from p2prl.environments.registry import HELD_OUT_FROM, nearest, package_version, refuse_unknown
from p2prl.errors import ConfigError

_MAX_DRAWS = 64
_SCORES = ("dataset", "last_integer")
_OURS = ("seed", "size")  # follow from the index
_NUMBER = re.compile(r"(?:(?<![0-9)\]A-Za-z])-)?[0-9]+(?:\.[0-9]+)?")
_MAX_INTEGER_CHARACTERS = 100


class ReasoningGym:
    """Implements `registry.Environment`."""

    num_prompts: int | None = None

    def __init__(self, dataset: str, params: Mapping[str, Any], score: str, version: str) -> None:
        self.name = f"reasoning_gym:{dataset}"
        self.version = version
        self._dataset = dataset
        self._params = dict(params)
        self._score = score
        self._drawn = lru_cache(maxsize=256)(self._draw)  # a group's answers share one question

    def _draw(self, index: int) -> tuple[Any, dict[str, Any]]:
        import reasoning_gym

        wanted = index >= HELD_OUT_FROM
        draw = 0
        while True:
            # 31 bits: some data sets hand the seed to numpy.
            seed = int.from_bytes(blake2b(b"%d:%d" % (index, draw), digest_size=4).digest()) >> 1
            data = reasoning_gym.create_dataset(self._dataset, seed=seed, size=1, **self._params)
            entry = data[0]
            draw += 1
            if _held_out(entry["question"]) == wanted or draw == _MAX_DRAWS:
                return data, entry

    def prompt(self, index: int) -> str:
        return self._drawn(index)[1]["question"]

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        data, entry = self._drawn(index)
        if self._score == "last_integer":
            found, right = last_integer(answer), last_integer(str(entry["answer"]))
            if found is None:
                return 0.0, "no integer in the answer"
            return (1.0, "right") if found == right else (0.0, f"expected {right}, last integer is {found}"[:200])
        return float(data.score_answer(answer, entry)), "the data set's own score"


def last_integer(text: str) -> int | None:
    """The last number of the text if it is whole; a minus counts unless it follows an operand (8-3 ends in 3)."""
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    if not found or len(found[-1]) > _MAX_INTEGER_CHARACTERS:
        return None
    whole, _, fraction = found[-1].partition(".")
    return None if fraction.strip("0") else int(whole)


def _held_out(question: str) -> bool:
    digest = blake2b(question.encode("utf-8", "replace"), digest_size=4, person=b"p2prl held out").digest()
    return int.from_bytes(digest) < 2**32 // 10


def load_dataset(dataset: str, params: Mapping[str, object]) -> ReasoningGym:
    """Raises ConfigError for an unknown data set, parameter or value."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"environment reasoning_gym:{dataset} needs the package reasoning-gym; "
            "install it with: pip install 'p2prl[tasks]'"
        ) from error
    owner = f"environment reasoning_gym:{dataset}"
    if dataset not in DATASETS:
        raise ConfigError(f"reasoning-gym has no data set {dataset!r}; did you mean {nearest(dataset, DATASETS)!r}?")
    score = params.get("score", "dataset")
    if score not in _SCORES:
        raise ConfigError(f"{owner}: score = {score!r} is unknown; use one of {', '.join(_SCORES)}")
    config = DATASETS[dataset][1]
    known = {field.name for field in dataclasses.fields(config)} - set(_OURS)
    refuse_unknown("parameter", params, {*known, "score"}, owner)
    own = {key: value for key, value in params.items() if key != "score"}
    environment = ReasoningGym(dataset, own, str(score), package_version("reasoning-gym"))
    try:
        environment.prompt(0)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{owner} can't be made from {own}: {str(error)[:200]}; correct its parameters") from error
    return environment
