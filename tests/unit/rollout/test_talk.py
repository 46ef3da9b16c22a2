"""However a conversation grows, what was drawn stays as it was, and its record is one that admission takes."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from p2prl.buffer.admission import examine
from p2prl.environments.conversation import TurnRules, parts_of, runs_of
from p2prl.models.char_tokenizer import END_ID
from p2prl.records import Completion, Prompt, Segment, Trajectory
from p2prl.rollout.stamps import of_group
from p2prl.rollout.talk import Talk
from p2prl.rollout.worker import Draw, turn_seed
from tests import factories
from tests.factories import RULES, group, knowledge, logprobs, version

PEER = factories.identity(0).peer_id
tokens = st.lists(st.integers(2, 16), min_size=1, max_size=4)
turns = st.lists(st.tuples(tokens, st.lists(st.integers(0, 2), min_size=1, max_size=3), tokens), min_size=1, max_size=4)


def turn(words: list[int], under: list[int], first: bool) -> Completion:
    """Drawn under these versions one after the other; a first turn begins under version 0."""
    token_ids = (*words, END_ID)
    places = [0, *under] if first else under
    places = [places[min(number, len(places) - 1)] for number in range(len(token_ids))]
    segments = tuple(Segment(place, 1) for place in places)
    return Completion(token_ids, logprobs(*[-0.25] * len(token_ids)), segments, "stop")


@given(st.lists(turns, min_size=2, max_size=2))
def test_what_grows_turn_by_turn_is_admitted_and_keeps_every_token(answers: list) -> None:
    versions = tuple(map(version, (5, 6, 7)))
    made = group()
    prompt = Prompt(made.prompt_index, "?", made.prompt_ids)
    first = [turn(words[0][0], words[0][1], first=True) for words in answers]
    talk = Talk([(Draw(0, made.prompt_index), prompt, first)], versions)
    for number in range(1, 4):
        asking = talk.asking()
        talk.told({(0, a): tuple(answers[a][number - 1][2]) for _, a in asking if number < len(answers[a])})
        for place in talk.going:
            before = talk.prompts([place])[0]
            words, under, _ = answers[place[1]][number]
            drawn = turn(words, under, first=False)
            talk.drawn(place, drawn, versions)
            assert talk.prompts([place])[0] == before + drawn.token_ids
    ((_, _, whole),), all_versions = talk.ended()
    for answer, script in zip(whole, answers, strict=True):
        drawn, said = parts_of(answer.token_ids, runs_of(answer.segments))
        assert drawn == [(*words, END_ID) for words, _, _ in script]
        assert said == [tuple(each) for _, _, each in script[:-1]]
    used, stamped = of_group(all_versions, whole)
    found = msgspec.structs.replace(
        made, versions=used, trajectories=tuple(Trajectory(answer, 0.0) for answer in stamped)
    )
    rules = msgspec.structs.replace(RULES, turns=TurnRules(4, 12))
    assert examine(found, bytes(32), PEER, rules, knowledge()) == ""


def test_every_turn_has_its_own_seed() -> None:
    seeds = [turn_seed(seed, number) for seed in (0, 1, 2**62) for number in range(64)]
    assert len(set(seeds)) == len(seeds) and turn_seed(7, 0) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
