"""Prompts from a data file of the user's: `dataset:FILE`.

In: a JSONL, parquet or arrow file (or a folder of such), the columns to use, a grader. Out: prompts and rewards by index.

Parameters: `hash` (of the file, as `p2prl env show` tells it), `template` (text with {column} in it), `answer` (the
column of right answers), `extract` (the part of an answer that counts), `grader` and its own options. A tenth of the
rows is held out, the same ones in every environment over the file.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from p2prl.environments import rows
from p2prl.environments.extract import MISSING, checked_rule, extract
from p2prl.environments.graders import GRADERS, Grader, make_grader, option_names
from p2prl.environments.registry import nearest, refuse_unknown
from p2prl.environments.split import Split
from p2prl.errors import ConfigError

USUAL = {"hash": "", "template": "{question}", "answer": "answer", "extract": "all", "grader": "exact"}
_PLACE = re.compile(r"\{([A-Za-z0-9_ -]+)\}")
_MAX_PROMPT_CHARACTERS = 2**17
_MAX_CHARACTERS = 2**30  # of all prompts: a long template times many rows
_MAX_CHOICES = 26


class RowsEnvironment:
    """Implements `registry.Environment` and `registry.Answered`."""

    def __init__(
        self, name: str, prompts: Sequence[str], golds: Sequence[object], grader: Grader, rule: str, split: Split
    ) -> None:
        self.name, self.version = name, grader.version
        self._prompts, self._golds, self._grader, self._rule = prompts, golds, grader, rule
        self._split = split
        self.num_prompts: int | None = self._split.num_training

    def prompt(self, index: int) -> str:
        return self._prompts[self._split.place(index)]

    def answer(self, index: int) -> str | None:
        right = self._grader.reference(self._golds[self._split.place(index)])
        if right is None:
            return None
        return {"tag": f"<answer>{right}</answer>", "boxed": f"\\boxed{{{right}}}"}.get(self._rule, right)

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        counts = extract(self._rule, answer)
        if counts is None:
            return 0.0, MISSING[self._rule]
        return self._grader.grade(self._golds[self._split.place(index)], counts)


def load_rows_environment(file: str, params: Mapping[str, object], folders: Sequence[Path]) -> RowsEnvironment:
    """Raises ConfigError for a file that isn't there or another, a missing column, a bad row, an unknown parameter."""
    owner = f"environment dataset:{file}"
    kind = _text(params, "grader", owner)
    if kind not in GRADERS:
        raise ConfigError(f"{owner} has no grader {kind!r}; did you mean {nearest(kind, GRADERS)!r}?")
    refuse_unknown("parameter", params, {*USUAL, *option_names(kind)}, owner)
    grader = make_grader(kind, {key: value for key, value in params.items() if key not in USUAL}, owner)
    rule = checked_rule(params.get("extract", USUAL["extract"]), owner)
    path = rows.find_data(file, folders)
    wanted, found = _text(params, "hash", owner), rows.data_hash(path)
    if wanted and wanted != found:
        raise ConfigError(
            f"{path} has hash {found[:16]}, the recipe wants {wanted[:16]}: it is another file or another version of it. "
            "Get the very file that the recipe names"
        )
    table = rows.read_rows(path)
    template = _text(params, "template", owner)
    column = _text(params, "answer", owner)
    prompts, golds, num_characters = [], [], 0
    for number, row in enumerate(table, 1):
        where = f"row {number} of {path.name}"
        prompts.append(_filled(template, row, where))
        num_characters += len(prompts[-1])
        if num_characters > _MAX_CHARACTERS:
            raise ConfigError(
                f"the prompts of {path} have more than {_MAX_CHARACTERS} characters; shorten the template"
            )
        golds.append(grader.gold(_value(row, column, where), where))
    return RowsEnvironment(f"dataset:{file}", prompts, golds, grader, rule, Split.by_row(found, prompts))


def _text(params: Mapping[str, object], key: str, owner: str) -> str:
    value = params.get(key, USUAL[key])
    if not isinstance(value, str):
        raise ConfigError(f"{owner}: {key} = {value!r} is no text; change it in the recipe")
    return value


def _filled(template: str, row: rows.Row, where: str) -> str:
    text = _PLACE.sub(lambda found: _as_text(_value(row, found[1], where), where), template)
    if not text.strip() or len(text) > _MAX_PROMPT_CHARACTERS:
        raise ConfigError(f"the prompt of {where} has {len(text)} characters; it takes 1 to {_MAX_PROMPT_CHARACTERS}")
    return text


def _as_text(value: object, where: str) -> str:
    """A list, as of choices, becomes lettered lines."""
    if isinstance(value, list):
        if len(value) > _MAX_CHOICES:
            raise ConfigError(f"{where} has a list of {len(value)}, and there are {_MAX_CHOICES} letters; shorten it")
        return "\n".join(f"{chr(ord('A') + place)}. {item}" for place, item in enumerate(value))
    return str(value)


def _value(row: rows.Row, column: str, where: str) -> object:
    if row.get(column) is None:
        if not row or column in row:
            raise ConfigError(f"{where} has nothing in column {column!r}; fill it or remove the row")
        raise ConfigError(f"{where} has no column {column!r}; did you mean {nearest(column, row)!r}?")
    return row[column]
