"""The learner process: optimiser steps, away from the daemon's loop and memory.

In: an inherited socket; `Setup`, then requests. Out: `Ready` or `Failed`, then a reply each; new versions as files
(`publish`). It ends when the daemon closes the pipe:

    python -m p2prl.learner.learner_process FD
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import torch
from pydantic import ValidationError

from p2prl.errors import LearnerError, P2prlError
from p2prl.learner import checkpoint, messages
from p2prl.learner.collate import collate
from p2prl.learner.committee import Part, merge
from p2prl.learner.objective_options import check_objective, objective_call
from p2prl.learner.policy import Policy
from p2prl.learner.publish import Folders, publish
from p2prl.learner.score_norms import ScoreNorms
from p2prl.learner.score_step import needs_score_norms
from p2prl.learner.step import apply_part, compute_part, measure_rho_on
from p2prl.pipes import BlockingPipe, PipeClosed
from p2prl.recipe import Recipe
from p2prl.records import StepInput, StepReport, Version

_NICENESS = 5
NO_MEMORY = "the learner's memory ran out; free some, or run with --role rollout"
UNSETTLED = Version(0, 0, bytes(32))
MANY_CLIPPED = 0.25  # of the fresh answers
CLIP_NOTE_STEPS = 100  # between two notes on it


class Learner:
    """A policy with its folders; answers one request at a time."""

    def __init__(self, recipe: Recipe, policy: Policy, folders: Folders, checkpoints: Path, threads: int = 1) -> None:
        self._recipe, self._policy = recipe, policy
        self._folders, self._checkpoints, self._threads = folders, checkpoints, threads
        self._has_followed = False
        self._clip_note_at = 0  # the step from which on it may be said again

    def handle(self, request: messages.Request) -> messages.Reply:
        match request:
            case messages.Follow(id, path, version):
                return self._follow(id, Path(path), version)
            case messages.Train(id, step):
                return self._train(id, step)
            case messages.Checkpoint(id):
                if self._policy.version == UNSETTLED:
                    raise LearnerError("there is nothing to save: the last step failed half-way; follow a version")
                checkpoint.save(self._policy, self._checkpoints, time.time())
                return messages.Checkpointed(id, self._policy.version)
            case _:
                raise LearnerError(f"the learner can't be asked for {type(request).__name__} now")

    def _follow(self, number: int, path: Path, version: Version) -> messages.Followed:
        if self._policy.version == version:
            return messages.Followed(number, version)
        restored, notes = checkpoint.restore_newest(self._policy, self._checkpoints, version)
        if restored is not None:
            self._has_followed = True
            return messages.Followed(number, version, (*notes, f"{version}: optimiser taken from the checkpoint"))
        self._policy.follow(path, version)
        if not self._has_followed:  # a process that just began may have lost little: the checkpoint before
            older, more = checkpoint.restore_moments(self._policy, self._checkpoints)
            notes = [*notes, *more]
            if older is not None:
                notes.append(f"{version}: optimiser taken from the checkpoint of {older}")
        self._has_followed = True
        return messages.Followed(number, version, tuple(notes))

    def _train(self, number: int, step: StepInput) -> messages.Trained:
        marks = [time.perf_counter()]
        if step.parent != self._policy.version:
            raise LearnerError(
                f"the learner holds {self._policy.version}, not the step's parent {step.parent}; follow that first"
            )
        rows = collate(step, self._recipe.learner.max_age)
        marks.append(time.perf_counter())
        mine = compute_part(self._policy, rows, self._recipe)
        part = merge([mine])
        rho_on = step.rho_on or measure_rho_on(self._policy, part, step, self._recipe)
        marks.append(time.perf_counter())
        self._policy.version = UNSETTLED  # until the result is on disk; a failure needs a Follow
        done = apply_part(self._policy, part, self._recipe, rho_on)
        marks.append(time.perf_counter())
        published = publish(self._policy.publish, self._folders, step.bases, step.anchor, self._threads)
        version = Version(step.term, step.parent.step + 1, published.hash)
        self._policy.version = version
        marks.append(time.perf_counter())
        stages = zip(("batch_s", "gradient_s", "optim_s", "publish_s"), itertools.pairwise(marks), strict=True)
        report = StepReport(
            version=version,
            path=str(published.path),
            contents=published.contents,
            rho_on=done.rho_on,
            metrics=done.metrics | {name: until - since for name, (since, until) in stages} | published.metrics,
            num_answers=part.num_answers,
            num_tokens=part.num_tokens,
            wall_s=marks[-1] - marks[0],
            log_ratios=by_group(mine, len(step.groups)),
        )
        notes = (done.skipped, self._clip_note(done.metrics, version.step), *published.notes)
        return messages.Trained(number, report, tuple(note for note in notes if note))

    def _clip_note(self, metrics: dict[str, float], step: int) -> str:
        share = metrics.get("clip_fraction_fresh", 0.0)
        if share <= MANY_CLIPPED or step < self._clip_note_at:
            return ""
        self._clip_note_at = step + CLIP_NOTE_STEPS
        return (
            f"{share:.0%} of the fresh answers were clipped, so nothing is learned from them; "
            "if it goes on, a wider objective.clip in the recipe may learn more"
        )


def by_group(part: Part, num_groups: int) -> tuple[tuple[float, ...], ...]:
    """The part's log ratios; () for a group without a usable answer."""
    found: list[list[float]] = [[] for _ in range(num_groups)]
    for group, log_ratio in part.log_ratios:
        found[group].append(log_ratio)
    return tuple(map(tuple, found))


def start(setup: messages.Setup) -> tuple[Learner, messages.Ready]:
    torch.set_num_threads(max(1, setup.threads))
    try:
        recipe = Recipe.model_validate_json(setup.recipe_json)
    except ValidationError as error:
        raise LearnerError(f"the daemon sent a recipe that can't be read: {error}") from error
    check_objective(recipe)  # now, not at the first step
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Policy.load(recipe, Path(setup.models_cache), device)
    folders = Folders(Path(setup.states), Path(setup.blobs))
    learner = Learner(recipe, policy, folders, Path(setup.checkpoints), max(1, setup.threads))
    slow = needs_score_norms(*objective_call(recipe))
    unknown = ScoreNorms(policy.module).unknown if slow else ""
    notes = (f"steps are slow: score norms take one backward pass an answer, since {unknown}",) if unknown else ()
    return learner, messages.Ready(policy.version, device, notes)


def main(fd: int) -> int:
    """Serve until the daemon closes the pipe or says Stop; 1 when it could not start (`Failed` says why)."""
    # Ctrl-C reaches the whole group; the daemon drains, then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    pipe: BlockingPipe[messages.Request] = BlockingPipe.inherited(fd, messages.Request)
    try:
        setup = pipe.receive()
        if not isinstance(setup, messages.Setup):
            pipe.send(messages.Failed(-1, "the first message to a learner is its Setup"))
            return 1
        try:
            learner, ready = start(setup)
        except (P2prlError, ImportError, OSError, RuntimeError) as error:
            pipe.send(messages.Failed(-1, str(error)))
            return 1
        except MemoryError:
            pipe.send(messages.Failed(-1, NO_MEMORY))
            return 1
        pipe.send(ready)
        while not isinstance(request := pipe.receive(), messages.Stop):
            pipe.send(_reply(learner, request))
    except PipeClosed:
        pass
    return 0


def _reply(learner: Learner, request: messages.Request) -> messages.Reply:
    try:
        return learner.handle(request)
    # RuntimeError is also how torch says that memory ran out.
    except (P2prlError, ValueError, OSError, RuntimeError) as error:
        return messages.Failed(getattr(request, "id", -1), f"{type(error).__name__}: {error}")
    except MemoryError:
        return messages.Failed(getattr(request, "id", -1), NO_MEMORY)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
