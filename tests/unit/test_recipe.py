"""A recipe is refused with the key at fault, and its swarm id depends on every value but the name."""

import pytest

from p2prl import recipe
from p2prl.errors import ConfigError

MINIMAL = """
name = "tiny"
[model]
source = "builtin:addition"
hash = "{hash}"
[environment]
name = "addition"
""".format(hash="0" * 64)


def test_the_name_is_not_in_the_swarm_id_but_every_value_is() -> None:
    base = recipe.parse(MINIMAL, "a").swarm_id
    assert recipe.parse(MINIMAL.replace('"tiny"', '"other"'), "a").swarm_id == base
    assert recipe.parse(MINIMAL + "[learner]\nmax_age = 65\n", "a").swarm_id != base


def test_a_default_that_is_written_out_gives_the_same_id() -> None:
    assert recipe.parse(MINIMAL + "[learner]\nmax_age = 64\n", "a").swarm_id == recipe.parse(MINIMAL, "a").swarm_id


def test_the_swarm_id_of_a_recipe_never_changes() -> None:
    golden = "10089c7fb5b26a1d7bc807368699ba77cf712620abc8fbee757f0bec273ed790"
    assert recipe.parse(MINIMAL, "a").swarm_id.hex() == golden


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINIMAL + "[lerner]\n", "did you mean 'learner'"),
        (MINIMAL + "[learner]\nmax_aeg = 3\n", "did you mean 'max_age'"),
        (MINIMAL + "[learner]\nlearning_rate = -1\n", "learner.learning_rate"),
        (MINIMAL + "schema = 99", "schema"),
        (MINIMAL + "[sampling]\ntop_p = 0.9\n", "sampling.top_p"),
        ("name = ", "not valid TOML"),
        ("schema = 99\n" + MINIMAL, "newer p2prl"),
        ("x" * 40_000, "too large"),
    ],
)
def test_a_bad_recipe_is_refused_with_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recipe.parse(text, "x.toml")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'addition'"):
        recipe.find("additoin")


def test_every_recipe_that_ships_is_valid() -> None:
    for name, texts in recipe.available().items():
        assert recipe.parse(texts[0], name).name == name
