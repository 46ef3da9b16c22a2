import pytest

from p2prl.environments.registry import HELD_OUT_FROM, Answered, Conversing, load_environment
from p2prl.errors import ConfigError

DOUBLES = """
class Doubles:
    num_prompts = 20
    def __init__(self, factor=2):
        if factor == 0:
            raise ValueError("nothing to learn")
        self.factor = factor
    def prompt(self, index):
        return f"{index} times {self.factor}?"
    def answer(self, index):
        return index * self.factor
    def reward(self, index, answer):
        return float(answer.strip() == str(index * self.factor))

class Endless:
    def prompt(self, index):
        return f"say {index}"
    def reward(self, index, answer):
        return (1, "said") if answer == str(index) else (0, "not said")

class Empty:
    num_prompts = 0
    def prompt(self, index): ...
    def reward(self, index, answer): ...

class Half:
    def prompt(self, index): ...
"""
POINTS = {name.lower(): f"my_tasks:{name}" for name in ("Doubles", "Endless", "Empty", "Half", "Missing")}


@pytest.fixture(autouse=True)
def package(install, monkeypatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "my_tasks", raising=False)
    install("My_Tasks", POINTS, "my_tasks", DOUBLES)


def test_a_plain_class_is_an_environment() -> None:
    environment = load_environment("my-tasks:doubles", {"factor": 3})
    assert (environment.name, environment.version) == ("my-tasks:doubles", "My_Tasks==1.5")
    assert environment.prompt(4) == "4 times 3?"
    assert environment.reward(4, " 12 ") == (1.0, "the environment's own reward")
    assert load_environment("doubles", {}).name == "my-tasks:doubles"


def test_the_last_tenth_of_a_finite_one_is_held_out() -> None:
    environment = load_environment("doubles", {})
    assert environment.num_prompts == 18
    asked = {environment.prompt(index) for index in range(100)}
    held_out = {environment.prompt(HELD_OUT_FROM + index) for index in range(100)}
    assert (len(asked), len(held_out)) == (18, 2)
    assert not asked & held_out


def test_one_without_a_count_gets_every_index() -> None:
    environment = load_environment("endless", {})
    assert environment.num_prompts is None
    assert environment.prompt(HELD_OUT_FROM + 1) == f"say {HELD_OUT_FROM + 1}"
    assert environment.reward(5, "5") == (1.0, "said")


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("my-tasks:doublet", {}, "did you mean 'my-tasks:doubles'"),
        ("doublet", {}, "did you mean 'doubles'"),
        ("doubles", {"facto": 3}, "no parameter 'facto'; did you mean 'factor'"),
        ("doubles", {"factor": 0}, "ValueError: nothing to learn; correct its parameters"),
        ("empty", {}, "num_prompts = 0"),
        ("half", {}, "no method reward"),
        ("missing", {}, "can't be loaded: AttributeError"),
    ],
)
def test_what_is_wrong_is_a_sentence(name: str, params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(name, params)


def test_two_of_one_bare_name_are_told_apart_by_their_source(install) -> None:
    install("other-tasks", {"doubles": "my_tasks:Endless", "chain_sum": "my_tasks:Endless"}, "others", "")
    with pytest.raises(
        ConfigError, match="2 environments named 'doubles': say which, my-tasks:doubles or other-tasks:doubles"
    ):
        load_environment("doubles", {})
    assert load_environment("other-tasks:doubles", {}).prompt(1) == "say 1"
    with pytest.raises(ConfigError, match="reasoning_gym:chain_sum or other-tasks:chain_sum"):
        load_environment("chain_sum", {})


def test_two_of_one_whole_name_are_refused(install) -> None:
    site = install("twice", {"doubles": "my_tasks:Endless"}, "twice", "")
    with (site / "twice-1.5.dist-info" / "entry_points.txt").open("a") as file:
        file.write("doubles = my_tasks:Doubles\n")
    with pytest.raises(ConfigError, match="two environments named 'twice:doubles': my_tasks:Doubles, my_tasks:Endless"):
        load_environment("twice:doubles", {})


def test_the_built_in_keeps_its_name(install) -> None:
    install("other-tasks", {"addition": "my_tasks:Endless"}, "others", "")
    assert load_environment("addition", {}).version.startswith("p2prl==")
    assert load_environment("other-tasks:addition", {}).prompt(1) == "say 1"


ODD = """
class Text(str):
    pass

class Fine:
    def prompt(self, index): return Text("7?")
    def reward(self, index, answer): return 1

class Endless(Fine):
    num_prompts = 10**30

class Exits(Fine):
    def __init__(self): raise SystemExit(3)

class Property(Fine):
    @property
    def num_prompts(self): raise ValueError("no number")
"""


def test_odd_classes_are_a_sentence_and_odd_text_is_text(install) -> None:
    install(
        "odd-tasks", {name: f"odd_tasks:{name}" for name in ("Fine", "Endless", "Exits", "Property")}, "odd_tasks", ODD
    )
    assert type(load_environment("odd-tasks:Fine", {}).prompt(0)) is str
    for name, said in (
        ("Endless", "no whole number"),
        ("Exits", "SystemExit: 3"),
        ("Property", "ValueError: no number"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_environment(f"odd-tasks:{name}", {})


TALKS = """
class Text(str):
    pass

class Guess:
    num_prompts = 20
    def prompt(self, index):
        return "Guess."
    def respond(self, index, answers):
        assert type(answers) is list
        if answers[-1] == "seven":
            return 7
        return None if answers[-1] == str(index) else Text("no")
    def reward(self, index, answers):
        return float(answers[-1] == str(index)) / len(answers), f"{len(answers)} guesses"
    def answer(self, index):
        return ["?", index] if index else 0
"""


def test_a_class_may_answer_back(install) -> None:
    install("talks", {"guess": "talks:Guess"}, "talks", TALKS)
    environment = load_environment("talks:guess", {})
    assert isinstance(environment, Conversing) and isinstance(environment, Answered)
    said = environment.respond(5, ("4",))
    assert said == "no" and type(said) is str
    assert environment.respond(5, ("4", "5")) is None
    assert environment.reward_turns(5, ("4", "5")) == (0.5, "2 guesses")
    assert environment.reward(5, "5") == (1.0, "1 guesses")
    assert (environment.reference(5), environment.answer(5)) == (["?", "5"], "?")
    assert (environment.reference(0), environment.answer(0)) == (["0"], "0")
    assert environment.respond(HELD_OUT_FROM, ("18",)) is None
    with pytest.raises(TypeError, match="its response is int, not text"):
        environment.respond(5, ("seven",))
    assert not isinstance(load_environment("doubles", {}), Conversing)
