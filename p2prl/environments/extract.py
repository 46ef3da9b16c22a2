"""Which part of an answer counts.

In: a rule's name, an answer's text. Out: that part, or None where the answer has no such part.
"""

from p2prl.errors import ConfigError

RULES = ("all", "tag", "boxed", "last_line")
_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = "\\boxed{"
MISSING = {"tag": "no <answer>...</answer> in the answer", "boxed": "no \\boxed{...} in the answer"}


def checked_rule(rule: object, owner: str) -> str:
    if rule not in RULES:
        raise ConfigError(f"{owner}: extract = {rule!r} is unknown; use one of {', '.join(RULES)}")
    return str(rule)


def extract(rule: str, answer: str) -> str | None:
    """`all`: the whole text; `tag`: the last <answer>; `boxed`: the last box; `last_line`: the last one with a word."""
    match rule:
        case "tag":
            return _last_tag(answer)
        case "boxed":
            return _last_box(answer)
        case "last_line":
            lines = [line for line in answer.splitlines() if line.strip()]
            return lines[-1].strip() if lines else ""
    return answer.strip()


def _last_tag(text: str) -> str | None:
    """By plain search: a pattern would look at a text of open tags once for each of them."""
    start = text.rfind(_OPEN, 0, max(0, text.rfind(_CLOSE)))
    if start < 0:
        return None
    first = start + len(_OPEN)
    return text[first : text.find(_CLOSE, first)].strip()


def _last_box(text: str) -> str | None:
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth, first = 1, start + len(_BOX)
    for place in range(first, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[first:place].strip()
    return None
