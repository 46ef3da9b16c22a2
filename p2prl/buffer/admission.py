"""May this group be trained on? Each refusal has a code and a sentence, for its maker to read.

In: a decoded group with its id and signer, the recipe's rules, what this node knows. Out: a reason code ("" for none)
before rewards were recomputed, then a `Verdict`.

Invariants: nothing here raises, whatever a peer sent; the verdict on a group does not depend on the order in which
groups come, but for `duplicate` and `counter_reused`; a group that passes has finite log-probs, tokens inside the
vocabulary and segments that cover its tokens, so that the learner need not check again.
"""

import math
import sys
from array import array
from collections.abc import Callable

import msgspec

from p2prl.codec import limit_of
from p2prl.environments.conversation import ONE_TURN, TurnRules, parts_of, runs_of
from p2prl.environments.messages import Judgement
from p2prl.recipe import Recipe
from p2prl.records import Completion, Group, Sampling, Verdict, Version

MAX_LOGPROB = 1e-4  # rounding may lift the log-prob of a certain token a little over 0
REWARD_TOLERANCE = 1e-6
MAX_VERDICT_MESSAGE = 256
PROMPT_BYTES = 512 * 2**10  # of a group beside its answers: a prompt of 100,000 tokens
ANSWER_BYTES = 4096  # of an answer beside its tokens
TOKEN_BYTES = 13  # an id, a log-prob, its part of the segments

REASONS: dict[str, str] = {
    "wrong_maker": "The group names another peer than the one that signed it.",
    "wrong_environment": "It was made in another environment, or another version of it, than the recipe names.",
    "wrong_tokenizer": "Its tokenizer or chat template is not the recipe's.",
    "wrong_sampling": "It was sampled with other parameters than the recipe's.",
    "wrong_size": "It has more or fewer answers than the recipe's group size.",
    "bad_clock": "The time it says it was made at is no time.",
    "bad_lottery": "Its prompt does not follow from its maker, version and counter.",
    "bad_segments": "Its version segments do not cover its tokens, or do not begin with its first version.",
    "too_long": "An answer is longer than the recipe allows.",
    "bad_tokens": "It has token ids that are not in the model's vocabulary.",
    "bad_finish": "An answer ends neither with an end token or stop string nor at the longest length, or goes on after.",
    "bad_turns": "It has more turns, or was given more between them, than the recipe allows, or elsewhere than between.",
    "bad_logprobs": "Its log-probs are missing, not finite, above 0, or not 0 where a token was given.",
    "unknown_version": "It was drawn under weights that this node does not know.",
    "too_old": "All of its tokens are older than the recipe's max age.",
    "duplicate": "This very group is here already.",
    "counter_reused": "Its maker used this counter for another group before.",
    "wrong_prompt": "Its prompt's tokens are not what the environment gives.",
    "wrong_turns": "Between its turns, or after them, the environment says something else here.",
    "too_slow": "To judge its answers takes longer than a group may.",
    "wrong_reward": "Its rewards are not what the environment gives for these answers.",
    "unlikely_draws": "Its maker's log-probs are not those it draws by: nobody draws such answers that often.",
    "quarantined": "Too many groups of its maker were refused here lately; its groups are taken again in a few hours.",
}


class AdmissionRules(msgspec.Struct, frozen=True):
    """What the recipe demands of every group. `num_prompts` and `vocab_size` None: no bound."""

    sampling: Sampling
    group_size: int
    environment: str
    environment_version: str  # "": any
    tokenizer_hash: bytes
    stop_ids: frozenset[int]
    max_age: int
    num_prompts: int | None = None
    vocab_size: int | None = None
    turns: TurnRules = ONE_TURN


class Knowledge(msgspec.Struct, frozen=True):
    """What this node knows. `lottery(maker, version, counter)` is the prompt index that the maker had to draw.

    `age_of(version)` in optimiser steps, None for a version that this node does not know; `seen(id)` whether the group
    is here already; `group_at(maker, counter)` the id of the group held under that counter.
    """

    age_of: Callable[[Version], int | None]
    seen: Callable[[bytes], bool]
    group_at: Callable[[str, int], bytes | None]
    lottery: Callable[[str, Version, int], int]


def rules_of(
    recipe: Recipe,
    tokenizer_hash: bytes,
    stop_ids: tuple[int, ...],
    num_prompts: int | None,
    vocab_size: int | None = None,
) -> AdmissionRules:
    return AdmissionRules(
        sampling=recipe.sampling.record(),
        group_size=recipe.sampling.group_size,
        environment=recipe.environment.name,
        environment_version=recipe.environment.version,
        tokenizer_hash=tokenizer_hash,
        stop_ids=frozenset(stop_ids),
        max_age=recipe.learner.max_age,
        num_prompts=num_prompts,
        vocab_size=vocab_size,
        turns=TurnRules(recipe.environment.max_turns, recipe.environment.max_given_tokens),
    )


def most_bytes(rules: AdmissionRules) -> int:
    """What a sealed group may weigh under these rules; nothing larger is pulled, decoded or looked at."""
    given = rules.turns.max_given_tokens if rules.turns.max_turns > 1 else 0
    answer = ANSWER_BYTES + TOKEN_BYTES * (rules.turns.max_turns * rules.sampling.max_new_tokens + given)
    return min(limit_of(Group), PROMPT_BYTES + rules.group_size * answer)


def examine(group: Group, group_id: bytes, signer: str, rules: AdmissionRules, known: Knowledge) -> str:
    """The reason to refuse the group, "" when it may go on to have its rewards recomputed. Cheap checks first."""
    return (
        _wrong_terms(group, signer, rules)
        or _already_here(group, group_id, known)
        or _wrong_age(group, rules, known)
        or _wrong_draw(group, known)
        or _wrong_answers(group, rules)
    )


def conclude(group: Group, group_id: bytes, judgement: Judgement) -> Verdict:
    """The verdict on a group that `examine` let pass, once the environment has judged it here."""
    if not judgement.prompt_ok:
        detail = judgement.details[0] if judgement.details else ""
        return refusal(group_id, "wrong_prompt", detail)
    if judgement.too_slow:
        return refusal(group_id, "too_slow", judgement.details[0] if judgement.details else "")
    if judgement.bad_finish >= 0:
        return refusal(group_id, "bad_finish", f"answer {judgement.bad_finish}")
    if judgement.bad_turns >= 0:
        return refusal(group_id, "wrong_turns", judgement.details[0] if judgement.details else "")
    if len(judgement.rewards) != len(group.trajectories):
        return refusal(group_id, "wrong_reward", "not as many rewards as answers")
    for position, (trajectory, reward) in enumerate(zip(group.trajectories, judgement.rewards, strict=True)):
        if not abs(trajectory.reward - reward) <= REWARD_TOLERANCE:  # also false for nan
            return refusal(group_id, "wrong_reward", f"answer {position}: {trajectory.reward:g}, here {reward:g}")
    return Verdict(group_id, True, "")


def refusal(group_id: bytes, reason: str, detail: str = "") -> Verdict:
    sentence = REASONS.get(reason, reason)
    return Verdict(group_id, False, reason, (f"{sentence} {detail}" if detail else sentence)[:MAX_VERDICT_MESSAGE])


# -- the checks, each giving a code or "" ---------------------------------------------------------------------------


def _wrong_terms(group: Group, signer: str, rules: AdmissionRules) -> str:
    if group.maker != signer:
        return "wrong_maker"
    if group.environment != rules.environment:
        return "wrong_environment"
    if rules.environment_version and group.environment_version != rules.environment_version:
        return "wrong_environment"
    if group.tokenizer_hash != rules.tokenizer_hash:
        return "wrong_tokenizer"
    if group.sampling != rules.sampling:
        return "wrong_sampling"
    if len(group.trajectories) != rules.group_size:
        return "wrong_size"
    if not math.isfinite(group.made_at):
        return "bad_clock"
    return "" if _in_vocabulary(group.prompt_ids, rules) and group.prompt_ids else "bad_tokens"


def _already_here(group: Group, group_id: bytes, known: Knowledge) -> str:
    if known.seen(group_id):
        return "duplicate"
    held = known.group_at(group.maker, group.counter)
    return "counter_reused" if held is not None and held != group_id else ""


def _wrong_age(group: Group, rules: AdmissionRules, known: Knowledge) -> str:
    ages = [known.age_of(version) for version in group.versions]
    if any(age is None for age in ages):
        return "unknown_version"
    return "too_old" if min(age for age in ages if age is not None) > rules.max_age else ""


def _wrong_draw(group: Group, known: Knowledge) -> str:
    drawn = known.lottery(group.maker, group.versions[0], group.counter)
    return "" if group.prompt_index == drawn else "bad_lottery"


def _wrong_answers(group: Group, rules: AdmissionRules) -> str:
    used = {segment.version for trajectory in group.trajectories for segment in trajectory.completion.segments}
    # A version that no token was drawn under could only serve to look younger.
    if used != set(range(len(group.versions))) or len(set(group.versions)) != len(group.versions):
        return "bad_segments"
    for trajectory in group.trajectories:
        completion = trajectory.completion
        runs = runs_of(completion.segments)
        reason = (
            _wrong_segments(completion)
            or _wrong_turns(completion, runs, rules)
            or _wrong_tokens(completion, runs, rules)
            or _wrong_logprobs(completion, runs)
        )
        if reason:
            return reason
    return ""


def _wrong_segments(completion: Completion) -> str:
    segments = completion.segments
    covered = sum(segment.num_tokens for segment in segments)
    if not segments or segments[0].version != 0 or covered != len(completion.token_ids):
        return "bad_segments"
    return ""


def _wrong_turns(completion: Completion, runs: tuple[int, ...], rules: AdmissionRules) -> str:
    """Given tokens lie between drawn ones, and name the version of those before them."""
    if not runs[0] or len(runs) % 2 == 0 or len(runs) // 2 >= rules.turns.max_turns:
        return "bad_turns"
    if len(runs) > 1 and sum(runs[1::2]) > rules.turns.max_given_tokens:
        return "bad_turns"
    both = zip(completion.segments, completion.segments[1:], strict=False)
    return "" if all(part.drawn or part.version == before.version for before, part in both) else "bad_segments"


def _wrong_tokens(completion: Completion, runs: tuple[int, ...], rules: AdmissionRules) -> str:
    if not _in_vocabulary(completion.token_ids, rules):
        return "bad_tokens"
    *before, last = parts_of(completion.token_ids, runs).drawn
    ends = [_wrong_end(turn, "stop", rules) for turn in before]
    return next(filter(None, [*ends, _wrong_end(last, completion.finish_reason, rules)]), "")


def _wrong_end(tokens: tuple[int, ...], reason: str, rules: AdmissionRules) -> str:
    """Of one turn."""
    longest = rules.sampling.max_new_tokens
    if len(tokens) > longest:
        return "too_long"
    if any(token in rules.stop_ids for token in tokens[:-1]):
        return "bad_finish"
    if tokens[-1] in rules.stop_ids:
        return "" if reason == "stop" else "bad_finish"
    if reason == "stop" and rules.sampling.stop:
        return ""  # whether by a stop string is for the environment process, which has the tokenizer
    return "" if reason == "length" and len(tokens) == longest else "bad_finish"


def _wrong_logprobs(completion: Completion, runs: tuple[int, ...]) -> str:
    data, begin = completion.logprobs, 0
    if not logprobs_ok(data, len(completion.token_ids)):
        return "bad_logprobs"
    for number, length in enumerate(runs):
        if number % 2 and any(data[4 * begin : 4 * (begin + length)]):
            return "bad_logprobs"
        begin += length
    return ""


def _in_vocabulary(tokens: tuple[int, ...], rules: AdmissionRules) -> bool:
    return rules.vocab_size is None or max(tokens, default=0) < rules.vocab_size


def logprobs_ok(data: bytes, num_tokens: int) -> bool:
    """Whether these are `num_tokens` little-endian float32 log-probs, finite and not above 0."""
    if len(data) != 4 * num_tokens:
        return False
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return all(math.isfinite(value) and value <= MAX_LOGPROB for value in values)
