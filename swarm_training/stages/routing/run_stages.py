"""The known state of a run in stages: which peers are at which stage, and how far they are. Data alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.progress.policy import excluded_by_most


def stage_run(run: str, stage: int) -> str:
    """Return the name of a stage's own run; the peers of that run average with each other."""
    return f"{run}/{stage}"


@dataclass(frozen=True)
class StageMember:
    """A peer that has been heard of lately, as its signed record says.

    Attributes:
        address: HOST:PORT; empty if no peer can call it.
        tls_fingerprint: the SHA-256 of its certificate, DER.
        moment: the moment of its weights; a record is renewed shortly after the weights.
        bits: the micro-batches of this moment in its sums; number m is bit m % 8, from the lowest, of byte m // 8.
        holds: whether it holds the stage's decided average of this moment, and waits for the other stages.
        samples_per_s: the micro-batches per second that it could compute; 0: it has computed none yet.
        next_stage: the stage to which it has announced a move.
        skipped_batches: the batches of data skipped since the run began: at step t, the batch is t plus this.
        squared_norm: numbers whose exact sum is the squared norm of the average that it holds; empty: it holds none.
        global_squared_norm: the squared norm of all stages' averages that led to the moment; None: it is not known.
        has_ended: whether the run ends at the moment, since the loss on held-out data has stopped falling.
    """

    peer_id: str
    address: str
    tls_fingerprint: bytes
    moment: Moment
    bits: bytes
    holds: bool
    samples_per_s: float
    next_stage: int | None = None
    skipped_batches: int = 0
    squared_norm: tuple[float, ...] = ()
    global_squared_norm: float | None = None
    has_ended: bool = False

    @classmethod
    def of(cls, record: Progress) -> StageMember:
        return cls(
            record.peer_id,
            record.address,
            record.tls_fingerprint,
            record.moment,
            record.micro_batches,
            bool(record.decided),
            record.samples_per_s,
            record.next_stage,
            record.skipped_batches,
            record.squared_norm,
            record.global_squared_norm,
            record.has_ended,
        )


Stages = Sequence[Sequence[StageMember]]  # the living peers of each stage


@dataclass(frozen=True)
class RunStages:
    """The peers of a run in stages.

    Attributes:
        stages: the peers of each stage that have been heard of lately, in the order of their ids.
        num_micro_batches: the number of micro-batches in a batch; 0: no peer has said it.
    """

    stages: tuple[tuple[StageMember, ...], ...]
    num_micro_batches: int = 0

    @classmethod
    def of(cls, stages: Iterable[Sequence[Progress]]) -> RunStages:
        """Return the stages by present peers' records, without peers of an unusual model and peers that most
        exclude."""
        usual = [_usual(records) for records in stages]
        sizes = Counter(record.target_batch_size for records in usual for record in records)
        return cls(
            tuple(tuple(map(StageMember.of, records)) for records in usual),
            max(sizes, key=lambda size: (sizes[size], size), default=0),
        )

    @property
    def has_ended(self) -> bool:
        """Return whether the run has ended: more than half of the last stage, which has the losses, must say so."""
        last = self.stages[-1] if self.stages else ()
        return 2 * sum(peer.has_ended for peer in last) > len(last)

    @property
    def moment(self) -> Moment | None:
        """Return the moment at which micro-batches are wanted, see ``moment_of``."""
        return moment_of(self.stages)


def moment_of(stages: Stages) -> Moment | None:
    """Return the moment at which micro-batches are wanted: the slowest stage's; None if a stage has no peers."""
    if not stages or not all(stages):
        return None
    return min(max(peer.moment for peer in stage) for stage in stages)


def _usual(records: Sequence[Progress]) -> list[Progress]:
    excluded = excluded_by_most(records)
    exact = [record for record in records if record.counts_exactly and record.peer_id not in excluded]
    models = Counter(record.model for record in exact)
    usual = max(models, key=lambda model: (models[model], model), default=b"")
    return sorted((record for record in exact if record.model == usual), key=lambda record: record.peer_id)
