"""Who has given how many samples to which step: signed by the peer, countersigned by the leader of its round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from swarm_protocol.access.access_control import CLOCK_SKEW_S
from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.net.identity import Identity
from swarm_training.ledger.signing import Kind, parsed, sign, signer_of
from swarm_training.pb import training_ledger_pb2 as pb

MAX_ROUND_BYTES = 1 << 20  # of a group of some 500 peers
_MAX_CONTRIBUTION_BYTES = 1024


@dataclass(frozen=True, order=True)
class Moment:
    """A global step; its number can come again after a rollback."""

    rollbacks: int
    step: int


@dataclass(frozen=True)
class Contribution:
    run: str
    moment: Moment
    peer_id: str
    samples: int

    def signed(self, identity: Identity, token: bytes = b"") -> pb.SignedByPeer:
        """By the peer itself."""
        assert identity.peer_id == self.peer_id
        message = pb.Contribution(
            run=self.run,
            rollbacks=self.moment.rollbacks,
            step=self.moment.step,
            peer_id=self.peer_id,
            samples=self.samples,
        )
        return sign(Kind.CONTRIBUTION, message, identity, token)

    @classmethod
    def parse(cls, signed: pb.SignedByPeer) -> Contribution:
        """Raises ValueError unless the peer that it speaks of has signed it."""
        message = parsed(pb.Contribution, signed.content, _MAX_CONTRIBUTION_BYTES)
        if signer_of(Kind.CONTRIBUTION, signed) != message.peer_id:
            raise ValueError("a contribution is not signed by the peer that it speaks of")
        moment = Moment(message.rollbacks, message.step)
        return cls(message.run, moment, message.peer_id, message.samples)


@dataclass(frozen=True)
class Credited:
    """A contribution and whose it is: the name in the peer's token; without an organiser, the peer id."""

    contribution: Contribution
    user: str


@dataclass(frozen=True)
class Round:
    """``ended_at``: Unix time in seconds, as the leader says."""

    run: str
    moment: Moment
    leader: str
    ended_at: float
    credited: tuple[Credited, ...]


def countersign(
    run: str,
    moment: Moment,
    contributions: Sequence[pb.SignedByPeer],
    ended_at: float,
    leader: Identity,
    token: bytes = b"",
) -> bytes:
    """By the leader, which has checked that these peers gave so many samples."""
    message = pb.Round(
        run=run, rollbacks=moment.rollbacks, step=moment.step, ended_at=ended_at, contributions=contributions
    )
    return sign(Kind.ROUND, message, leader, token).SerializeToString()


def verify_round(data: bytes, organiser: SwarmKey | None) -> Round:
    """``organiser``: whose members alone may contribute and lead; None: anybody may.

    Raises:
        ValueError: a signature or token is wrong, entries contradict each other, or the leader is not among the peers.
    """
    signed = parsed(pb.SignedByPeer, data, MAX_ROUND_BYTES)
    message = parsed(pb.Round, signed.content, MAX_ROUND_BYTES)
    leader, moment = signer_of(Kind.ROUND, signed), Moment(message.rollbacks, message.step)
    if not isfinite(message.ended_at):
        raise ValueError("a round ended at no time")
    _user(organiser, leader, signed.token, message.ended_at)
    credited = []
    for entry in message.contributions:
        contribution = Contribution.parse(entry)
        if (contribution.run, contribution.moment) != (message.run, moment):
            raise ValueError("a round has a contribution to another run or step")
        if contribution.samples < 1:
            raise ValueError("a round has a contribution of no samples")
        user = _user(organiser, contribution.peer_id, entry.token, message.ended_at)
        credited.append(Credited(contribution, user))
    peer_ids = [each.contribution.peer_id for each in credited]
    if len(set(peer_ids)) != len(peer_ids) or leader not in peer_ids:
        raise ValueError("a round has a peer twice, or a leader that took no part")
    return Round(message.run, moment, leader, message.ended_at, tuple(credited))


def _user(organiser: SwarmKey | None, peer_id: str, token: bytes, at: float) -> str:
    """The token need not be valid now, but at the time of the round."""
    if organiser is None:
        if token:
            raise ValueError(f"peer {peer_id} shows a token, and the run has no organiser")
        return peer_id
    try:
        grant = Grant.parse(token)
    except ValueError:
        raise ValueError(f"the token of peer {peer_id} is none") from None
    is_right = grant.swarm_key == organiser and grant.peer_id == peer_id and grant.role.may_act_as(Role.TRAINER)
    if not is_right or not grant.granted_at - CLOCK_SKEW_S <= at <= grant.expires_at + CLOCK_SKEW_S:
        raise ValueError(f"the token of peer {peer_id} does not let it train in this run at that time")
    return grant.name
