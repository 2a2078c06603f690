"""The decision whether a meeting goes back to a checkpoint instead of averaging, and to which one. No I/O.

The leader proposes, and every member judges the proposal before it accepts. A member judges by the losses that all
members have signed and the losses of the run so far, or by a moderator's order. Neither a leader nor any minority can
roll a run back, whatever losses they claim: ``agreed_loss`` says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from swarm_training.core.config import MAX_WINDOW, RollbackPolicy
from swarm_training.core.moment import Moment
from swarm_training.core.record import MEETING, Progress
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.policy import has_quorum, majority_digest
from swarm_training.rollback.divergence import Diverged, LossHistory, agreed_loss, observe

_MAX_CHECKPOINTS = MAX_WINDOW + 1  # that a member may claim


@dataclass(frozen=True)
class RollbackJudge:
    """The data by which a peer judges whether to go back."""

    policy: RollbackPolicy | None = None  # the limits of losses; None: losses do not matter
    history: LossHistory = field(default_factory=LossHistory)
    # The moderators' orders for this number of rollbacks, as signed, with the step to go back to.
    orders: Mapping[bytes, int] = field(default_factory=dict)

    def diverged(self, moment: Moment, records: Iterable[Progress]) -> Diverged | None:
        """Return the divergence that a group's losses show, as its members reported them at joining; else None."""
        loss = agreed_loss(losses_of(moment, records))
        return None if self.policy is None or loss is None else observe(self.policy, self.history, moment.step, loss)[1]

    def due(self, moment: Moment) -> list[bytes]:
        """Return the orders that may be carried out now, the one to the earliest step first."""
        return sorted(
            (order for order, step in self.orders.items() if step < moment.step),
            key=lambda order: (self.orders[order], order),
        )


def losses_of(moment: Moment, records: Iterable[Progress]) -> list[float | None]:
    """Return the losses of the batch that is being averaged; None for a record that is about another batch."""
    return [
        record.loss if record.loss_samples and record.state == MEETING and record.moment == moment else None
        for record in records
    ]


def proposal(
    judge: RollbackJudge, moment: Moment, joins: Sequence[pb.Join], records: Sequence[Progress]
) -> pb.Rollback | None:
    """Return the rollback that a leader proposes instead of an average; None: the group averages. ``records``: the
    records in the joins.

    An order that cannot be carried out, because no checkpoint is that old, blocks neither other orders nor losses. If
    no member has a gradient (all may be NaN) and the members agree on no checkpoint, the batch is dropped: the run
    "goes back" to where it stands.
    """
    wanted = [(order, judge.orders[order]) for order in judge.due(moment)]
    if (diverged := judge.diverged(moment, records)) is not None:
        wanted.append((b"", diverged.wanted_step))
    if not wanted:
        return None
    order, checkpoint = next(
        ((order, found) for order, step in wanted if (found := _agreed_up_to(step, joins)) is not None),
        (wanted[0][0], None),
    )
    if checkpoint is None and not any(join.samples for join in joins):
        checkpoint = moment.step, majority_digest(records) or b""
    if checkpoint is None:
        return None
    step, digest = checkpoint
    losses = [] if order else [join.own for join in joins]
    return pb.Rollback(step=step, state_digest=digest, order=order, losses=losses)


def _agreed_up_to(step: int, joins: Sequence[pb.Join]) -> tuple[int, bytes] | None:
    return agreed_checkpoint(
        {claim.step: claim.state_digest for claim in join.checkpoints[:_MAX_CHECKPOINTS] if claim.step <= step}
        for join in joins
    )


def agreed_checkpoint(claims: Iterable[Mapping[int, bytes]]) -> tuple[int, bytes] | None:
    """Return the newest checkpoint that a majority of the members with checkpoints hold: its step and its digest.

    ``claims``: the digests of each member's checkpoints, by step. A member that joined later may hold none.
    """
    holders = [claim for claim in claims if claim]
    counts = Counter(checkpoint for claim in holders for checkpoint in claim.items())
    return max((each for each, count in counts.items() if 2 * count > len(holders)), default=None)


def is_justified(
    judge: RollbackJudge,
    moment: Moment,
    go_back: pb.Rollback,
    evidence: Sequence[Progress],
    roster: Collection[str],
    gone: Collection[str],
) -> bool:
    """Return whether a member accepts the leader's proposal. ``evidence``: its records, each signed by its peer."""
    if go_back.order:
        wanted = judge.orders.get(go_back.order)
    else:
        peers = {record.peer_id for record in evidence}
        if len(peers) < len(evidence) or not has_quorum(peers, roster, gone):
            return False
        diverged = judge.diverged(moment, evidence)
        wanted = None if diverged is None else diverged.wanted_step
    # The present step is allowed too: the batch is dropped, see ``proposal``.
    return wanted is not None and (go_back.step <= wanted or go_back.step == moment.step)


def digest_of(run: str, moment: Moment, go_back: pb.Rollback) -> bytes:
    """Return the digest by which members accept a rollback: SHA-256 of run, moment and checkpoint."""
    checkpoint = f"{go_back.step}/{go_back.state_digest.hex()}"
    return sha256(f"swarm.training.v1.Rollback:{run}/{moment}/{checkpoint}".encode()).digest()
