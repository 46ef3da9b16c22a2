"""What the daemon and its learner process say to each other over their pipe.

In: `Setup` first, then requests with an id. Out: `Ready` first, then one reply for each request, with its id.
"""

import msgspec

from p2prl.records import StepInput, StepReport, Version


class Setup(msgspec.Struct, frozen=True, tag=True):
    """`recipe_json` is `Recipe.model_dump_json(by_alias=True)`; the folders are absolute paths."""

    recipe_json: str
    models_cache: str
    states: str
    blobs: str
    checkpoints: str
    threads: int


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Take up the version whose weights lie at `path`."""

    id: int
    path: str
    version: Version


class Train(msgspec.Struct, frozen=True, tag=True):
    """One optimiser step on the version that is held, which must be the step's parent."""

    id: int
    step: StepInput


class Checkpoint(msgspec.Struct, frozen=True, tag=True):
    """Write masters and optimiser to disk."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End; no reply."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """`version` is the base model's; `notes` are what a person may want to know."""

    version: Version
    device: str
    notes: tuple[str, ...] = ()


class Followed(msgspec.Struct, frozen=True, tag=True):
    """`notes` tell whether the optimiser was taken from a checkpoint, and of corrupt ones."""

    id: int
    version: Version
    notes: tuple[str, ...] = ()


class Trained(msgspec.Struct, frozen=True, tag=True):
    id: int
    report: StepReport
    notes: tuple[str, ...] = ()


class Checkpointed(msgspec.Struct, frozen=True, tag=True):
    id: int
    version: Version


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request with this id (-1: the start) was not done; the process goes on (after a failed start it ends)."""

    id: int
    message: str


Request = Setup | Follow | Train | Checkpoint | Stop
Reply = Ready | Followed | Trained | Checkpointed | Failed
