import platform
from pathlib import Path

import msgspec
import pytest

from p2prl import recipe
from p2prl.environments.conversation import TurnRules
from p2prl.environments.mixture import Mixture
from p2prl.environments.reasoning_gym import UNSAFE
from p2prl.environments.spec import Member, Spec, decode, open_environment, spec_of
from p2prl.errors import ConfigError

GYM = "reasoning-gym==0.1.25"
HEAD = f'name = "x"\n[model]\nsource = "builtin:addition"\nhash = "{"0" * 64}"\n'


def spec(text: str) -> Spec:
    return spec_of(recipe.parse(HEAD + text, "x").environment, recipe.data_folders())


def test_a_recipes_section_survives_the_command_line() -> None:
    made = spec('[environment]\nname = "addition"\nparams = { digits = 3 }')
    assert decode(msgspec.json.encode(made).decode()) == made
    assert open_environment(made).prompt(0)


def test_a_mixture() -> None:
    text = f'[[environment.mix]]\nname = "addition"\n[[environment.mix]]\nname = "chain_sum"\nversion = "{GYM}"\nweight = 3\n'
    environment = open_environment(spec(text))
    assert isinstance(environment, Mixture)
    assert {member.name for member in environment.members} == {"addition", "reasoning_gym:chain_sum"}


@pytest.mark.parametrize("name", sorted(UNSAFE))
def test_one_that_differs_between_pythons_needs_same_python(name: str) -> None:
    text = f'[environment]\nname = "reasoning_gym:{name}"\nversion = "{GYM}"\n'
    with pytest.raises(ConfigError, match=f"{name} is not the same everywhere .*same_python"):
        open_environment(spec(text))
    here = ".".join(platform.python_version_tuple()[:2])
    assert open_environment(spec(text + f'same_python = "{here}"')).prompt(1)
    with pytest.raises(ConfigError, match=f"wants Python {here} on every node .*, this is 3.99"):
        open_environment(spec(text + f'same_python = "{here}"'), python="3.99")


def test_a_composite_of_one_that_differs_is_refused_too() -> None:
    params = {"datasets": [{"name": "knight_swap", "weight": 1.0, "config": {}}]}
    with pytest.raises(ConfigError, match="knight_swap: was seen to differ"):
        open_environment(Spec((Member("composite", GYM, params),)))


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (Member("reasoning_gym:chain_sum"), 'no version in the recipe; write version = "reasoning-gym=='),
        (Member("reasoning_gym:chain_sum", "reasoning-gym==0.1.24"), "pip install 'reasoning-gym==0.1.24'"),
        (Member("addition", "p2prl==99"), "the recipe wants addition from p2prl==99, here it is p2prl=="),
        (Member("dataset:school-maths.jsonl", params={"grader": "exact"}), "has no hash in the recipe"),
    ],
)
def test_a_version_or_hash_that_is_missing_or_another_is_refused(member: Member, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_environment(Spec((member,), folders=tuple(map(str, recipe.data_folders()))))


@pytest.mark.parametrize("path", sorted(Path("configs/recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_the_environment_of_every_recipe_that_ships_opens(path: Path) -> None:
    section = recipe.load(path).environment
    environment = open_environment(spec_of(section, recipe.data_folders()))
    assert environment.prompt(0) and environment.prompt(2**40)


def test_a_version_that_a_shell_would_run_is_not_advised() -> None:
    hostile = "x'; rm -rf ~; 'reasoning-gym==0.1.25"
    with pytest.raises(ConfigError, match="don't trust that recipe") as caught:
        open_environment(Spec((Member("addition", hostile),)))
    assert "pip install" not in str(caught.value)


def test_turns_come_from_the_recipe_and_need_an_environment_that_has_some() -> None:
    made = spec('[environment]\nname = "addition"\nmax_turns = 3\nmax_given_tokens = 50')
    assert made.rules == TurnRules(3, 50) and decode(msgspec.json.encode(made).decode()) == made
    with pytest.raises(ConfigError, match="addition says nothing to an answer, and the recipe has max_turns = 3"):
        open_environment(made)
    assert spec('[environment]\nname = "addition"').rules.max_turns == 1
