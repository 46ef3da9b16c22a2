"""What `p2prl env` asks, asked in this process; the commands' own tests go through the child."""

import msgspec
import pytest

from p2prl.environments import workbench
from p2prl.environments.conversation import TurnRules
from p2prl.environments.guarded import Guarded
from p2prl.environments.spec import Member, Spec
from p2prl.errors import ConfigError

ADDITION = Spec((Member("addition"),))


def test_questions_survive_the_pipe() -> None:
    questions = [workbench.ListQuestion(("/a",)), workbench.ShowQuestion(ADDITION, 2)]
    questions += [workbench.ScoreQuestion(ADDITION, 3, ("x", "y")), workbench.CheckQuestion(ADDITION)]
    for question in questions:
        assert msgspec.json.decode(msgspec.json.encode(question), type=workbench.Question) == question


def test_a_mixture_is_counted_by_member() -> None:
    spec = Spec((Member("addition"), Member("addition", params={"digits": 3}, weight=2.0)), mixed=True)
    found = workbench.check(workbench.CheckQuestion(spec))
    assert found.members == {"addition": 100}
    assert (found.reference, found.problems) == (1.0, ())


def test_an_environment_that_forgets_is_a_problem(install) -> None:
    code = "import itertools\nclass Odd:\n    n = itertools.count()\n"
    code += "    def prompt(self, index): return f'{index} {next(self.n)}'\n    def reward(self, index, answer): return 0.5\n"
    install("odd-tasks", {"odd": "p2prl_odd_tasks:Odd"}, "p2prl_odd_tasks", code)
    found = workbench.check(workbench.CheckQuestion(Spec((Member("odd-tasks:odd", "odd-tasks==1.5"),))))
    assert any("not deterministic" in problem for problem in found.problems)
    assert found.reference == -1.0


@pytest.mark.parametrize(
    ("respond", "reward", "problem"),
    [
        ("str(next(self.n))", "0.5", "what it says to an answer was another"),
        ("None if next(self.n) > 2 else 'on'", "0.5", "a conversation was over sooner"),
        ("'on' if len(answers) < 2 else None", "next(self.n) % 2", "a reward was another"),
    ],
)
def test_words_and_rewards_that_change_are_a_problem(install, respond: str, reward: str, problem: str) -> None:
    code = "import itertools\nclass Odd:\n    n = itertools.count()\n"
    code += (
        f"    def prompt(self, index): return f'{{index}}'\n    def respond(self, index, answers): return {respond}\n"
    )
    code += f"    def reward(self, index, answers): return {reward}\n"
    name = f"odd-{problem.split()[-1]}-{len(problem)}"
    install(name, {"odd": f"{name.replace('-', '_')}:Odd"}, name.replace("-", "_"), code)
    spec = Spec((Member(f"{name}:odd", f"{name}==1.5"),), rules=TurnRules(3, 100))
    found = workbench._forgets(Guarded(spec, strict=True), [0], 3)
    assert len(found) == 1 and found[0].startswith(problem)


def test_a_reward_that_fails_is_a_problem_and_no_crash(install) -> None:
    code = "class Bad:\n    def prompt(self, index): return str(index)\n"
    code += "    def reward(self, index, answer): return float('nan')\n"
    install("bad-tasks", {"bad": "p2prl_bad_tasks:Bad"}, "p2prl_bad_tasks", code)
    spec = Spec((Member("bad-tasks:bad", "bad-tasks==1.5"),))
    found = workbench.check(workbench.CheckQuestion(spec))
    assert any("gave nan" in problem for problem in found.problems)
    assert workbench.score(workbench.ScoreQuestion(spec, 0, ("x",))) == workbench.ScoreAnswer(
        0.0, "the environment gave nan, which is not in 0 to 1"
    )


def test_a_check_is_as_strict_as_a_node() -> None:
    with pytest.raises(ConfigError, match="no version in the recipe"):
        workbench.check(workbench.CheckQuestion(Spec((Member("chain_sum"),))))


GUESS = """
class Guess:
    def prompt(self, index): return f"Guess {index}."
    def respond(self, index, answers): return None if answers[-1] == str(index) else f"not {answers[-1]}"
    def reward(self, index, answers): return float(answers[-1] == str(index)) / len(answers)
    def answer(self, index): return ["?", index]
"""


def guess(install, max_turns: int = 1) -> Spec:
    install("guess-tasks", {"guess": "p2prl_guess_tasks:Guess"}, "p2prl_guess_tasks", GUESS)
    return Spec((Member("guess-tasks:guess", "guess-tasks==1.5"),), rules=TurnRules(max_turns, 100))


def test_a_conversation_is_shown_with_what_was_said(install) -> None:
    found = workbench.show(workbench.ShowQuestion(guess(install), 1))
    assert found.turns and found.prompts[0].reward == 0.5
    assert (found.prompts[0].answers, found.prompts[0].said) == (("?", "0"), ("not ?",))
    assert not workbench.show(workbench.ShowQuestion(ADDITION, 1)).turns


def test_answers_are_scored_turn_by_turn(install) -> None:
    spec = guess(install)
    scored = workbench.score(workbench.ScoreQuestion(spec, 3, ("1", "2")))
    assert (scored.reward, scored.said) == (0.0, ("not 1", "not 2"))
    assert workbench.score(workbench.ScoreQuestion(spec, 3, ("1", "3"))).said == ("not 1",)
    with pytest.raises(ConfigError, match="over after 1 of the 2 answers"):
        workbench.score(workbench.ScoreQuestion(spec, 3, ("3", "3")))
    with pytest.raises(ConfigError, match="over after 1 of the 2 answers"):
        workbench.score(workbench.ScoreQuestion(ADDITION, 3, ("3", "3")))


def test_a_check_plays_the_reference_and_misses_the_turns_that_a_recipe_leaves_out(install) -> None:
    spec = guess(install, 4)
    found = workbench.check(workbench.CheckQuestion(spec))
    assert (found.reference, found.num_turns, found.problems) == (0.5, 2, ())
    assert 0.0 <= found.wrong < 0.01
    one = workbench.check(workbench.CheckQuestion(msgspec.structs.replace(spec, rules=TurnRules())))
    assert any("set [environment] max_turns" in problem for problem in one.problems)
