"""A recipe whose objective can't be trained by is refused before anything runs, where the node may lead."""

import pytest

from p2prl.errors import ConfigError
from p2prl.node.base_model import prepare_base
from p2prl.paths import Home
from p2prl.recipe import ObjectiveSection, find


def changed(**section):
    return find("addition")[0].model_copy(update={"objective": ObjectiveSection.model_validate(section)})


async def test_a_wrong_option_is_found_by_those_who_may_lead(tmp_path) -> None:
    home = Home.locate(tmp_path)
    recipe = changed(name="a3po", options={"cpa": 5.0})
    with pytest.raises(ConfigError, match="did you mean 'cap'"):
        await prepare_base(recipe, home, learns=True)
    assert (await prepare_base(recipe, home)).is_file()


async def test_a_right_one_is_taken(tmp_path) -> None:
    recipe = changed(name="decoupled_ppo", prox="recompute", options={"cap": 4.0})
    assert (await prepare_base(recipe, Home.locate(tmp_path), learns=True)).is_file()
