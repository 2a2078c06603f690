"""The decisions of a meeting's leader: who is in the group, which chunks are repaired, whether the average counts.

No vectors pass through the leader. A result counts once the leader knows that a quorum holds it; a later leader must
take that result over. This is single-decree Paxos for each global step (Lamport, 2001): joining is a promise, and a
report with a digest is an acceptance. `continues` hands on a result that may have been chosen. A meeting decides an
average, or the checkpoint that all peers go back to.

If micro-batches are counted exactly, a group must have each of them once, however long the leader waits for that. The
group adds them up only while all members that bring micro-batches are present.

The module decides from data alone: events come in, replies go out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from swarm_protocol.codecs.bitmap import from_bits, is_partition
from swarm_training.averaging.grid import needs_grid
from swarm_training.averaging.repair import repair
from swarm_training.core.config import MAX_MEMBERS
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.policy import has_quorum, rank
from swarm_training.rollback.judging import RollbackJudge, proposal

_MAX_ATTEMPTS = 6  # at one phase
_REPORT_DEADLINES = 2.0  # deadlines for the report of an attempt; a member gives the attempt up after 1.5
_MAX_CHUNKS = 1 << 20  # in a member's report, whose bitmap then has 128 KB
Replies = list[tuple[str, pb.MeetReply]]  # each reply with the id of its recipient
Countersign = Callable[[Sequence[pb.Join]], bytes]  # from the joins of the credited members to a round


@dataclass(frozen=True)
class LeaderContext:
    """A leader's context: its present knowledge of the run, apart from the members' messages."""

    expected: Collection[str]  # ids of the peers that the leader waits for, for ``wait_s`` at most
    # ``known``, ``roster``, ``gone``: ids of peers, see ``swarm_training.progress.policy``.
    known: Collection[str]
    roster: Collection[str]
    gone: Collection[str]
    wait_s: float
    deadline_s: float  # the deadline for stragglers in an attempt
    judge: RollbackJudge = field(default_factory=RollbackJudge)  # decides whether the run must go back
    # The signed records with losses on held-out data that the run has not agreed on yet.
    evaluations: Sequence[pb.SignedProgress] = ()
    is_over: bool = False  # whether the other peers have ended the run, so that no group may be formed any more


class MeetingState(Enum):
    """The state of a meeting: members join, then they average or go back, then it is decided or has failed."""

    GATHERING = 1
    AVERAGING = 2
    OVER = 3


@dataclass(frozen=True)
class _Joined:
    join: pb.Join
    record: Progress


@dataclass
class _Averaging:
    members: tuple[str, ...]
    shares: list[float]
    reachable: frozenset[int]
    alive: set[int]
    continues: str
    goes_back: bool
    phase: int = 0
    attempt: int = 0
    began_s: float = 0.0
    reports: dict[int, pb.Report] = field(default_factory=dict)
    needed: frozenset[int] = frozenset()  # members without which nothing can be added up

    def begin_next(self, now: float, *, repairs: bool) -> bool:
        """Begin an attempt to repair this phase, or begin the next phase. Return False after too many attempts."""
        self.phase, self.attempt = (self.phase, self.attempt + 1) if repairs else (self.phase + 1, 0)
        self.reports.clear()
        self.began_s = now
        return self.attempt < _MAX_ATTEMPTS


class Leader:
    """The leader of one meeting. All times are read from one clock, in seconds."""

    def __init__(self, run: str, moment: Moment, name: str, countersign: Countersign = lambda _joins: b"") -> None:
        """Begin to gather members. ``name``: the id of the group. ``countersign``: returns the ledger's round."""
        self.moment = moment
        self.stage = MeetingState.GATHERING
        self._run = run
        self._name = name
        self._countersign = countersign
        self._joined: dict[str, _Joined] = {}
        self._began_s: float | None = None
        self._group: _Averaging | None = None

    def join(self, peer_id: str, join: pb.Join, record: Progress, now: float) -> None:
        assert self.stage is MeetingState.GATHERING
        if self._began_s is None:
            self._began_s = now
        self._joined[peer_id] = _Joined(join, record)

    def leave(self, peer_id: str, context: LeaderContext, now: float) -> Replies:
        """Drop a peer whose stream has ended or that is silent, and return the replies that follow."""
        if self.stage is MeetingState.GATHERING:
            self._joined.pop(peer_id, None)
        group = self._group
        if self.stage is not MeetingState.AVERAGING or group is None or peer_id not in group.members:
            return []
        number = group.members.index(peer_id)
        if number not in group.alive:
            return []
        group.alive.discard(number)
        group.reports.pop(number, None)
        dropped = pb.MeetReply(dropped=pb.Dropped(member=number))
        return [*self._to_alive(group, dropped), *self._advance(group, context, now)]

    def report(self, peer_id: str, report: pb.Report, context: LeaderContext, now: float) -> Replies:
        group = self._group
        if self.stage is not MeetingState.AVERAGING or group is None or peer_id not in group.members:
            return []
        number = group.members.index(peer_id)
        if (report.phase, report.attempt) != (group.phase, group.attempt) or number not in group.alive:
            return []
        group.reports[number] = report
        return self._advance(group, context, now)

    def tick(self, context: LeaderContext, now: float) -> Replies:
        """Return the replies that are due now. Call this when a peer has joined, and at short intervals."""
        if self.stage is MeetingState.GATHERING and self._is_full(context, now):
            return self._form(context, now)
        group = self._group
        if self.stage is not MeetingState.AVERAGING or group is None:
            return []
        replies: Replies = []
        if now - group.began_s > _REPORT_DEADLINES * context.deadline_s:
            for number in sorted(group.alive - group.reports.keys()):
                late = pb.MeetReply(dismissal=pb.Dismissal(reason="this peer was too slow"))
                replies += [(group.members[number], late), *self.leave(group.members[number], context, now)]
        return replies

    def _is_full(self, context: LeaderContext, now: float) -> bool:
        """Return whether the group can be formed. It needs a quorum of the roster, so that a run cannot fork. It also
        needs a quorum of all peers that are known to be at this moment, so that no small group takes a step."""
        present = self._joined.keys()
        joined = self._joined.values()
        if self._began_s is None or context.is_over or not any(peer.record.is_reachable for peer in joined):
            return False
        if not self._has_work(context):
            return False
        electorates = context.roster, {*context.known, *present}
        if not _is_quorum(present, electorates, context.gone) or not self._may_average(context):
            return False
        is_late = now - self._began_s >= context.wait_s
        return is_late or set(context.expected) <= present or len(present) >= MAX_MEMBERS

    def _has_work(self, context: LeaderContext) -> bool:
        """Return whether the members have samples, a decision to finish, or a rollback to propose."""
        has_some = any(peer.join.samples or peer.join.accepted.group for peer in self._joined.values())
        return has_some or self._proposal(context) is not None

    def _may_average(self, context: LeaderContext) -> bool:
        """Return whether the members need no new average, or have each micro-batch once if they are counted exactly."""
        joined = [self._joined[peer] for peer in self._members()]
        if not joined[0].record.counts_exactly or any(peer.join.accepted.group for peer in joined):
            return True
        parts = (peer.record.micro_batches for peer in joined)
        return is_partition(parts, joined[0].record.target_batch_size) or self._proposal(context) is not None

    def _members(self) -> list[str]:
        """Return the members' ids, in their order in the group."""
        ordered = sorted(self._joined, key=lambda peer: rank(self._run, self.moment, peer))
        if len(ordered) > MAX_MEMBERS and self._joined[ordered[0]].record.counts_exactly:
            first = sorted(ordered, key=lambda peer: not self._joined[peer].join.samples)[:MAX_MEMBERS]
            return [peer for peer in ordered if peer in first]  # the batch is complete without peers that have nothing
        return ordered[:MAX_MEMBERS]

    def _proposal(self, context: LeaderContext) -> pb.Rollback | None:
        members = [self._joined[peer] for peer in self._members()]
        joins, records = [member.join for member in members], [member.record for member in members]
        return proposal(context.judge, self.moment, joins, records)

    def _form(self, context: LeaderContext, now: float) -> Replies:
        peers = self._members()
        joined = [self._joined[peer] for peer in peers]
        shares = _shares([peer.record for peer in joined])
        reachable = frozenset(number for number, peer in enumerate(joined) if peer.record.is_reachable)
        is_exact = joined[0].record.counts_exactly
        message = self._group_message(peers, shares, context)
        self.stage = MeetingState.AVERAGING
        self._group = _Averaging(
            tuple(peers),
            shares,
            reachable,
            set(range(len(peers))),
            message.continues,
            message.HasField("go_back"),
            began_s=now,
            needed=frozenset(number for number, peer in enumerate(joined) if is_exact and peer.join.samples),
        )
        return self._to_alive(self._group, pb.MeetReply(group=message))

    def _group_message(self, peers: Sequence[str], shares: Sequence[float], context: LeaderContext) -> pb.Group:
        joined = [self._joined[peer] for peer in peers]
        # As in Paxos, the accepted result with the highest ballot is taken over: it may have been chosen.
        accepted = max((peer.join.accepted for peer in joined), key=lambda result: result.ballot)
        new = None if accepted.group else self._proposal(context)
        return pb.Group(
            id=self._name,
            step=self.moment.step,
            rollbacks=self.moment.rollbacks,
            ballot=1 + max(peer.join.promised for peer in joined),
            members=[
                pb.Member(record=peer.join.own, weight=peer.join.samples, share=share)
                for peer, share in zip(joined, shares, strict=True)
            ],
            deadline_s=context.deadline_s,
            continues=accepted.group,
            layout=accepted.layout or shares,
            roster=accepted.roster or self._reachable(peers),
            grid=not accepted.group and needs_grid(shares) and not joined[0].record.counts_exactly,
            go_back=accepted.go_back if accepted.HasField("go_back") else new,
            evaluations=accepted.evaluations if accepted.group else context.evaluations,
        )

    def _reachable(self, peers: Sequence[str]) -> list[str]:
        return sorted(peer for peer in peers if self._joined[peer].record.is_reachable)

    def _advance(self, group: _Averaging, context: LeaderContext, now: float) -> Replies:
        """Return the replies that are due once all living members have reported; none before."""
        if not group.alive:
            self.stage = MeetingState.OVER
        if self.stage is MeetingState.OVER or not group.alive <= group.reports.keys():
            return []
        reports = {number: group.reports[number] for number in group.alive}
        if all(report.digest for report in reports.values()):
            return self._decide(group, reports, context)
        if not _are_of_one_length(reports.values()):
            return self._end(group, "the members do not average vectors of the same length")
        try:
            held = {number: from_bits(report.held, report.num_chunks) for number, report in reports.items()}
        except ValueError:
            return self._end(group, "the report of a member is not understood")
        return self._plan(group, held, reports.values(), now)

    def _plan(
        self, group: _Averaging, held: Mapping[int, Collection[int]], reports: Iterable[pb.Report], now: float
    ) -> Replies:
        reports = list(reports)
        broken = frozenset[int]().union(*(report.broken for report in reports))
        reachable = group.alive & group.reachable
        # Broken members are avoided, unless there are no others.
        needed = repair(reports[0].num_chunks, held, reachable - broken or reachable, group.shares)
        # A chunk of an earlier result is not added up again: it would differ from the result that may have been chosen.
        if needed.lost or (needed.redo and group.continues):
            return self._end(group, "no remaining member holds some part of the result")
        if needed.redo and not group.needed <= group.alive:
            return self._end(group, "a member whose micro-batches are needed has failed")
        if not group.begin_next(now, repairs=bool(needed.fetch or needed.redo)):
            return self._end(group, "too many members have failed")
        plan = pb.Plan(
            phase=group.phase,
            attempt=group.attempt,
            fetch=[pb.Transfer(chunk=chunk, member=member) for chunk, member in needed.fetch.items()],
            redo=[pb.Transfer(chunk=chunk, member=member) for chunk, member in needed.redo.items()],
        )
        return self._to_alive(group, pb.MeetReply(plan=plan))

    def _decide(self, group: _Averaging, reports: Mapping[int, pb.Report], context: LeaderContext) -> Replies:
        """Decide for the result that most members hold, if its holders are a quorum of the roster and of the group."""
        counts = Counter(report.digest for report in reports.values())
        digest = max(sorted(counts), key=lambda each: counts[each])
        holders = {group.members[number] for number, report in reports.items() if report.digest == digest}
        electorates = (context.roster, [group.members[number] for number in group.reachable])
        if not _is_quorum(holders, electorates, context.gone):
            return self._end(group, "the remaining members are no quorum")
        self.stage = MeetingState.OVER
        credited = [self._joined[peer].join for peer in group.members if peer in holders and not group.goes_back]
        if group.continues:  # all contributors to its result hold that result
            credited = [join for join in credited if join.accepted.digest == digest]
        commit = pb.MeetReply(commit=pb.Commit(digest=digest, round=self._countersign(credited)))
        odd = pb.MeetReply(dismissal=pb.Dismissal(reason="most members have got another result"))
        return [(peer, commit if peer in holders else odd) for peer in map(group.members.__getitem__, sorted(reports))]

    def _end(self, group: _Averaging, reason: str) -> Replies:
        self.stage = MeetingState.OVER
        return self._to_alive(group, pb.MeetReply(dismissal=pb.Dismissal(reason=reason)))

    def _to_alive(self, group: _Averaging, reply: pb.MeetReply) -> Replies:
        return [(group.members[number], reply) for number in sorted(group.alive)]


def _are_of_one_length(reports: Collection[pb.Report]) -> bool:
    """Return whether all members average the same number of chunks, and none of them reports a result already."""
    sizes = {report.num_chunks for report in reports}
    return len(sizes) == 1 and max(sizes) <= _MAX_CHUNKS and not any(report.digest for report in reports)


def _is_quorum(peers: Collection[str], electorates: Iterable[Collection[str]], gone: Collection[str]) -> bool:
    """Return whether the peers are a quorum of each electorate."""
    return all(has_quorum(peers, electorate, gone) for electorate in electorates)


def _shares(records: Sequence[Progress]) -> list[float]:
    """Return each member's share of the adding up. If nobody offers a share, the reachable members have equal ones."""
    offered = [record.share if record.is_reachable else 0.0 for record in records]
    return offered if sum(offered) else [float(record.is_reachable) for record in records]
