"""Plain records for tests: honest by default, any field can be overridden."""

import struct
from typing import Any

import msgspec

from p2prl import codec
from p2prl.buffer.admission import AdmissionRules, Knowledge
from p2prl.identity import Identity
from p2prl.models.char_tokenizer import END_ID, VOCAB_SIZE, CharTokenizer
from p2prl.records import Completion, Content, Group, Manifest, Sampling, Segment, Trajectory, Version
from p2prl.rollout.lottery import prompt_index
from p2prl.weights.contents import content_name

SWARM = bytes(range(32))
SAMPLING = Sampling(1.0, 1.0, 0, 5)
BASE = Version(0, 0, bytes(32))
NOW = 1_790_000_000.0
RULES = AdmissionRules(
    sampling=SAMPLING,
    group_size=2,
    environment="addition",
    environment_version="",
    tokenizer_hash=CharTokenizer().hash,
    stop_ids=frozenset({END_ID}),
    max_age=8,
    vocab_size=VOCAB_SIZE,
)


def identity(number: int = 0) -> Identity:
    return Identity.from_seed(bytes([number]) * 32)


def version(step: int, term: int = 1) -> Version:
    return BASE if step == 0 else Version(term, step, codec.content_hash(b"version %d %d" % (term, step)))


def knowledge(**over: Any) -> Knowledge:
    """Knows every version (its age is 10 minus its step), has seen nothing."""
    known = Knowledge(
        age_of=lambda version: max(0, 10 - version.step),
        seen=lambda group_id: False,
        group_at=lambda maker, counter: None,
        lottery=lambda maker, version, counter: prompt_index(maker, version, counter),
    )
    return msgspec.structs.replace(known, **over)


def logprobs(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def completion(*token_ids: int, **over: Any) -> Completion:
    """Ends with the end token by default."""
    ids = token_ids or (3, 4, END_ID)
    plain = Completion(ids, logprobs(*[-0.5] * len(ids)), (Segment(0, len(ids)),), "stop")
    return msgspec.structs.replace(plain, **over)


def group(
    maker: int = 0, counter: int = 0, *, step: int = 5, rewards: tuple[float, ...] = (1.0, 0.0), **over: Any
) -> Group:
    """What identity `maker` honestly drew under version `step`."""
    peer, under = identity(maker).peer_id, version(step)
    plain = Group(
        maker=peer,
        counter=counter,
        environment="addition",
        environment_version="p2prl==0.1.0",
        tokenizer_hash=RULES.tokenizer_hash,
        prompt_index=prompt_index(peer, under, counter),
        prompt_ids=(3, 4, 5),
        versions=(under,),
        trajectories=tuple(Trajectory(completion(), reward) for reward in rewards),
        sampling=SAMPLING,
        engine="scripted 1",
        made_at=NOW,
    )
    return msgspec.structs.replace(plain, **over)


def sealed(record: Any, maker: int = 0) -> tuple[bytes, bytes]:
    """(id, sealed bytes)."""
    data = codec.seal(record, identity(maker), SWARM)
    return codec.sealed_id(data), data


def anchor(step: int = 1) -> Content:
    """The way to a version's whole state, of 1000 bytes."""
    return content(b"content %d" % step, 1000)


def content(label: bytes, num_bytes: int, base: Version | None = None) -> Content:
    """A way of one piece, which nobody has: an anchor, or a delta where it has a base."""
    pieces = (codec.content_hash(label),)
    return Content("anchor" if base is None else "delta", base, content_name(num_bytes, pieces), num_bytes, pieces)


def manifest(step: int = 1, learner: int = 0, **over: Any) -> Manifest:
    """The version after `step - 1`, trained on one group."""
    plain = Manifest(
        version=version(step),
        parent=version(step - 1),
        parent_id=bytes(32) if step == 1 else codec.content_hash(b"manifest %d" % (step - 1)),
        learner=identity(learner).peer_id,
        contents=(anchor(step),),
        group_ids=(codec.content_hash(b"group %d" % step),),
        group_rewards=(0.5,),
        group_answers=(2,),
        num_groups=step,
        rho_on=0.9,
        votes=(),
        metrics={"loss": 0.1},
        published_at=NOW,
    )
    return msgspec.structs.replace(plain, **over)
