"""Programs that a model wrote, judged by what they give: the grader `python_tests`.

In: a row's tests, an answer with a program in it (the last fenced block, else all of it). Out: reward 1 when every test
gives what it should, with the first that doesn't.

Only where the recipe asks for it (`sandbox = "bubblewrap"`) and bubblewrap works. Tests are `{call, result}`, an
expression and what it is, or `{input, output}`, what the program reads and prints. What should come out never enters
the sandbox: a program that knows it has computed it.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from p2prl.environments.registry import package_version
from p2prl.environments.sandbox import Sandbox
from p2prl.errors import ConfigError

MAX_TESTS = 16
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_PROGRAM_BYTES = 2**16  # it is an argument, and Linux takes no longer one than 2**17
# What it prints goes nowhere; the results leave by a descriptor that it was not told of.
_CALLS = """
import json, os, sys
task = json.loads(sys.stdin.read())
out = os.dup(1)
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
found, names = [], {"__name__": "answer"}
exec(compile(task["program"], "answer", "exec"), names)
for call in task["calls"]:
    try:
        found.append(repr(eval(call, names)))
    except Exception as error:
        found.append("raised " + type(error).__name__)
os.write(out, json.dumps(found).encode())
os._exit(0)
"""


class Test(msgspec.Struct, frozen=True):
    """`call` and `result`, or `input` and `output`."""

    call: str = ""
    result: str | None = None
    input: str = ""
    output: str | None = None


class PythonTests:
    """Implements `graders.Grader`."""

    def __init__(self, sandbox: str = "") -> None:
        if sandbox != "bubblewrap":
            raise ConfigError(
                'the grader python_tests runs what models write; a recipe that wants that says sandbox = "bubblewrap"'
            )
        self.version = package_version("p2prl")
        self._sandbox = Sandbox()

    def gold(self, value: object, where: str) -> tuple[Test, ...]:
        try:
            data = json.loads(value) if isinstance(value, str) else value
            tests = msgspec.convert(data, tuple[Test, ...])
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise ConfigError(f"the tests of {where} can't be read: {str(error)[:200]}; correct them") from error
        kinds = {_kind(test) for test in tests}
        if not 1 <= len(tests) <= MAX_TESTS or len(kinds) > 1 or "" in kinds:
            raise ConfigError(
                f"{where} needs 1 to {MAX_TESTS} tests, all {{call, result}} or all {{input, output}}; correct it"
            )
        return tests

    def grade(self, gold: Sequence[Test], answer: str) -> tuple[float, str]:
        program = program_of(answer)
        num_bytes = len(program.encode("utf-8", "replace"))
        if not program.strip() or num_bytes > _MAX_PROGRAM_BYTES:
            return 0.0, f"a program of {num_bytes} bytes; it takes 1 to {_MAX_PROGRAM_BYTES}"
        if "\0" in program:
            return 0.0, "a program with a null character"
        wrong = self._calls(gold, program) if gold[0].call else self._prints(gold, program)
        return (0.0, wrong[:200]) if wrong else (1.0, f"all {len(gold)} tests passed")

    def reference(self, gold: Any) -> str | None:
        return None

    def _calls(self, tests: Sequence[Test], program: str) -> str:
        """The first that is wrong; "" when all are right."""
        task = json.dumps({"program": program, "calls": [test.call for test in tests]})
        outcome = self._sandbox.run(_CALLS, task.encode("utf-8", "replace"))
        if outcome.trouble:
            return f"the program failed: {outcome.trouble}"
        try:
            found = msgspec.json.decode(outcome.output, type=list[str])
        except msgspec.MsgspecError:
            found = []
        for place, test in enumerate(tests):
            given = found[place] if place < len(found) else "nothing"
            wanted = _canonical(test.result or "")
            if given != wanted:
                return f"{test.call[:80]} gave {given[:60]}, not {wanted[:60]}"
        return ""

    def _prints(self, tests: Sequence[Test], program: str) -> str:
        for number, test in enumerate(tests, 1):
            outcome = self._sandbox.run(program, test.input.encode("utf-8", "replace"))
            if outcome.trouble:
                return f"test {number}: {outcome.trouble}"
            if _lines(outcome.output.decode("utf-8", "replace")) != _lines(test.output or ""):
                return f"test {number}: another output"
        return ""


def _kind(test: Test) -> str:
    """ "call", "input", or "" for a test that is neither or both."""
    if test.call:
        return "call" if test.result is not None and test.output is None and not test.input else ""
    return "input" if test.output is not None and test.result is None else ""


def program_of(answer: str) -> str:
    found = _BLOCK.findall(answer)
    return found[-1] if found else answer


def _canonical(result: str) -> str:
    """As repr writes it, for what can be written as a literal."""
    try:
        return repr(ast.literal_eval(result))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return result


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
