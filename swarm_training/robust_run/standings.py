"""The state that a newcomer loads, as bytes: the same at all honest peers, so that answers can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from swarm_training.broadcast.agreement import most_cheaters
from swarm_training.pb import training_robust_pb2 as pb
from swarm_training.robust.btard import BtardSnapshot
from swarm_training.robust.instructions import Remove, StepRecord
from swarm_training.robust.messages import RobustRound
from swarm_training.robust.roster import MemberRecord

_MOST_PEERS = 4096


@dataclass(frozen=True)
class Standings:
    """The state that a newcomer loads before a step.

    Attributes:
        joined: newcomers of that step.
        state, result: SHA-256 of the trained state, which has ``state_bytes`` bytes, and of the last aggregate.
    """

    session: bytes
    step: int
    joined: tuple[str, ...]
    snapshot: BtardSnapshot
    state: bytes
    state_bytes: int
    result: bytes

    def to_bytes(self) -> bytes:
        last, snapshot = self.snapshot.last, self.snapshot
        assert last is not None, "a step is over"
        message = pb.Standings(
            session=self.session,
            step=self.step,
            standings=[
                pb.Standing(peer=name, audits_passed=s.audits_passed, absences=s.absences, unfounded=s.unfounded)
                for name, s in sorted(snapshot.standings.items())
            ],
            removed=[
                pb.Removed(peer=name, reason=r.reason, is_banned=r.is_banned)
                for name, r in sorted(snapshot.removed.items())
            ],
            audits=[pb.Audit(validator=name, target=target) for name, target in sorted(snapshot.audits.items())],
            attempt=last.round.attempt,
            owners=last.round.owners,
            workers=last.round.workers,
            tau=last.round.tau,
            seed=last.round.seed,
            contributions=[
                pb.Contribution(worker=name, parts=parts, projections=last.projections.get(name, ()))
                for name, parts in sorted(last.commitments.items())
            ],
            joined=self.joined,
            state=self.state,
            state_bytes=self.state_bytes,
            result=self.result,
        )
        return message.SerializeToString(deterministic=True)

    @classmethod
    def parse(cls, data: bytes) -> Standings:
        """Parse standings. Raises ValueError if the bytes are invalid."""
        try:
            message = pb.Standings.FromString(data)
        except DecodeError:
            raise ValueError("the standings that peers have sent are not understood") from None
        if not 0 < len(message.standings) <= _MOST_PEERS or not message.step:
            raise ValueError("the standings that peers have sent make no sense")
        last_round = RobustRound(
            message.step - 1,
            message.attempt,
            tuple(message.owners),
            tuple(message.workers),
            message.tau,
            message.seed,
        )
        commitments = {each.worker: tuple(each.parts) for each in message.contributions}
        projections = {each.worker: tuple(each.projections) for each in message.contributions if each.projections}
        snapshot = BtardSnapshot(
            {each.peer: MemberRecord(each.audits_passed, each.absences, each.unfounded) for each in message.standings},
            StepRecord(last_round, commitments, projections),
            {each.validator: each.target for each in message.audits},
            {each.peer: Remove(each.peer, each.reason, each.is_banned) for each in message.removed},
        )
        joined = tuple(message.joined)
        return cls(message.session, message.step, joined, snapshot, message.state, message.state_bytes, message.result)


def vouched(answers: Iterable[bytes], founders: Collection[str]) -> bytes | None:
    """Return the answer that so many founders have given that one of them is honest. Each founder answers once."""
    counts = Counter(answers)
    found = [answer for answer, votes in counts.items() if votes > most_cheaters(len(founders))]
    return max(found, key=lambda answer: (counts[answer], answer), default=None)
