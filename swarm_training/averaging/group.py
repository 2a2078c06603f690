"""The group of peers that average together, as the leader of their meeting has announced it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256

from swarm_protocol.codecs.bitmap import is_partition
from swarm_training.averaging.grid import needs_grid
from swarm_training.core.config import MAX_MEMBERS
from swarm_training.core.moment import Moment
from swarm_training.core.record import HeldOutLoss, Progress
from swarm_training.core.signing import read_signed
from swarm_training.pb import training_pb2 as pb

_MAX_DEADLINE_S = 3600.0
_MAX_SHARE = 1e12
MAX_EVALUATIONS = 4  # losses on held-out data that become known with one step
_MAX_ORDER_BYTES = 4096
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class GroupMember:
    """One member of a group."""

    record: Progress
    weight: int  # samples behind its gradient
    share: float  # share of the adding up, relative to other members


@dataclass(frozen=True)
class Group:
    """The peers that average together, and how they do it."""

    id: str
    step: int
    ballot: int
    members: tuple[GroupMember, ...]  # the members, in the order in which gradients are added up
    deadline_s: float
    continues: str = ""  # the id of an earlier group whose result is taken over; empty if there is none
    layout: tuple[float, ...] = ()  # the shares by which vectors are cut
    roster: tuple[str, ...] = ()  # ids of the peers that decide about the next step, sorted
    grid: bool = False  # whether the first attempt at each phase is on a grid
    rollbacks: int = 0
    go_back: pb.Rollback | None = None  # the checkpoint that the group goes back to instead of averaging
    num_micro_batches: int = 0  # the number of micro-batches in the batch if it is counted exactly, else 0
    # Signed records, whose losses on held-out data all peers know from this step on.
    evaluations: tuple[pb.SignedProgress, ...] = ()

    @classmethod
    def parse(cls, message: pb.Group) -> Group:
        """Return the group in the message. Raise ValueError if such a group is not possible."""
        members = tuple(GroupMember(read_signed(m.record), m.weight, m.share) for m in message.members)
        _check_members(members, message.deadline_s)
        layout, roster = tuple(message.layout), tuple(message.roster)
        _check_layout(layout, message, members)
        if not 0 < len(roster) <= MAX_MEMBERS:
            raise ValueError(f"a roster has {len(roster)} peers: expected 1 to {MAX_MEMBERS}")
        if message.grid and (message.continues or not needs_grid(layout)):
            raise ValueError("a group is on a grid, but is too small for one, or continues an earlier average")
        go_back = message.go_back if message.HasField("go_back") else None
        if go_back is not None:
            _check_rollback(go_back, message.step)
        is_new = not message.continues and go_back is None
        num_micro_batches = _num_micro_batches(members, is_new)
        if num_micro_batches and message.grid:
            raise ValueError("a group that counts exactly is on a grid")
        _check_evaluations(message, members[0].record.run)
        return cls(
            message.id,
            message.step,
            message.ballot,
            members,
            message.deadline_s,
            message.continues,
            layout,
            roster,
            message.grid,
            message.rollbacks,
            go_back,
            num_micro_batches,
            tuple(message.evaluations),
        )

    def limited(self, max_samples: int) -> Group:
        """Return the group in which no member has more weight than this, whatever it or the leader claims."""
        members = (replace(member, weight=min(member.weight, max_samples)) for member in self.members)
        return replace(self, members=tuple(members))

    @property
    def moment(self) -> Moment:
        return Moment(self.rollbacks, self.step)

    @property
    def next_moment(self) -> Moment:
        """Return the moment to which the group's decision leads."""
        if self.go_back is not None:
            return Moment(self.rollbacks + 1, self.go_back.step)
        return Moment(self.rollbacks, self.step + 1)

    @cached_property
    def held_out_losses(self) -> tuple[HeldOutLoss, ...]:
        """Return the losses on held-out data that become known with the group's decision."""
        found = (read_signed(each).held_out for each in self.evaluations)
        return tuple(loss for loss in found if loss is not None)

    def bound(self, digest: bytes) -> bytes:
        """Return the digest by which members agree on both the average with ``digest`` and the evaluations."""
        if not self.evaluations:
            return digest
        return sha256(b"".join((digest, *(sha256(each.progress).digest() for each in self.evaluations)))).digest()

    @cached_property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(member.record.peer_id for member in self.members)


def _check_members(members: tuple[GroupMember, ...], deadline_s: float) -> None:
    if not 0 < len(members) <= MAX_MEMBERS or len({m.record.peer_id for m in members}) < len(members):
        raise ValueError(f"a group has {len(members)} members: expected 1 to {MAX_MEMBERS} different ones")
    if not all(0 <= m.share < _MAX_SHARE and (m.record.is_reachable or not m.share) for m in members):
        raise ValueError("a member of a group has an impossible share of the work")
    if not any(m.share for m in members) or not 0 < deadline_s <= _MAX_DEADLINE_S:
        raise ValueError("a group has no member that can add up, or an impossible deadline")


def _check_layout(layout: tuple[float, ...], message: pb.Group, members: tuple[GroupMember, ...]) -> None:
    if not 0 < len(layout) <= MAX_MEMBERS or not all(0 <= share < _MAX_SHARE for share in layout) or not any(layout):
        raise ValueError("the layout of a group is not understood")
    if not message.continues and layout != tuple(m.share for m in members):
        raise ValueError("the layout of a group is not that of its members")


def _num_micro_batches(members: tuple[GroupMember, ...], is_new: bool) -> int:
    """Return the batch's number of micro-batches; 0 if samples are counted. ``is_new``: the sums are added up now."""
    records = [member.record for member in members]
    if not any(record.counts_exactly for record in records):
        return 0
    size = records[0].target_batch_size
    sizes = {(record.counts_exactly, record.target_batch_size) for record in records}
    if sizes != {(True, size)} or any(member.weight != member.record.samples for member in members):
        raise ValueError("the members of a group do not count the same micro-batches")
    if is_new and not is_partition((record.micro_batches for record in records), size):
        raise ValueError("the micro-batches of a group are not complete, or some are there twice")
    return size


def _check_evaluations(message: pb.Group, run: str) -> None:
    if len(message.evaluations) > MAX_EVALUATIONS:
        raise ValueError(f"a group has {len(message.evaluations)} evaluations: expected at most {MAX_EVALUATIONS}")
    if any(read_signed(each).run != run for each in message.evaluations):
        raise ValueError("an evaluation of a group is of another run")


def _check_rollback(go_back: pb.Rollback, step: int) -> None:
    if go_back.step > step or len(go_back.state_digest) != _DIGEST_BYTES:
        raise ValueError("a group goes back to an impossible checkpoint")
    if len(go_back.losses) > MAX_MEMBERS or len(go_back.order) > _MAX_ORDER_BYTES:
        raise ValueError("a group has too many reasons to go back")
