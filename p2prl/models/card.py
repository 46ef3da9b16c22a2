"""The card of an exported version: what it is, how it came to be, how to use it. No torch, no files.

In: the manifests of the version's chain, the recipe as text, what the export found. Out: a `Training` record; a README
in Markdown.

Invariants: what comes from peers (numbers of manifests, the text of a recipe) stays in its place in the page: numbers
that are none are left out, the recipe's fence is longer than any in it.
"""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from p2prl.models.char_tokenizer import ALPHABET, END_ID
from p2prl.records import Manifest, Version

NUM_SPANS = 20


class Span(msgspec.Struct, frozen=True):
    """Some versions in a row. `reward`: mean over their answers; `eval_reward`: the last one measured among them."""

    first: int
    last: int
    num_groups: int
    num_answers: int
    reward: float | None
    eval_reward: float | None
    until: float | None  # unix seconds, the learner's clock


class Training(msgspec.Struct, frozen=True):
    """How a version came to be. `learners`: peer id and number of steps, most first."""

    swarm: str  # hex
    version: str
    term: int
    step: int
    state_hash: str  # hex
    recipe_name: str
    recipe_text: str
    environment: str
    objective: str
    source: str
    num_groups: int
    num_answers: int
    learners: tuple[tuple[str, int], ...]
    spans: tuple[Span, ...]


class Facts(msgspec.Struct, frozen=True):
    """What the export knows of the folder. `kind`: whole, merged or adapter; `licence` of the base model, "" unknown."""

    kind: str
    weights_hash: str  # hex, of the folder's bf16 tensors as p2prl hashes them; the version's own where kind is whole
    licence: str
    has_char_tokenizer: bool
    software: str


def training_of(version: Version, chain: Sequence[Manifest], **recipe: str) -> Training:
    """`chain`: from the first step to the version. `recipe`: the fields of Training that say what was agreed on."""
    steps: dict[str, int] = {}
    for manifest in chain:
        steps[manifest.learner] = steps.get(manifest.learner, 0) + 1
    return Training(
        version=str(version),
        term=version.term,
        step=version.step,
        state_hash=version.hash.hex(),
        num_groups=sum(len(manifest.group_ids) for manifest in chain),
        num_answers=sum(sum(manifest.group_answers) for manifest in chain),
        learners=tuple(sorted(steps.items(), key=lambda item: (-item[1], item[0]))),
        spans=tuple(_span(part) for part in _parts(chain)),
        **recipe,
    )


def _parts(chain: Sequence[Manifest]) -> list[Sequence[Manifest]]:
    size = max(1, math.ceil(len(chain) / NUM_SPANS))
    return [chain[begin : begin + size] for begin in range(0, len(chain), size)]


def _span(part: Sequence[Manifest]) -> Span:
    pairs = [pair for one in part for pair in zip(one.group_rewards, one.group_answers, strict=False)]
    num_answers = sum(answers for _, answers in pairs)
    total = math.fsum(reward * answers for reward, answers in pairs if math.isfinite(reward))
    measured = [one.metrics.get("eval_reward", math.nan) for one in part]
    return Span(
        first=part[0].version.step,
        last=part[-1].version.step,
        num_groups=sum(len(one.group_ids) for one in part),
        num_answers=num_answers,
        reward=_finite(total / num_answers) if num_answers else None,
        eval_reward=next((value for value in reversed(measured) if math.isfinite(value)), None),
        until=_finite(part[-1].published_at),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- the page -------------------------------------------------------------------------------------------------------


def card(training: Training, facts: Facts) -> str:
    parts = [
        _front_matter(training, facts),
        f"# {training.recipe_name}, version {training.step}",
        _what(training, facts),
        "## Use",
        _use(training, facts),
        "## Training record",
        _record(training),
        *([] if not training.spans else [_rewards(training.spans)]),
        "## Recipe",
        _fenced(training.recipe_text.strip(), "toml"),
        "## Licence",
        _licence(training, facts),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(training: Training, facts: Facts) -> str:
    lines = [f"license: {facts.licence}"] if facts.licence else []
    lines += [f"library_name: {'peft' if facts.kind == 'adapter' else 'transformers'}", "pipeline_tag: text-generation"]
    return "\n".join(["---", *lines, "tags: [p2prl, reinforcement-learning]", "---"])


def _what(training: Training, facts: Facts) -> str:
    kinds = {
        "whole": "The weights are those of the version, bit for bit",
        "merged": "The version is low-rank adapters; here they are added to the base model's weights",
        "adapter": "These are the adapters alone, for the base model below",
    }
    rows = [
        ("swarm", f"`{training.swarm}`"),
        ("version", f"`{training.version}` (term {training.term}, step {training.step})"),
        ("hash of the version", f"`{training.state_hash}`"),
        ("base model", f"`{_plain(training.source)}`"),
        ("written by", facts.software),
    ]
    if facts.kind == "merged":
        rows.insert(3, ("hash of these weights", f"`{facts.weights_hash}`"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        "Trained with reinforcement learning by a p2prl swarm: volunteers' machines "
        f"drew answers, one of them at a time trained on those.\n\n| | |\n|---|---|\n{table}\n\n{kinds[facts.kind]}. "
        "A hash is the blake3 of the bf16 tensors in the order of their names; `p2prl.models.state.state_hash` "
        "computes it from a safetensors file, whatever the file's layout."
    )


def _use(training: Training, facts: Facts) -> str:
    if facts.kind == "adapter":
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            'base = AutoModelForCausalLM.from_pretrained("BASE")  # p2prl export --version 0 BASE',
            'model = PeftModel.from_pretrained(base, ".")',
        ]
        note = (
            "\n\nThe swarm ran the bf16 rounding of W + s B A; peft adds s B A x to W x, so log-probs differ in the "
            "last bits. `p2prl export` without `--adapter` writes the weights that the swarm ran."
        )
        return _fenced("\n".join(lines), "python") + note
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained(".")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
    ]
    note = "\n\nPrompts were one user message through the tokenizer's chat template, or plain text where it has none."
    if facts.has_char_tokenizer:
        first, last = 2, 1 + len(ALPHABET)
        note = (
            f"\n\nThe tokenizer has a token for each of the characters `{ALPHABET}` (ids {first} to {last}, in this "
            f"order) and no other; prompts are plain text, without a special token in front. Id {END_ID} ends an "
            "answer, 0 is padding."
        )
    return _fenced("\n".join(lines), "python") + note


def _record(training: Training) -> str:
    learners = ", ".join(f"`{peer}` ({steps} steps)" for peer, steps in training.learners) or "none"
    rows = [
        ("steps", f"{training.step}"),
        ("groups of answers trained on", f"{training.num_groups}"),
        ("answers", f"{training.num_answers}"),
        ("environment", f"`{_plain(training.environment)}`"),
        ("objective", f"`{_plain(training.objective)}`"),
        ("learners", learners),
    ]
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def _rewards(spans: Sequence[Span]) -> str:
    lines = ["| versions | groups | answers | mean reward | held-out reward | until |", "|---|---|---|---|---|---|"]
    for span in spans:
        steps = f"{span.first}" if span.first == span.last else f"{span.first}-{span.last}"
        figures = [f"{value:.4f}" if value is not None else "" for value in (span.reward, span.eval_reward)]
        cells = [steps, f"{span.num_groups}", f"{span.num_answers}", *figures, _date(span.until)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _date(at: float | None) -> str:
    try:
        return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):  # a learner's clock may say anything
        return ""


def _licence(training: Training, facts: Facts) -> str:
    if facts.licence:
        return f"The base model says `{facts.licence}`; what is made from it may be bound by that."
    return f"Not known here: see where the base model `{_plain(training.source)}` comes from."


def _fenced(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _plain(text: str) -> str:
    """For a cell: one line, nothing that ends code or cell."""
    return re.sub(r"[`|\s]+", " ", text).strip()
