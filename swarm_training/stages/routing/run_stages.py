"""The known state of a run in stages: which peers are at which stage, and how far they are. Data alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.progress.policy import excluded_by_most, of_usual_model


def stage_run(run: str, stage: int) -> str:
    """Return the name of a stage's own run; the peers of that run average with each other."""
    return f"{run}/{stage}"


Stages = Sequence[Sequence[Progress]]  # the records of the living peers of each stage


@dataclass(frozen=True)
class RunStages:
    """The peers of a run in stages."""

    # The peers of each stage that have been heard of lately, in the order of their ids.
    stages: tuple[tuple[Progress, ...], ...]
    num_micro_batches: int = 0  # the number of micro-batches in a batch; 0: no peer has said it

    @classmethod
    def of(cls, stages: Iterable[Sequence[Progress]]) -> RunStages:
        """Return the stages by present peers' records, without peers of an unusual model and peers that most
        exclude."""
        usual = [_usual(records) for records in stages]
        sizes = Counter(record.target_batch_size for records in usual for record in records)
        return cls(
            tuple(map(tuple, usual)),
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
    return sorted(of_usual_model(exact), key=lambda record: record.peer_id)
