"""What a swarm agrees on: a recipe file to a checked `Recipe` and its swarm id.

In: recipe TOML (from disk, the wheel or a peer). Out: `Recipe`; `swarm_id` = blake3 of its canonical form, the prefix of
every topic, key and protocol name.

Canonical form: every key with its resolved value plus `schema`, sorted, as msgpack; the name is for people and not in
it. Equal values are the same bytes, however they were written. A release that adds a key raises SCHEMA and still computes
the ids of older recipes: a recipe that sets none of the newer keys has the canonical form of the schema before them, and
a text that names no schema is of UNSAID for ever; `find` writes it in. No node can override a key.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from blake3 import blake3
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from p2prl.errors import ConfigError
from p2prl.recipe_values import Params, canonical, real
from p2prl.records import Sampling

SCHEMA = 4
UNSAID = 4  # the schema of a text that names none: it stays when SCHEMA rises, else such a text changed its swarm
MAX_RECIPE_BYTES = 32 * 2**10
_SECOND = {"objective": ("prox", "options"), "learner": ("gradient_checkpointing", "lora")}  # keys of schema 2
_THIRD = {"environment": ("mix", "same_python")}  # and parameters that are lists or tables
_FOURTH = {"sampling": ("stop",), "environment": ("max_turns", "max_given_tokens"), "objective": ("step_power",)}
_BEFORE = {"step_power": 0.5}  # what a newer key was before there was a choice, where that is not its default
MAX_ANSWER_TOKENS = 2**17  # as `records.Tokens` has it
MIXTURE = "mixture"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSection(Section):
    source: Annotated[str, Field(max_length=256)]
    """Where version 0 comes from: builtin:addition, gguf:PACKAGE==VERSION, folder:PATH."""
    hash: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """blake3 of version 0's bf16 state in canonical order, hex."""


class MixMember(Section):
    """One environment of a mixture."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    version: Annotated[str, Field(max_length=128)] = ""
    params: Params = {}
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Its share of the prompts is this over the sum of all."""


class EnvironmentSection(Section):
    name: Annotated[str, Field(max_length=128)] = MIXTURE
    """SOURCE:NAME as `p2prl env list` shows it; left out where there is a mix."""
    version: Annotated[str, Field(max_length=128)] = ""
    """package==version it comes from, which every node must have; empty: any (the built-in one)."""
    params: Params = {}
    """The environment's own parameters."""
    mix: Annotated[tuple[MixMember, ...], Field(max_length=64)] = ()
    """Several environments, drawn by weight, instead of one."""
    same_python: Annotated[str, Field(pattern=r"^(3\.[0-9]{1,2})?$")] = ""
    """The Python that every node must run, as 3.11: for environments whose prompts differ between versions of it."""
    max_turns: Annotated[int, Field(ge=1, le=64)] = 1
    """Turns of an answer at most, each of up to `sampling.max_new_tokens`, where the environment answers back."""
    max_given_tokens: Annotated[int, Field(ge=1, le=65536)] = 1024
    """Most tokens of what it says between an answer's turns, all together; counts only with several turns."""

    @model_validator(mode="after")
    def _one_or_a_mix(self) -> "EnvironmentSection":
        if self.mix and (self.name != MIXTURE or self.version or self.params):
            raise ValueError("name, version and params belong to each member of mix, not beside it")
        if not self.mix and self.name == MIXTURE:
            raise ValueError("it has neither a name nor a mix; `p2prl env list` shows what there is")
        return self

    @property
    def members(self) -> tuple[MixMember, ...]:
        """The mix, or the one environment as a mix of one."""
        return self.mix or (MixMember(name=self.name, version=self.version, params=self.params),)


class SamplingSection(Section):
    group_size: Annotated[int, Field(ge=2, le=256)] = 8
    """Answers to each prompt."""
    max_new_tokens: Annotated[int, Field(ge=1, le=65536)] = 32
    """Longest answer, tokens."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0
    """Only 1.0 (off): the learner does not apply the filter yet, so filtered data would be off-policy when fresh."""
    top_k: Annotated[int, Field(ge=0, le=0)] = 0
    """Only 0 (off), for the same reason."""

    stop: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=64)], ...], Field(max_length=8)] = ()
    """An answer ends with the token that completes one of these texts; rewards see its text up to their end."""

    @field_validator("stop")
    @classmethod
    def _readable(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if any("\ufffd" in string for string in stop):
            raise ValueError("a stop string holds U+FFFD, which stands for bytes that are no text; leave it out")
        return stop

    def record(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.max_new_tokens, self.stop)


Option = Annotated[int, Field(ge=-(2**53), le=2**53)] | float | Annotated[str, Field(max_length=64)] | bool


def _nothing(value: object) -> object:
    """TOML has no word for None."""
    return None if value == "none" else value


class ObjectiveSection(Section):
    """What is an option of the objective is checked where torch is: before a node runs, and by its learner."""

    name: Annotated[str, Field(max_length=64)] = "gepo_vcpo"
    clip: Annotated[float | None, BeforeValidator(_nothing)] = 0.2
    """"none": no clip. Objectives without such an option don't see it; nor `baseline`."""
    baseline: Literal["mean", "min_variance"] = "mean"
    step_size: Literal["sequence", "weights", "none"] = "sequence"
    """What scales the learning rate: the effective sample size of raw ratios, of the weights used, or nothing."""
    step_power: Annotated[float, Field(gt=0, le=4)] = 1.0
    """The learning rate is times (that size, over what fresh data has) to this power; 0.5: VCPO's square root."""
    prox: Literal["none", "a3po", "recompute"] = "none"
    """The proximal policy that decoupled_ppo and m2po need: interpolated by age, or a forward pass before the step."""
    options: Annotated[dict[Annotated[str, Field(max_length=64)], Option], Field(max_length=32)] = {}
    """Any other option of the objective, e.g. { cap = 5.0, dual_clip = "none" }; it comes before `clip`, `baseline`."""


class LoraSection(Section):
    """Counts only with `training = "lora"`."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: Annotated[float, Field(gt=0, le=65536)] = 32.0
    """The update is alpha / rank times B A."""
    targets: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(min_length=1, max_length=32)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of linear layers, as the model's code has them."""


class LearnerSection(Section):
    groups_per_step: Annotated[int, Field(ge=1, le=1024)] = 32
    longest_wait_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """After this long a step is made with what there is (at least one group)."""
    max_age: Annotated[int, Field(ge=1, le=100000)] = 64
    """Tokens older than this many versions are masked, groups whose every token is are refused."""
    max_in_flight: Annotated[int, Field(ge=1, le=100000)] = 64
    """A node stops drawing when so many of its groups wait for the learner."""
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    compute: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the forward pass; weights are the bf16 rounding of float32 masters either way."""
    training: Literal["full", "lora"] = "full"
    """All weights, or low-rank updates of some; then a version is the rounded updates alone."""
    lora: LoraSection = LoraSection()
    micro_batch_tokens: Annotated[int, Field(ge=64)] = 8192
    """Most padded tokens in one forward pass."""
    gradient_checkpointing: bool = False
    """Layers run again in the backward pass instead of keeping what they saw: a third slower, far less memory."""
    committee: Annotated[int, Field(ge=1, le=1)] = 1
    learners: tuple[Annotated[str, Field(max_length=64)], ...] = ()
    """Peer ids that may lead; empty: open to all."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 20


class EvalSection(Section):
    prompts: Annotated[int, Field(ge=0, le=4096)] = 64
    """Held-out prompts, the same each time; 0: never."""
    every: Annotated[int, Field(ge=1)] = 20
    """Versions between evaluations."""


class WeightsSection(Section):
    codec: Literal["anchor"] = "anchor"


class Recipe(Section):
    """A whole recipe; all keys are in the swarm id but the name."""

    schema_: Annotated[int, Field(alias="schema", ge=1, le=SCHEMA, strict=True)] = UNSAID
    """What it was written for; in the canonical form it is the least that has every key that is set."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    model: ModelSection
    environment: EnvironmentSection
    sampling: SamplingSection = SamplingSection()
    objective: ObjectiveSection = ObjectiveSection()
    learner: LearnerSection = LearnerSection()
    eval: EvalSection = EvalSection()
    weights: WeightsSection = WeightsSection()
    wire: Literal[1] = 1

    @model_validator(mode="before")
    @classmethod
    def _as_its_schema_meant(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("schema"), int) and data["schema"] < 4:
            given = data.get("objective", {})
            if isinstance(given, dict):
                data = data | {"objective": {"step_power": _BEFORE["step_power"]} | given}
        return data

    @model_validator(mode="after")
    def _short_enough(self) -> "Recipe":
        if self.longest_answer > MAX_ANSWER_TOKENS:
            raise ValueError(
                f"environment.max_turns times sampling.max_new_tokens and environment.max_given_tokens are "
                f"{self.longest_answer} tokens, over {MAX_ANSWER_TOKENS}; lower one"
            )
        return self

    @property
    def most_drawn(self) -> int:
        """Tokens that the policy draws for one answer at most."""
        return self.environment.max_turns * self.sampling.max_new_tokens

    @property
    def longest_answer(self) -> int:
        """Tokens of one answer at most, with those that the environment gives."""
        return self.most_drawn + (self.environment.max_given_tokens if self.environment.max_turns > 1 else 0)

    def canonical(self) -> bytes:
        value = self.model_dump(mode="json", by_alias=True, exclude={"name"})
        options = value["objective"]["options"]
        value["objective"]["options"] = {name: real(option) for name, option in options.items()}
        value["schema"] = SCHEMA
        nested = any(isinstance(param, (list, dict)) for param in self.environment.params.values())
        needed = (  # whether anything of schema 4, 3, 2 is there
            (_FOURTH, self._sets(_FOURTH)),
            (_THIRD, nested or self._sets(_THIRD)),
            (_SECOND, self._sets(_SECOND) or self.learner.training != "full"),
        )
        for keys_of, is_there in needed:
            if is_there:
                break
            value |= {name: _without(value[name], keys) for name, keys in keys_of.items()}
            value["schema"] -= 1
        return canonical(value)

    def _sets(self, newer: dict[str, tuple[str, ...]]) -> bool:
        """Whether any of these keys says more than the schemas before it could."""
        pairs = [(getattr(self, name), key) for name, keys in newer.items() for key in keys]
        return any(getattr(section, key) != _before(section, key) for section, key in pairs)

    @cached_property  # asked for with every record; the recipe is frozen
    def swarm_id(self) -> bytes:
        return blake3(self.canonical()).digest()


def _before(section: Section, key: str) -> Any:
    return _BEFORE.get(key, type(section).model_fields[key].get_default(call_default_factory=True))


def _without(section: dict, keys: Iterable[str]) -> dict:
    return {key: value for key, value in section.items() if key not in keys}


def with_schema(recipe: Recipe, text: str) -> str:
    """The recipe's text with its schema in it, for releases to come; it has the same id."""
    said = f"schema = {recipe.schema_}\n{text}"
    is_there = "schema" in tomllib.loads(text) or len(said.encode()) > MAX_RECIPE_BYTES
    return text if is_there else said


def parse(text: str, origin: str) -> Recipe:
    """The recipe, or ConfigError naming the key at fault. `origin` is for messages."""
    if len(text.encode("utf-8", "replace")) > MAX_RECIPE_BYTES:
        raise ConfigError(f"{origin} is over {MAX_RECIPE_BYTES} bytes, too large for a recipe")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a list in a list in a list
        raise ConfigError(f"{origin} is not valid TOML: {error}") from None
    if isinstance(data.get("schema"), int) and data["schema"] > SCHEMA:
        raise ConfigError(
            f"{origin} has schema {data['schema']}, made by a newer p2prl; this one knows {SCHEMA}. Update"
        )
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {explain(error, Recipe)}") from None


def load(path: Path) -> Recipe:
    try:
        return parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the recipe {path}: {error}") from None


def find(name: str, folders: tuple[Path, ...] = ()) -> tuple[Recipe, str]:
    """A recipe by file name or by its name in `folders`, then among those that ship: (recipe, its text with its schema)."""
    path = Path(name)
    if path.suffix == ".toml" or os.path.isfile(name):  # unlike pathlib's, of any text
        recipe = load(path)
        return recipe, with_schema(recipe, path.read_text("utf-8"))
    for source in available(folders).get(name, ()):
        recipe = parse(source, f"recipe {name}")
        return recipe, with_schema(recipe, source)
    near = difflib.get_close_matches(name, available(folders), 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    if os.path.isfile(f"{name}.toml"):
        hint = f"; {name}.toml is here: give it as {name}.toml."
    raise ConfigError(f"there is no recipe {name!r}{hint} There are: {', '.join(sorted(available(folders)))}")


def available(folders: tuple[Path, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Name -> texts, the user's folders before the shipped ones."""
    found: dict[str, tuple[str, ...]] = {}
    paths = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.toml"))]
    paths += sorted((path for path in shipped().iterdir() if path.name.endswith(".toml")), key=lambda path: path.name)
    for path in paths:
        name = path.name.removesuffix(".toml")
        try:
            found[name] = (*found.get(name, ()), path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError):
            continue  # a broken file is no reason not to find the others
    return found


def shipped():
    """The folder of recipes in the wheel, or in the checkout beside the package."""
    inside = files("p2prl") / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs" / "recipes"


def data_folders(folders: tuple[Path, ...] = ()) -> tuple[Path, ...]:
    """Where data files of environments lie: the user's folders, then those that ship."""
    inside = Path(__file__).parent / "datasets"
    return (*folders, inside if inside.is_dir() else Path(__file__).parent.parent / "configs" / "datasets")


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first faults in a sentence each, with the nearest key for an unknown one."""
    parts = []
    for fault in error.errors()[:3]:
        where = ".".join(str(step) for step in fault["loc"])
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(fault["loc"][-1]), _keys(model), 1)
            parts.append(f"unknown key {where!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        else:
            parts.append(f"{where}: {fault['msg'].removeprefix('Value error, ')}")
    return "; ".join(parts)


def _keys(model: type[BaseModel]) -> list[str]:
    names: list[str] = []
    for name, field in model.model_fields.items():
        names.append(field.alias or name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += _keys(kind)
    return names
