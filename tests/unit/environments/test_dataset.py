import json
from collections.abc import Callable
from pathlib import Path

import pytest

from p2prl.environments import dataset
from p2prl.environments.registry import HELD_OUT_FROM, Environment, load_environment
from p2prl.environments.rows import data_hash
from p2prl.errors import ConfigError

Load = Callable[..., Environment]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def made(rows: list[dict], **params: object) -> Environment:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return load_environment("dataset:rows.jsonl", params, [tmp_path])

    return made


ROWS = [{"question": f"What is {number} + 1?", "answer": number + 1} for number in range(200)]


def test_rows_become_prompts_and_a_tenth_is_held_out(load: Load) -> None:
    environment = load(ROWS, grader="number", template="{question} Answer:")
    count = environment.num_prompts
    assert count is not None and 160 < count < 195
    trained = {environment.prompt(index) for index in range(count)}
    held_out = {environment.prompt(HELD_OUT_FROM + index) for index in range(300)}
    assert len(trained) == count and len(held_out) == 200 - count
    assert not trained & held_out
    prompt = environment.prompt(0)
    right = int(prompt.split()[2]) + 1
    assert prompt == f"What is {right - 1} + 1? Answer:"
    assert environment.reward(0, f"It is {right}")[0] == 1.0
    assert environment.reward(0, f"It is {right + 1}") == (0.0, f"expected {right}")
    assert environment.prompt(count) == prompt


def test_the_bare_file_name_is_enough(load: Load, tmp_path: Path) -> None:
    load(ROWS)
    assert load_environment("rows.jsonl", {}, [tmp_path]).name == "dataset:rows.jsonl"


def test_choices_become_lettered_lines(load: Load) -> None:
    row = {"q": "Which?", "options": ["red", "blue"], "key": 1}
    environment = load([row], grader="choice", template="{q}\n{options}\nLetter:", answer="key")
    assert environment.prompt(0) == "Which?\nA. red\nB. blue\nLetter:"
    assert environment.reward(0, "B")[0] == 1.0


def test_only_the_part_that_counts_is_graded(load: Load) -> None:
    environment = load([{"question": "q", "answer": "5"}], extract="boxed", template="{question} in \\boxed{}")
    assert environment.prompt(0) == "q in \\boxed{}"
    assert environment.reward(0, "6 or \\boxed{5}") == (1.0, "right")
    assert environment.reward(0, "5") == (0.0, "no \\boxed{...} in the answer")


def test_one_row_is_on_both_sides(load: Load) -> None:
    environment = load([{"question": "only", "answer": "x"}])
    assert environment.prompt(0) == environment.prompt(HELD_OUT_FROM) == "only"


def test_another_file_than_the_recipes_is_refused(load: Load, tmp_path: Path) -> None:
    load(ROWS)
    found = data_hash(tmp_path / "rows.jsonl")
    assert load(ROWS, hash=found).prompt(0)
    with pytest.raises(ConfigError, match="it is another file or another version"):
        load(ROWS[:-1], hash=found)


@pytest.mark.parametrize(
    ("rows", "params", "message"),
    [
        ([], {}, "has no rows"),
        ([{"question": "q"}], {}, "row 1 of rows.jsonl has no column 'answer'; did you mean 'question'"),
        ([{"question": "q", "answer": None}], {}, "has nothing in column 'answer'"),
        ([{}], {}, "has nothing in column"),
        (
            [{"question": "q", "answer": "a"}],
            {"template": "{questoin}"},
            "no column 'questoin'; did you mean 'question'",
        ),
        ([{"question": "", "answer": "a"}], {}, "the prompt of row 1 of rows.jsonl has 0 characters"),
        ([{"question": "q", "answer": "a"}], {"grader": "numbr"}, "no grader 'numbr'; did you mean 'number'"),
        ([{"question": "q", "answer": "a"}], {"grader": "number"}, "'a', holds no number"),
        ([{"question": "q", "answer": "a"}], {"tolerance": 0.1}, "no parameter 'tolerance'"),
        ([{"question": "q", "answer": "a"}], {"extract": "tags"}, "extract = 'tags' is unknown"),
        ([{"question": "q", "answer": "a"}], {"template": 3}, "template = 3 is no text"),
    ],
)
def test_what_is_wrong_is_a_sentence(load: Load, rows: list[dict], params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(rows, **params)


def test_a_list_has_no_more_items_than_letters(tmp_path: Path) -> None:
    (tmp_path / "many.jsonl").write_text(json.dumps({"question": list(range(27)), "answer": "A"}))
    with pytest.raises(ConfigError, match="list of 27"):
        load_environment("dataset:many.jsonl", {}, [tmp_path])


def test_a_template_that_makes_too_much_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_MAX_CHARACTERS", 100)
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "A"}\n' * 20)
    with pytest.raises(ConfigError, match="more than 100 characters"):
        load_environment("dataset:rows.jsonl", {"template": "{question}" + "x" * 10}, [tmp_path])


def test_a_row_is_on_one_side_whatever_template_it_is_asked_with(load: Load, tmp_path: Path) -> None:
    """Or what one member of a mixture trains on would be held out in another."""
    rows = [{"question": f"What is {number % 150} + 1?", "answer": number % 150 + 1} for number in range(200)]
    plain = load(rows, grader="number")
    other = load_environment("dataset:rows.jsonl", {"grader": "number", "template": "Say: {question} "}, [tmp_path])
    (tmp_path / "again.jsonl").write_text((tmp_path / "rows.jsonl").read_text())
    copied = load_environment("dataset:again.jsonl", {}, [tmp_path])

    def sides(environment: Environment) -> tuple[set[str], set[str]]:
        assert environment.num_prompts is not None
        training = {environment.prompt(index) for index in range(environment.num_prompts)}
        return training, {environment.prompt(HELD_OUT_FROM + index) for index in range(200)}

    trained, held_out = sides(plain)
    assert len(held_out) > 5 and not trained & held_out and len(trained | held_out) == 150
    assert sides(other) == ({f"Say: {text} " for text in trained}, {f"Say: {text} " for text in held_out})
    assert sides(copied) == (trained, held_out)
