"""The card says what happened, whatever peers wrote into their manifests."""

import math

import msgspec

from p2prl.models.card import Facts, Training, card, training_of
from p2prl.records import Manifest
from tests import factories

RECIPE = {
    "swarm": "ab" * 32,
    "recipe_name": "sums",
    "recipe_text": 'name = "sums"\n',
    "environment": "addition",
    "objective": "gepo_vcpo: clip = 0.2",
    "source": "builtin:addition",
}
WHOLE = Facts("whole", "cd" * 32, "apache-2.0", True, "p2prl 0.1.0")


def chain(length: int) -> list[Manifest]:
    return [
        factories.manifest(step, step % 3 == 0, group_rewards=(step / length,), group_answers=(8,))
        for step in range(1, length + 1)
    ]


def training(length: int = 45, **over) -> Training:
    return msgspec.structs.replace(training_of(factories.version(length), chain(length), **RECIPE), **over)


def test_steps_are_summed_up_in_a_few_rows() -> None:
    made = training()
    assert (made.step, made.num_groups, made.num_answers) == (45, 45, 360)
    assert made.learners == ((factories.identity(0).peer_id, 30), (factories.identity(1).peer_id, 15))
    assert [made.spans[0].first, made.spans[0].last, made.spans[-1].last] == [1, 3, 45]
    assert len(made.spans) == 15 and made.spans[0].reward is not None
    assert math.isclose(made.spans[0].reward, 2 / 45)
    assert all(one.last + 1 == other.first for one, other in zip(made.spans, made.spans[1:], strict=False))


def test_it_has_everything_a_reader_asks_for() -> None:
    made = training()
    text = card(made, WHOLE)
    wanted = [
        made.swarm,
        made.version,
        made.state_hash,
        "```toml",
        'name = "sums"',
        "clip = 0.2",
        "license: apache-2.0",
    ]
    for words in [*wanted, made.learners[0][0], "AutoTokenizer", "| 1-3 | 3 | 24 | 0.0444 |", "0123456789+-*= "]:
        assert words in text
    assert "PeftModel" in card(made, msgspec.structs.replace(WHOLE, kind="adapter"))
    unknown = card(made, msgspec.structs.replace(WHOLE, licence=""))
    assert "license:" not in unknown and "Not known here" in unknown
    assert "## Training record" in card(training(0), WHOLE)


def test_numbers_that_are_none_are_left_out() -> None:
    odd = factories.manifest(
        1, group_rewards=(math.nan,), metrics={"eval_reward": math.inf}, published_at=1e300, group_answers=(0,)
    )
    made = training_of(odd.version, [odd], **RECIPE)
    assert made.spans[0].reward is None and made.spans[0].eval_reward is None
    assert "| 1 | 1 | 0 |  |  |  |" in card(made, WHOLE)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Training) == made


def test_a_recipe_stays_inside_its_fence_and_a_source_inside_its_cell() -> None:
    text = card(training(1, recipe_text="```\n# heading\n````", source="folder:/a`|b\n# c"), WHOLE)
    assert "\n`````toml\n```\n# heading\n````\n`````\n" in text
    assert "`folder:/a b # c`" in text
