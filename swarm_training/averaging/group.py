"""Who averages together, as the leader of their meeting has said."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from swarm_training.core.config import MAX_MEMBERS
from swarm_training.core.record import Progress
from swarm_training.core.signing import read_signed
from swarm_training.pb import training_pb2 as pb

_MAX_DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Member:
    record: Progress
    weight: int  # samples behind its gradient
    share: float  # of the adding up, relative to the others


@dataclass(frozen=True)
class Group:
    """Attributes:
    members: in the order in which gradients are added up.
    continues: an earlier group whose result is to be taken; empty if there is none.
    layout: the shares by which vectors are cut.
    roster: peer ids of those who decide about the next step, sorted.
    """

    id: str
    step: int
    ballot: int
    members: tuple[Member, ...]
    deadline_s: float
    continues: str = ""
    layout: tuple[float, ...] = ()
    roster: tuple[str, ...] = ()

    @classmethod
    def parse(cls, message: pb.Group) -> Group:
        """Raises ValueError if it is no possible group."""
        members = tuple(Member(read_signed(m.record), m.weight, m.share) for m in message.members)
        if not 0 < len(members) <= MAX_MEMBERS or len({m.record.peer_id for m in members}) < len(members):
            raise ValueError(f"a group has {len(members)} members: expected 1 to {MAX_MEMBERS} different ones")
        if not all(0 <= m.share < 1e12 and (m.record.is_reachable or not m.share) for m in members):
            raise ValueError("a member has a share of the work that it cannot have")
        if not any(m.share for m in members) or not 0 < message.deadline_s <= _MAX_DEADLINE_S:
            raise ValueError("a group has nobody to add up, or no possible deadline")
        layout, roster = tuple(message.layout), tuple(message.roster)
        if not 0 < len(layout) <= MAX_MEMBERS or not all(0 <= share < 1e12 for share in layout) or not any(layout):
            raise ValueError("the layout of a group is not understood")
        if not message.continues and layout != tuple(m.share for m in members):
            raise ValueError("the layout of a group is not that of its members")
        if not 0 < len(roster) <= MAX_MEMBERS:
            raise ValueError(f"a roster has {len(roster)} peers: expected 1 to {MAX_MEMBERS}")
        continues = message.continues
        return cls(message.id, message.step, message.ballot, members, message.deadline_s, continues, layout, roster)

    @cached_property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(member.record.peer_id for member in self.members)
