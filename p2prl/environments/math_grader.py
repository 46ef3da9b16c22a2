"""Mathematics compared as mathematics, by the package math-verify (`p2prl[math]`).

In: a right answer in LaTeX or plain, an answer's text. Out: reward 1 when both are the same expression.

math-verify's own time limits use the alarm that the guard of this process uses, so they are off: the guard's hold, and
behind them the process's watchdog. It reads at most `_MAX_CHARACTERS` of an answer's end.
"""

import logging
import re
from typing import Any

from p2prl.environments.registry import package_version
from p2prl.errors import ConfigError

_MAX_CHARACTERS = 4000
# sympy works out whole powers and factorials, in C code that no alarm interrupts. What gets by these ends the process.
_HUGE = (
    re.compile(r"[0-9]{51}"),
    re.compile(r"(?:\*\*|\^)[\s{(\\a-z]*-?[0-9]{4}"),  # an exponent of four digits
    re.compile(r"(?:\*\*|\^)[\s{(]*[0-9.a-z]*[\s})]*(?:\*\*|\^)"),  # a power in an exponent
    re.compile(r"[0-9]{4}[\s})]*!|![\s})]*!"),
)


class MathGrader:
    """Implements `graders.Grader`."""

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ConfigError(
                "the grader math needs the package math-verify; install it with: pip install 'p2prl[math]'"
            ) from error
        self.version = package_version("math-verify")
        self._parse, self._verify = math_verify.parse, math_verify.verify
        # It warns that its limits are off, once, and tells of each answer that it can't read.
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def gold(self, value: object, where: str) -> tuple[str, Any]:
        text = str(value).strip()
        if _too_large(text):
            raise ConfigError(f"the answer of {where}, {text[:50]!r}, is too large to work out; correct it")
        parsed = self._parse(text if "\\boxed" in text or "$" in text else f"${text}$", parsing_timeout=0)
        if not parsed:
            raise ConfigError(f"the answer of {where}, {text[:50]!r}, is no mathematics; correct it")
        return text, parsed

    def grade(self, gold: tuple[str, Any], answer: str) -> tuple[float, str]:
        text, parsed = gold
        counts = answer[-_MAX_CHARACTERS:]
        if _too_large(counts):
            return 0.0, "a number, power or factorial too large to work out"
        found = self._parse(counts, parsing_timeout=0)
        if not found:
            return 0.0, "no mathematics in the answer"
        same = self._verify(parsed, found, timeout_seconds=0)
        return (1.0, "right") if same else (0.0, f"expected {text}"[:200])

    def reference(self, gold: tuple[str, Any]) -> str:
        return gold[0] if "\\boxed" in gold[0] or "$" in gold[0] else f"${gold[0]}$"


def _too_large(text: str) -> bool:
    return any(pattern.search(text) for pattern in _HUGE)
