"""Every error the package raises on purpose.

::

    P2prlError
    |- ConfigError              the user's file, flag, address or recipe is wrong        exit 2 (also a ValueError)
    |- PreflightFailed          this machine can't run it now: port, disk, clock         exit 6
    |- HomeLocked               another daemon holds this home                           exit 7
    |- NoDaemon                 nothing runs for this home                               exit 3
    |- Refused                  token or permission                                      exit 5
    |- SwarmUnreachable         nobody answers and we can't go on without                exit 75
    |- EngineError              generation failed: out of memory, hang, bad weights
    |- LearnerError             training failed
    |  |- BatchError            answers or log-probs contradict themselves            (also a ValueError)
    |- DeltaError               two states whose difference is no delta: their tensors differ
    |- StoreError               a file of ours is corrupt or the disk is full
    |- PeerError                caused by another peer: counted, attributed, never fatal
       |- Unreachable           no answer, dead connection, deadline passed
       |- Truncated             a stream ended before its end marker
       |- TooLarge              over a size cap, before decoding
       |- BadRecord             can't be decoded or breaks its own rules
       |- BadSignature          not signed by whom it says
       |- WrongSwarm            made for another swarm
       |- Stale                 too old to be of use
       |- OverQuota             asks for more than its share

A message says what, why and what to do, in that order.
"""


class P2prlError(Exception):
    """Root of the tree; `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(P2prlError, ValueError):
    exit_code = 2


class NoDaemon(P2prlError):
    exit_code = 3


class Refused(P2prlError):
    exit_code = 5


class PreflightFailed(P2prlError):
    exit_code = 6


class HomeLocked(P2prlError):
    exit_code = 7


class SwarmUnreachable(P2prlError):
    exit_code = 75


class EngineError(P2prlError):
    """The engine process failed; the supervisor restarts it."""


class LearnerError(P2prlError):
    """The learner process failed; the supervisor restarts it."""


class BatchError(LearnerError, ValueError):
    """What an objective was given contradicts itself or is not finite."""


class DeltaError(P2prlError):
    """Two states have other tensors: there is no delta between them."""


class StoreError(P2prlError):
    """A file of ours can't be read or written."""


class PeerError(P2prlError):
    """Caused by another peer. `code` is the reason sent back and counted; `peer` whom it is attributed to."""

    code = "peer_error"

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class Unreachable(PeerError):
    code = "unreachable"


class Truncated(PeerError):
    code = "truncated"


class TooLarge(PeerError):
    code = "too_large"


class BadRecord(PeerError):
    code = "bad_record"


class BadSignature(PeerError):
    code = "bad_signature"


class WrongSwarm(PeerError):
    code = "wrong_swarm"


class Stale(PeerError):
    code = "stale"


class OverQuota(PeerError):
    code = "over_quota"
