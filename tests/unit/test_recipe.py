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
    assert recipe.parse("schema = 1\n" + MINIMAL, "a").swarm_id.hex() == golden


def test_a_step_size_is_what_it_was_before_there_was_a_choice() -> None:
    """Peers of an older release train by the square root: the same id must not mean another step."""
    older, newer = recipe.parse("schema = 3\n" + MINIMAL, "a"), recipe.parse(MINIMAL, "a")
    assert (older.objective.step_power, newer.objective.step_power) == (0.5, 1.0)
    assert older.swarm_id != newer.swarm_id
    assert recipe.parse(MINIMAL + "[objective]\nstep_power = 0.5\n", "a").swarm_id == older.swarm_id


def test_a_text_without_a_schema_means_the_same_in_every_release() -> None:
    """Of this schema and of later ones: else an update alone would take its nodes into another swarm."""
    assert recipe.parse(MINIMAL, "a").schema_ == 4
    golden = "81516cd1049aaa34b98888d2c70bf4fa2a30d10ab97bd416f9236bd1ea18740d"
    assert recipe.parse(MINIMAL, "a").swarm_id.hex() == golden


@pytest.mark.parametrize("schema", ["3.0", '"3"', "true", "0", "-1"])
def test_a_schema_is_a_whole_number(schema: str) -> None:
    """What was not one counted as a schema, but not as one before step_power."""
    with pytest.raises(ConfigError, match="schema"):
        recipe.parse(f"schema = {schema}\n" + MINIMAL, "a")


def test_what_is_found_has_its_schema_in_its_text(tmp_path) -> None:
    """It is stored, served to joiners and begun with: a later release must know what it meant."""
    (tmp_path / "old.toml").write_text("schema = 3\n" + MINIMAL)
    (tmp_path / "new.toml").write_text("# mine\n" + MINIMAL)
    for name, schema in (("old", 3), ("new", 4), ("addition", 4)):
        found, text = recipe.find(name, (tmp_path,))
        assert text.count(f"schema = {schema}\n") == 1 and recipe.parse(text, "a") == found
        assert recipe.parse(text, "a").swarm_id == found.swarm_id
    assert (
        recipe.parse((tmp_path / "new.toml").read_text(), "a").swarm_id == recipe.find("new", (tmp_path,))[0].swarm_id
    )
    large = MINIMAL + "#" * (recipe.MAX_RECIPE_BYTES - len(MINIMAL))
    (tmp_path / "large.toml").write_text(large)
    assert recipe.find("large", (tmp_path,))[1] == large, "with it nobody would take it"


def test_every_recipe_that_ships_says_its_schema() -> None:
    for name, texts in recipe.available().items():
        assert f"\nschema = {recipe.SCHEMA}\n" in texts[0], name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[objective]\noptions = { cap = 5 }\n", "[objective]\noptions = { cap = 5.0 }\n"),
        ("[objective]\noptions = { cap = 0.0 }\n", "[objective]\noptions = { cap = -0.0 }\n"),
        ("[learner]\nweight_decay = 0.0\n", "[learner]\nweight_decay = -0.0\n"),
        ("[objective]\nstep_power = 1\n", "[objective]\nstep_power = 1.0\n"),
        ("params = { a = [0.0, { b = 0.0 }] }\n", "params = { a = [-0.0, { b = -0.0 }] }\n"),
    ],
)
def test_equal_values_have_one_id(one: str, other: str) -> None:
    assert recipe.parse(MINIMAL + one, "a").swarm_id == recipe.parse(MINIMAL + other, "a").swarm_id


def test_what_is_only_alike_has_another_id() -> None:
    """True is no number; a whole number may mean another prompt than a real one."""
    pairs = [
        ("[objective]\noptions = { cap = 1 }\n", "[objective]\noptions = { cap = true }\n"),
        ("params = { a = 1 }\n", "params = { a = 1.0 }\n"),
        ("params = { a = 1 }\n", "params = { a = true }\n"),
    ]
    for one, other in pairs:
        assert recipe.parse(MINIMAL + one, "a").swarm_id != recipe.parse(MINIMAL + other, "a").swarm_id


SHIPPED = {
    "addition": "1ab8b976444dfa4b",
    "addition-lora": "9a1a0ac9068b6608",
    "qwen-five-tasks": "791215d84e0d7e7e",
    "school-maths": "2c5d75120cfec28c",
    "smollm2-chain-sum": "10cb06111e1468c4",
}


def test_the_recipes_that_ship_change_their_swarms_on_purpose_only() -> None:
    for name, golden in SHIPPED.items():
        assert recipe.find(name)[0].swarm_id.hex()[:16] == golden, name


def test_keys_of_a_newer_schema_count_only_where_they_are_set() -> None:
    """So a swarm's id outlives releases; an older release refuses a recipe that uses a key it doesn't know."""
    base = recipe.parse("schema = 3\n" + MINIMAL, "a").swarm_id
    defaults = '[objective]\nprox = "none"\noptions = {}\n[learner]\ngradient_checkpointing = false\n'
    assert recipe.parse("schema = 1\n" + MINIMAL + defaults, "a").swarm_id == base
    assert recipe.parse("schema = 2\n" + MINIMAL, "a").swarm_id == base
    others = [
        '[objective]\nprox = "recompute"\n',
        "[objective]\noptions = { cap = 5 }\n",
        "[objective]\noptions = { cap = true }\n",
        "[learner]\ngradient_checkpointing = true\n",
        '[learner]\ntraining = "lora"\n',
        '[learner]\ntraining = "lora"\nlora = { rank = 8 }\n',
    ]
    assert len({base, *(recipe.parse(MINIMAL + other, "a").swarm_id for other in others)}) == 7


def test_the_swarm_id_of_a_recipe_of_schema_2_never_changes() -> None:
    text = "schema = 2\n" + MINIMAL + '[objective]\nname = "a3po"\noptions = { cap = 5.0, dual_clip = "none" }\n'
    golden = "195cafb9ea9a39a9035427ea94d289949307343b038149749d76cd8acb75465c"
    assert recipe.parse(text, "a").swarm_id.hex() == golden


MIX = """
name = "tiny"
[model]
source = "builtin:addition"
hash = "{hash}"
[[environment.mix]]
name = "addition"
[[environment.mix]]
name = "reasoning_gym:chain_sum"
version = "reasoning-gym==0.1.25"
weight = 2
params = {{ operators = ["+", "-"], inner = {{ a = [1.5] }} }}
""".format(hash="0" * 64)


def test_the_swarm_id_of_a_recipe_of_schema_3_never_changes() -> None:
    assert (
        recipe.parse("schema = 3\n" + MIX, "a").swarm_id.hex()
        == "f52c73818063ef41004778f46769d435e2b872b948e7e9df7eccb23b74c5855d"
    )
    assert recipe.parse(MIX.replace("weight = 2", "weight = 2.0"), "a").swarm_id == recipe.parse(MIX, "a").swarm_id


def test_each_part_of_a_mixture_and_of_its_parameters_counts() -> None:
    others = [
        MIX.replace("weight = 2", "weight = 3"),
        MIX.replace("1.5", "1.25"),
        MIX.replace('["+", "-"]', '["-", "+"]'),
        MIX.replace("0.1.25", "0.1.26"),
        MINIMAL,
        MINIMAL + 'same_python = "3.11"\n',
        MINIMAL + "params = { a = 1 }\n",
        MINIMAL + "params = { a = [1] }\n",
    ]
    assert len({recipe.parse(text, "a").swarm_id for text in [MIX, *others]}) == 9


def test_one_environment_is_a_mixture_of_one() -> None:
    section = recipe.parse(MINIMAL + "params = { a = 1 }\n", "a").environment
    assert [(member.name, member.params, member.weight) for member in section.members] == [("addition", {"a": 1}, 1.0)]
    assert [member.weight for member in recipe.parse(MIX, "a").environment.members] == [1.0, 2.0]


def test_no_clip_can_be_said() -> None:
    parsed = recipe.parse(MINIMAL + '[objective]\nclip = "none"\n', "a")
    assert parsed.objective.clip is None
    assert recipe.Recipe.model_validate_json(parsed.model_dump_json(by_alias=True)) == parsed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINIMAL + "[lerner]\n", "did you mean 'learner'"),
        (MINIMAL + "[learner]\nmax_aeg = 3\n", "did you mean 'max_age'"),
        (MINIMAL + "[learner]\nlearning_rate = -1\n", "learner.learning_rate"),
        (MINIMAL + "schema = 99", "schema"),
        (MINIMAL + '[objective]\nprox = "recomputed"\n', "objective.prox"),
        (MINIMAL + "[objective]\noptions = { cap = [1] }\n", "objective.options"),
        (MINIMAL + "[sampling]\ntop_p = 0.9\n", "sampling.top_p"),
        (MIX.replace("weight", "wieght"), "did you mean 'weight'"),
        (MIX.replace("weight = 2", "weight = 0"), "environment.mix.1.weight"),
        (
            MIX.replace("[[environment.mix]]", '[environment]\nname = "addition"\n[[environment.mix]]', 1),
            "belong to each",
        ),
        (MINIMAL.replace('name = "addition"', ""), "neither a name nor a mix"),
        (MINIMAL + "params = { a = 1990-01-01 }\n", "write a date or time as text"),
        (MINIMAL + "params = { a = inf }\n", "no finite number"),
        (MINIMAL + "params = { a = 9007199254740993 }\n", "beyond"),
        (MINIMAL + "params = { a = " + "[" * 8 + "]" * 8 + " }\n", "nested more than 6 deep"),
        (MINIMAL + 'same_python = "3"\n', "environment.same_python"),
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


@pytest.mark.parametrize("name", ["", ".", "..", "/", "/tmp", "x/", "x" * 300, "\0"])
def test_what_is_no_name_is_answered_like_an_unknown_one(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no recipe"):
        recipe.find(name)


def test_the_name_of_a_file_that_lies_here_is_answered_with_the_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"give it as mine\.toml"):
        recipe.find("mine")


def test_a_broken_file_beside_the_recipes_hides_none_of_them(tmp_path) -> None:
    (tmp_path / "broken.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.toml").mkdir()
    assert recipe.find("addition", (tmp_path,))[0].name == "addition"


def test_every_recipe_that_ships_is_valid() -> None:
    for name, texts in recipe.available().items():
        assert recipe.parse(texts[0], name).name == name


@pytest.mark.parametrize("value", ["[" * 3000, "{a=" * 3000, "9" * 5000, "'\ud800'"])
def test_no_text_of_a_peer_is_more_than_a_sentence(value: str) -> None:
    with pytest.raises(ConfigError):
        recipe.parse(f"name = {value}", "a peer's recipe")


STOP = MINIMAL + '[sampling]\nstop = ["</answer>", "\\n\\n"]\n'


def test_the_swarm_id_of_a_recipe_of_schema_4_never_changes() -> None:
    found = recipe.parse(STOP, "a")
    assert found.sampling.record().stop == ("</answer>", "\n\n")
    assert found.swarm_id.hex() == "184edb038ed621394163a9d1145823d0496eecc532df43da7f75ee7288eea8c0"
    assert recipe.parse(MINIMAL + "[sampling]\nstop = []\n", "a").swarm_id == recipe.parse(MINIMAL, "a").swarm_id
    assert recipe.parse(STOP.replace("answer", "x"), "a").swarm_id != found.swarm_id


@pytest.mark.parametrize("stop", ['[""]', '["\\uFFFD"]', f'["{"x" * 65}"]', str(["x"] * 9), "[1]", '"x"'])
def test_stop_strings_that_can_end_nothing_are_refused(stop: str) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.stop"):
        recipe.parse(MINIMAL + f"[sampling]\nstop = {stop}\n", "a")


TURNS = """
name = "a"
[model]
source = "builtin:addition"
hash = "{hash}"
[environment]
name = "addition"
max_turns = {turns}
max_given_tokens = 100
[sampling]
max_new_tokens = {tokens}
""".replace("{hash}", "0" * 64)


def test_the_longest_answer_counts_turns_and_what_is_said_between_them() -> None:
    made = recipe.parse(TURNS.format(turns=3, tokens=10), "a")
    assert (made.most_drawn, made.longest_answer) == (30, 130)
    assert recipe.parse(TURNS.format(turns=1, tokens=10), "a").longest_answer == 10
    with pytest.raises(ConfigError, match=r"max_turns times .* are 131172 tokens, over 131072; lower one"):
        recipe.parse(TURNS.format(turns=2, tokens=65536), "a")


def test_turns_make_another_swarm() -> None:
    one, two = (recipe.parse(TURNS.format(turns=turns, tokens=10), "a") for turns in (1, 2))
    assert one.swarm_id != two.swarm_id
