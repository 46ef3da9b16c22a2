"""The further turns of answers: the environment speaks, the engine draws on, until all are over.

In: groups whose answers' first turns were drawn. Out: the same groups with whole answers, and what drawing them took.

A turn is drawn under whatever version the engine has by then: only a group's first tokens must share theirs.
"""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from p2prl.errors import EngineError
from p2prl.node.ports import EnvironmentPort
from p2prl.records import Prompt, Tokens, Version
from p2prl.rollout import messages
from p2prl.rollout.talk import Talk
from p2prl.rollout.worker import Begun, turn_seed

Generate = Callable[[Version, tuple[Tokens, ...], int, int], Awaitable[messages.Generated | messages.Outdated]]


class Conversations:
    def __init__(self, environment: EnvironmentPort, generate: Generate, max_turns: int) -> None:
        """`generate(version, prompts, num_answers, seed)`."""
        self._environment, self._generate, self._max_turns = environment, generate, max_turns

    def check_room(self, prompts: Sequence[Prompt], longest_answer: int, context: int | None) -> None:
        """Before the first turn: raises EngineError where the last may find no room in the engine's context."""
        longest = max(len(prompt.token_ids) for prompt in prompts) + longest_answer
        if self._max_turns > 1 and context is not None and longest > context:
            raise EngineError(
                f"a prompt with all its turns may have {longest} tokens, over the engine's context of {context}; run "
                "a recipe with fewer or shorter turns, or with a lower environment.max_given_tokens"
            )

    async def go_on(
        self, begun: Sequence[Begun], first: messages.Generated, seed: int
    ) -> tuple[Sequence[Begun], messages.Generated]:
        """The `Generated` counts the tokens and the engine's time of all turns; its completions are the first's."""
        if self._max_turns == 1:
            return begun, first
        talk, version = Talk(begun, first.versions), first.versions[-1]
        num_tokens, wall_s, num_calls = first.num_tokens, first.wall_s, 0
        for _ in range(1, self._max_turns):
            asking = talk.asking()
            if asking:
                said = await self._environment.turns(tuple(asking.values()))
                talk.told(dict(zip(asking, said, strict=True)))
            left = talk.going if asking else []
            if not left:
                break
            while left:  # again for those that were not begun before another version was loaded
                num_calls += 1  # no seed comes twice: answers of one group that read alike would go on alike
                drawn = await self._generate(version, talk.prompts(left), 1, turn_seed(seed, num_calls))
                if isinstance(drawn, messages.Outdated):
                    version = drawn.version
                    continue
                for place, answers in zip(left, drawn.completions, strict=True):
                    if answers:
                        talk.drawn(place, answers[0], drawn.versions)
                left = [place for place, answers in zip(left, drawn.completions, strict=True) if not answers]
                version = drawn.versions[-1]
                num_tokens, wall_s = num_tokens + drawn.num_tokens, wall_s + drawn.wall_s
        groups, versions = talk.ended()
        return groups, msgspec.structs.replace(first, versions=versions, num_tokens=num_tokens, wall_s=wall_s)
