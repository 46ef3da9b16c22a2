"""Any data set of reasoning-gym as an environment: `reasoning_gym:NAME`.

In: a data set's name and its own parameters, and ours: `score = "last_integer"` for reward 1 when the last integer of the
answer is the right one, else the data set's own score; `extract` for the part of the answer that counts; `template`,
text round `{question}`. Out: prompts and rewards by index.

Each index has its own seed. A tenth of the questions, told by their text, is held out: indices from `HELD_OUT_FROM` on
draw those, lower ones the others, within `_MAX_DRAWS` draws (a data set of one question can't be split).
"""

import random
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from p2prl.environments.extract import MISSING, checked_rule, extract
from p2prl.environments.gym_params import converted, known_params
from p2prl.environments.registry import HELD_OUT_FROM, nearest, package_version, refuse_unknown
from p2prl.environments.split import held_out
from p2prl.errors import ConfigError

_MAX_DRAWS = 64
_SCORES = ("dataset", "last_integer")
_USUAL = {"score": "dataset", "extract": "all", "template": ""}  # ours, for every data set
_NUMBER = re.compile(r"(?:(?<![0-9)\]A-Za-z])-)?[0-9]+(?:\.[0-9]+)?")
_MAX_INTEGER_CHARACTERS = 100
# Whose constructor takes a tenth of a second and more and has no use for the seed: one is made, and given each seed.
_RESEEDED = frozenset(
    ("arc_agi", "figlet_font", "group_anagrams", "rush_hour", "sentence_reordering", "spell_backward", "word_ladder")
)
# Of version 0.1.25: the same index gives other prompts or rewards on another Python, or another time.
UNSAFE = {
    "codeio": "runs snippets of its own, which differ between versions of Python and numpy",
    "knight_swap": "was seen to differ between versions of Python",
}


class ReasoningGym:
    """Implements `registry.Environment` and `registry.Answered`."""

    num_prompts: int | None = None

    def __init__(self, dataset: str, params: Mapping[str, Any], own: Mapping[str, str], version: str) -> None:
        """`params` in the data set's own types; `own`: score, extract, template."""
        self.name = f"reasoning_gym:{dataset}"
        self.version = version
        self.unsafe = _unsafe(dataset, params)
        self._dataset = dataset
        self._params = dict(params)
        self._score, self._extract, self._template = own["score"], own["extract"], own["template"]
        self._made: Any = None
        self._drawn = lru_cache(maxsize=256)(self._draw)  # a group's answers share one question

    def _seeded(self, seed: int) -> Any:
        import reasoning_gym

        if self._dataset not in _RESEEDED:
            return reasoning_gym.create_dataset(self._dataset, seed=seed, size=1, **self._params)
        if self._made is None:
            self._made = reasoning_gym.create_dataset(self._dataset, seed=seed, size=1, **self._params)
        self._made.seed = seed
        return self._made

    def _draw(self, index: int) -> tuple[Any, dict[str, Any]]:
        import numpy

        wanted = index >= HELD_OUT_FROM
        draw = 0
        while True:
            # 31 bits: some data sets hand the seed to numpy.
            seed = int.from_bytes(blake2b(b"%d:%d" % (index, draw), digest_size=4).digest()) >> 1
            random.seed(seed)  # some draw from the global generators
            numpy.random.seed(seed)
            data = self._seeded(seed)
            entry = data[0]
            draw += 1
            if held_out(entry["question"]) == wanted or draw == _MAX_DRAWS:
                return data, entry

    def prompt(self, index: int) -> str:
        question = self._drawn(index)[1]["question"]
        return self._template.replace("{question}", question) if self._template else question

    def answer(self, index: int) -> str | None:
        right = self._drawn(index)[1]["answer"]
        if right is None:
            return None
        wrapped = {"tag": f"<answer>{right}</answer>", "boxed": f"\\boxed{{{right}}}"}
        return wrapped.get(self._extract, str(right))

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        data, entry = self._drawn(index)
        counts = answer if self._extract == "all" else extract(self._extract, answer)
        if counts is None:
            return 0.0, MISSING[self._extract]
        if self._score == "last_integer":
            found, right = last_integer(counts), last_integer(str(entry["answer"]))
            if found is None:
                return 0.0, "no integer in the answer"
            return (1.0, "right") if found == right else (0.0, f"expected {right}, last integer is {found}"[:200])
        return float(data.score_answer(counts, entry)), "the data set's own score"


def _unsafe(dataset: str, params: Mapping[str, Any]) -> str:
    """Why it can't be trusted to be the same everywhere; "" when it can."""
    inside = [part.name for part in params.get("datasets", ())] if dataset == "composite" else []
    return "; ".join(f"{name}: {UNSAFE[name]}" for name in (dataset, *inside) if name in UNSAFE)


def last_integer(text: str) -> int | None:
    """The last number of the text if it is whole; a minus counts unless it follows an operand (8-3 ends in 3)."""
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    if not found or len(found[-1]) > _MAX_INTEGER_CHARACTERS:
        return None
    whole, _, fraction = found[-1].partition(".")
    return None if fraction.strip("0") else int(whole)


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
    config = _config_of(dataset, DATASETS)
    refuse_unknown("parameter", params, {*known_params(config), *_USUAL}, owner)
    given = {key: value for key, value in params.items() if key not in _USUAL}
    own = _own_params(params, owner)
    version = package_version("reasoning-gym")
    try:
        made = converted(config, given, owner)
        for part in made.get("datasets", ()) if dataset == "composite" else ():
            part.config = converted(_config_of(part.name, DATASETS), part.config, f"{owner}, {part.name}")
        environment = ReasoningGym(dataset, made, own, version)
        environment.prompt(0)
    except ConfigError:
        raise
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError) as error:
        said = str(error)[:200] or type(error).__name__
        raise ConfigError(f"{owner} can't be made from {given}: {said}; correct its parameters") from error
    return environment


def usual_params(dataset: str) -> Mapping[str, object]:
    """What may be set of a data set, and its value otherwise."""
    from reasoning_gym.factory import DATASETS

    config = _config_of(dataset, DATASETS)
    usual = None if dataset == "composite" else config()
    return {key: getattr(usual, key, None) for key in known_params(config)} | _USUAL


def _config_of(dataset: str, known: Mapping[str, Any]) -> type:
    if dataset not in known:
        raise ConfigError(f"reasoning-gym has no data set {dataset!r}; did you mean {nearest(dataset, known)!r}?")
    return known[dataset][1]


def _own_params(params: Mapping[str, object], owner: str) -> dict[str, str]:
    score = params.get("score", _USUAL["score"])
    if score not in _SCORES:
        raise ConfigError(f"{owner}: score = {score!r} is unknown; use one of {', '.join(_SCORES)}")
    template = params.get("template", _USUAL["template"])
    if not isinstance(template, str) or (template and template.count("{question}") != 1):
        raise ConfigError(f"{owner}: template = {template!r} is no text with {{question}} in it once; change it")
    return {
        "score": str(score), "extract": checked_rule(params.get("extract", _USUAL["extract"]), owner), "template": template
    }  # fmt: skip
