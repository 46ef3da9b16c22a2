"""Did this learner win its term? The votes that the first manifest of a term carries.

In: sealed votes, the term, the learner. Out: nothing, or BadRecord.
"""

from p2prl import codec
from p2prl.errors import BadRecord, PeerError
from p2prl.records import Manifest, Vote


def check_mandate(manifest: Manifest, swarm: bytes) -> None:
    """A majority of the electorate that the votes themselves name granted this term to this learner."""
    voters: set[str] = set()
    electorate: tuple[str, ...] | None = None
    for data in manifest.votes:
        try:
            vote = codec.unseal(data, Vote, swarm, owner=lambda vote: vote.voter).record
        except PeerError as error:
            raise BadRecord(f"a vote in the manifest is bad: {error}", peer=manifest.learner) from None
        if (vote.term, vote.candidate) != (manifest.version.term, manifest.learner):
            raise BadRecord("a vote in the manifest is for another term or candidate", peer=manifest.learner)
        if electorate is not None and vote.electorate != electorate:
            raise BadRecord("the votes of the manifest name different electorates", peer=manifest.learner)
        electorate = vote.electorate
        voters.add(vote.voter)
    if electorate is None or len(voters & set(electorate)) <= len(electorate) // 2:
        raise BadRecord(
            f"term {manifest.version.term} of {manifest.learner} has no majority of votes", peer=manifest.learner
        )
