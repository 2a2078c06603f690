"""The samples that each peer has given to a step, signed by the peer and countersigned by the leader of its meeting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite

from swarm_protocol.access.access_control import CLOCK_SKEW_S
from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.net.identity import Identity
from swarm_training.core.moment import Moment
from swarm_training.ledger.signing import ContentKind, claimed_signer_of, parsed, sign, signer_of
from swarm_training.pb import training_ledger_pb2 as pb

MAX_ROUND_BYTES = 1 << 18  # enough for a group of some 130 peers with the longest tokens
MAX_SIGNED_CONTRIBUTION_BYTES = 4096  # with key, signature and token
_MAX_CONTRIBUTION_BYTES = 1024
_MAX_KNOWN_TOKENS = 1024
SignerOf = Callable[[ContentKind, pb.SignedByPeer], str]


@dataclass(frozen=True)
class Contribution:
    """The samples that one peer has given to the step of a moment."""

    run: str
    moment: Moment
    peer_id: str
    samples: int

    def signed(self, identity: Identity, token: bytes = b"") -> pb.SignedByPeer:
        """Sign the contribution with the key of the peer that it names."""
        assert identity.peer_id == self.peer_id
        message = pb.Contribution(
            run=self.run,
            rollbacks=self.moment.rollbacks,
            step=self.moment.step,
            peer_id=self.peer_id,
            samples=self.samples,
        )
        return sign(ContentKind.CONTRIBUTION, message, identity, token)

    @classmethod
    def parse(cls, signed: pb.SignedByPeer, signer: SignerOf = signer_of) -> Contribution:
        """Parse a contribution. Raise ValueError unless the peer that it names has signed it."""
        message = parsed(pb.Contribution, signed.content, _MAX_CONTRIBUTION_BYTES)
        if signer(ContentKind.CONTRIBUTION, signed) != message.peer_id:
            raise ValueError("a contribution is not signed by the peer that it names")
        moment = Moment(message.rollbacks, message.step)
        return cls(message.run, moment, message.peer_id, message.samples)


@dataclass(frozen=True)
class Credited:
    """A contribution and its user: the name in the peer's token or, without an organiser, the peer id."""

    contribution: Contribution
    user: str


@dataclass(frozen=True)
class RoundContributions:
    """The contributions to one meeting. ``ended_at``: Unix time in seconds, as the leader says."""

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
    """Sign a round as its leader, which has checked that these peers have given so many samples."""
    message = pb.Round(
        run=run, rollbacks=moment.rollbacks, step=moment.step, ended_at=ended_at, contributions=contributions
    )
    return sign(ContentKind.ROUND, message, leader, token).SerializeToString()


def verify_contribution(signed: pb.SignedByPeer, organiser: SwarmKey | None, at: float) -> Credited:
    """Verify a contribution at Unix time ``at``. Raise ValueError if the signature, token or samples are wrong."""
    return _credited(signed, organiser, at, signer_of)


def verify_round(data: bytes, organiser: SwarmKey | None) -> RoundContributions:
    """Verify a round. ``organiser``: only its members may contribute and lead; None: any peer may. Raise ValueError if
    a signature or token is wrong, or entries contradict each other."""
    return _round_of(data, organiser, signer_of)


def restore_round(data: bytes, organiser: SwarmKey | None) -> RoundContributions:
    """Parse a round that was verified before, and kept safe from changes. Signatures of peers are not checked again."""
    return _round_of(data, organiser, claimed_signer_of)


def moment_of(data: bytes, run: str) -> Moment:
    """Return a round's moment, before time is spent on signatures. Raise ValueError if this is no round of the run."""
    signed = parsed(pb.SignedByPeer, data, MAX_ROUND_BYTES)
    message = parsed(pb.Round, signed.content, MAX_ROUND_BYTES)
    if message.run != run:
        raise ValueError("the round is of another run")
    return Moment(message.rollbacks, message.step)


def _round_of(data: bytes, organiser: SwarmKey | None, signer: SignerOf) -> RoundContributions:
    signed = parsed(pb.SignedByPeer, data, MAX_ROUND_BYTES)
    message = parsed(pb.Round, signed.content, MAX_ROUND_BYTES)
    leader, moment = signer(ContentKind.ROUND, signed), Moment(message.rollbacks, message.step)
    if not isfinite(message.ended_at):
        raise ValueError("the time at which a round ended is no number")
    _user(organiser, leader, signed.token, message.ended_at)
    credited = tuple(_credited(entry, organiser, message.ended_at, signer) for entry in message.contributions)
    if any((each.contribution.run, each.contribution.moment) != (message.run, moment) for each in credited):
        raise ValueError("a round has a contribution to another run or step")
    if len({each.contribution.peer_id for each in credited}) != len(credited):
        raise ValueError("a round has a peer twice")
    return RoundContributions(message.run, moment, leader, message.ended_at, credited)


def _credited(signed: pb.SignedByPeer, organiser: SwarmKey | None, at: float, signer: SignerOf) -> Credited:
    contribution = Contribution.parse(signed, signer)
    if contribution.samples < 1:
        raise ValueError("a contribution has no samples")
    return Credited(contribution, _user(organiser, contribution.peer_id, signed.token, at))


def _user(organiser: SwarmKey | None, peer_id: str, token: bytes, at: float) -> str:
    """Return a peer's user. The token must be valid at the time of the round, but need not be valid now."""
    if organiser is None:
        if token:
            raise ValueError(f"peer {peer_id} shows a token, and the run has no organiser")
        return peer_id
    try:
        grant = _grant(token)
    except ValueError:
        raise ValueError(f"the token of peer {peer_id} cannot be read") from None
    is_right = grant.swarm_key == organiser and grant.peer_id == peer_id and grant.role.may_act_as(Role.TRAINER)
    if not is_right or not grant.granted_at - CLOCK_SKEW_S <= at <= grant.expires_at + CLOCK_SKEW_S:
        raise ValueError(f"the token of peer {peer_id} does not let it train in this run at that time")
    return grant.name


@lru_cache(_MAX_KNOWN_TOKENS)
def _grant(token: bytes) -> Grant:
    return Grant.parse(token)
