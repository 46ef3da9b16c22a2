"""What an answer of a data file's row is worth.

In: a row's right answer, the part of an answer that counts. Out: reward 0 to 1 with a reason.

`exact`, `number`, `regex`, `choice` are here; `math` and `python_tests` have rooms of their own. A grader checks each
right answer when the file is loaded, so that a bad row is found before anybody draws it.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol

from p2prl.environments.registry import package_version
from p2prl.errors import ConfigError

_NUMBER = re.compile(
    r"(?:(?<![0-9)\]A-Za-z.])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?"
)
_MAX_NUMBER_CHARACTERS = 100
_WORD_FOLLOWS = r"[ \t]{1,4}(?!(?:is|was|because|since|as|and|or)\b)\w"  # after "A" and "I": then they are words
# After "the answer is" a capital counts; a small letter only before a mark or an end, since "a" is a word too.
_SAID_CHOICE = re.compile(
    r"\b(?i:answer|choice|option)(?i:\s{1,4}is)?\s{0,4}[:=]?\W{0,4}"
    rf"(?:(?!I{_WORD_FOLLOWS})([A-Z])(?!\w|['\u2019]\w)|([a-z])(?=[\])}}*.,;:]|\s{{0,4}}(?:[-:\n]|\Z)))"
)
_LONE_LETTER = re.compile(rf"(?<![\w'\u2019])(?![AI]{_WORD_FOLLOWS})([A-Z])(?!\w|['\u2019]\w)")
_ONLY_LETTER = re.compile(r"\W{0,4}([A-Za-z])\W{0,4}")
_MAX_PATTERN_CHARACTERS = 1000


class Grader(Protocol):
    version: str

    def gold(self, value: object, where: str) -> Any:
        """A row's right answer as `grade` wants it; raises ConfigError for one that can't be graded by."""
        ...

    def grade(self, gold: Any, answer: str) -> tuple[float, str]: ...

    def reference(self, gold: Any) -> str | None:
        """An answer that earns 1, where one is known."""
        ...


def _verdict(right: bool, gold: object) -> tuple[float, str]:
    return (1.0, "right") if right else (0.0, f"expected {gold}"[:200])


class Exact:
    """The same text but for blanks at the ends and, with `ignore_case`, for case."""

    def __init__(self, ignore_case: bool = False) -> None:
        self.version = package_version("p2prl")
        self._ignore_case = ignore_case

    def gold(self, value: object, where: str) -> str:
        return str(value).strip()

    def grade(self, gold: str, answer: str) -> tuple[float, str]:
        found = answer.strip()
        return _verdict(found.casefold() == gold.casefold() if self._ignore_case else found == gold, gold)

    def reference(self, gold: str) -> str:
        return gold


class Number:
    """The last number of the answer; `tolerance` is relative, 0 for exactly."""

    def __init__(self, tolerance: float = 0.0) -> None:
        self.version = package_version("p2prl")
        if not 0 <= tolerance < 1:  # also for one that is no number
            raise ConfigError(f"tolerance = {tolerance} is not in 0 to 1; change it in the recipe")
        self._tolerance = Decimal(str(tolerance))

    def gold(self, value: object, where: str) -> Decimal:
        found = last_number(str(value))
        if found is None:
            raise ConfigError(f"the answer of {where}, {str(value)[:50]!r}, holds no number; correct it")
        return found

    def grade(self, gold: Decimal, answer: str) -> tuple[float, str]:
        found = last_number(answer)
        if found is None:
            return 0.0, "no number in the answer"
        return _verdict(abs(found - gold) <= self._tolerance * abs(gold), gold)

    def reference(self, gold: Decimal) -> str:
        return str(gold)


def last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text.replace("\u2212", "-"))
    if not found or len(found[-1]) > _MAX_NUMBER_CHARACTERS:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


class Regex:
    """With `pattern`: its last match (the first group, where it has one) is the right answer. Without: the row's right
    answer is the pattern, and the whole answer must match it."""

    def __init__(self, pattern: str = "") -> None:
        self.version = package_version("p2prl")
        self._pattern = _compiled(pattern, "pattern") if pattern else None

    def gold(self, value: object, where: str) -> Any:
        return str(value).strip() if self._pattern else _compiled(str(value), f"the answer of {where}")

    def grade(self, gold: Any, answer: str) -> tuple[float, str]:
        if self._pattern is None:
            return (1.0, "matches") if gold.fullmatch(answer.strip()) else (0.0, f"doesn't match {gold.pattern[:200]}")
        last = None
        for last in self._pattern.finditer(answer):  # noqa: B007
            pass
        if last is None:
            return 0.0, "the pattern is not in the answer"
        found = last.group(1) if self._pattern.groups else last.group()
        return _verdict((found or "").strip() == gold, gold)

    def reference(self, gold: Any) -> str | None:
        return None


def _compiled(pattern: str, what: str) -> re.Pattern[str]:
    try:
        if len(pattern) > _MAX_PATTERN_CHARACTERS:
            raise ConfigError(f"{what} has {len(pattern)} characters, more than {_MAX_PATTERN_CHARACTERS}; shorten it")
        return re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{what}, {pattern[:80]!r}, is no regular expression: {error}; correct it") from error


class Choice:
    """A letter: all of the answer, else the one after the last "answer is", else the last capital that stands alone and
    is no word. Rows say "B", or 1 (from 0)."""

    def __init__(self) -> None:
        self.version = package_version("p2prl")

    def gold(self, value: object, where: str) -> str:
        if type(value) is int and 0 <= value < 26:
            return chr(ord("A") + value)
        letter = str(value).strip().strip("().").upper()
        if len(letter) != 1 or not "A" <= letter <= "Z":
            raise ConfigError(
                f"the answer of {where}, {str(value)[:50]!r}, is no letter and no place from 0; correct it"
            )
        return letter

    def grade(self, gold: str, answer: str) -> tuple[float, str]:
        found = chosen_letter(answer)
        return (0.0, "no letter in the answer") if found is None else _verdict(found == gold, gold)

    def reference(self, gold: str) -> str:
        return gold


def chosen_letter(answer: str) -> str | None:
    """In upper case."""
    if only := _ONLY_LETTER.fullmatch(answer):
        return only[1].upper()
    if said := _SAID_CHOICE.findall(answer):
        return "".join(said[-1]).upper()
    alone = _LONE_LETTER.findall(answer)
    return alone[-1] if alone else None


def _math(**options: Any) -> Grader:
    from p2prl.environments.math_grader import MathGrader

    return MathGrader(**options)


def _python_tests(**options: Any) -> Grader:
    from p2prl.environments.python_tests import PythonTests

    return PythonTests(**options)


GRADERS: dict[str, tuple[Callable[..., Grader], Mapping[str, type]]] = {
    "exact": (Exact, {"ignore_case": bool}),
    "number": (Number, {"tolerance": float}),
    "regex": (Regex, {"pattern": str}),
    "choice": (Choice, {}),
    "math": (_math, {}),
    "python_tests": (_python_tests, {"sandbox": str}),
}


def option_names(kind: str) -> list[str]:
    return sorted(GRADERS[kind][1])


def make_grader(kind: str, options: Mapping[str, object], owner: str) -> Grader:
    make, known = GRADERS[kind]
    for name, value in options.items():
        if not isinstance(value, known[name]) and not (known[name] is float and type(value) is int):
            raise ConfigError(f"{owner}: {name} = {value!r} is no {known[name].__name__}; change it in the recipe")
    try:
        return make(**options)
    except ConfigError as error:
        raise ConfigError(f"{owner}: {error}") from error
