"""What a person sees of an answer; the command itself runs in tests/e2e."""

from typing import Any, cast

import pytest

from p2prl.cli.generate import WIDTH, shower, summary, summary_text
from p2prl.node.local_rollouts import Answer, LocalRollouts, Shown, Turn
from p2prl.recipe import find


class Ended:
    """What the summary reads of `LocalRollouts`."""

    engine_name, plan, num_tokens, busy_s = "transformers 5", "", 0, 0.0


def report(*found: Shown) -> dict[str, Any]:
    return summary(find("addition")[0], cast(LocalRollouts, Ended()), list(found), 0)


def said(capsys: pytest.CaptureFixture[str], *shown: Shown) -> str:
    show = shower(color=False, count=len(shown))
    for number, one in enumerate(shown, 1):
        show(one, number)
    return capsys.readouterr().out


def test_a_group_is_a_prompt_with_answers_under_their_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    answers = (
        Answer((Turn("711"),), 1.0, "right", 4, "stop"),
        Answer((Turn("[red]7[/red] " * 30),), 0.25, "near", 99, "length"),
        Answer((Turn(""),), 0.0, "expected 711", 1, "stop"),
    )
    lines = said(capsys, Shown(12, "86+31=", answers)).splitlines()
    assert lines[1] == "--- 12 (1 of 1)  mean reward 0.417"
    assert lines[2] == "        86+31="
    assert " 1.000  right  (4 tokens)" in lines and " 0.250  near  (99 tokens, cut at the longest length)" in lines
    assert max(map(len, lines)) <= WIDTH, "long answers are wrapped"
    assert "[red]7[/red]" in "\n".join(lines), "no markup of an answer's counts"
    assert lines[-1].strip() == "(nothing)"


def test_no_control_character_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "\x1b[2J\x07\u202ex"
    text = said(capsys, Shown(1, bad, (Answer((Turn(bad),), 0.0, bad, 1, "stop"),)), Shown(2, bad, error=bad))
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "\\x1b[2J" in text and "! \\x1b" in text


def test_what_the_environment_says_between_turns_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    turns = (Turn("guess 5"), Turn("higher", drawn=False), Turn("guess 7"))
    lines = said(capsys, Shown(1, "Guess.", (Answer(turns, 1.0, "found", 6, "stop"),))).splitlines()
    assert lines[-3:] == ["        guess 5", "        environment: higher", "        guess 7"]


def test_the_summary_is_there_without_any_answer() -> None:
    text = summary_text(report(Shown(1, "?", error="none")))
    assert "mean reward  none over 0 prompts, 0 answers; 1 more could not be answered" in text


def test_the_mean_is_over_the_prompts_that_were_answered() -> None:
    answers = (Answer((Turn("7"),), 0.25, "near", 1, "stop"), Answer((Turn("8"),), 0.5, "near", 1, "stop"))
    found = report(Shown(1, "?", answers), *(Shown(index, "?", error="too long") for index in range(3)))
    assert (found["num_answered"], found["num_answers"], len(found["groups"])) == (1, 2, 4)
    line = summary_text(found).splitlines()[0]
    assert line.startswith("mean reward  0.375 +- ")
    assert line.endswith(" over 1 prompts, 2 answers; 3 more could not be answered")
    assert summary_text(report(Shown(1, "?", answers))).splitlines()[0].endswith(" over 1 prompts, 2 answers")
