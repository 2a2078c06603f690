"""The agreement of all stages on the checkpoint from which a run starts again. It decides from data alone.

Stages write their checkpoints at the same steps, but some may be missing or damaged. The run goes on from the newest
step of which every stage has one. Checkpoints of one step belong together if the run came there with the same number of
rollbacks: after a rollback, it comes to the same step with other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_training.core.record import Kept


@dataclass(frozen=True)
class StartingPoint:
    """The checkpoint of each stage from which a run goes on."""

    step: int
    born: int  # see ``Lineage``
    rollbacks: int  # how often the run is known to have gone back
    skipped_batches: int  # the batches that the run had skipped when it was there last
    newest_step: int  # the step of the newest checkpoint of any stage; equal to ``step`` if every stage has that one

    def has(self, kept: Kept) -> bool:
        return (kept.step, kept.lineage.born) == (self.step, self.born)


def agreed(offers: Sequence[Sequence[Kept]]) -> StartingPoint | None:
    """Return the newest checkpoint that every stage has; None if there is none. ``offers``: the checkpoints of each
    stage.

    A run that has diverged goes back and skips batches. Hence the checkpoint with more skipped batches is the newer
    one, whatever its step: the run has undone later steps with fewer skipped batches.
    """
    common = set.intersection(*({(kept.step, kept.lineage.born) for kept in stage} for stage in offers))
    everything = [kept for stage in offers for kept in stage]
    if not common:
        return None
    most_skipped: dict[tuple[int, int], int] = {}
    for kept in everything:
        key = kept.step, kept.lineage.born
        most_skipped[key] = max(kept.lineage.skipped_batches, most_skipped.get(key, 0))

    def age(key: tuple[int, int]) -> tuple[int, int, int]:
        return most_skipped[key], *key

    step, born = max(common, key=age)
    rollbacks = max(kept.lineage.rollbacks for kept in everything)
    return StartingPoint(step, born, rollbacks, most_skipped[step, born], max(most_skipped, key=age)[0])


def lacking(offers: Sequence[Sequence[Kept]]) -> str:
    """Return a sentence part that says what is missing for an agreement."""
    if empty := [str(stage) for stage, kept in enumerate(offers) if not kept]:
        return f"nobody has a checkpoint of stage {', '.join(empty)} so far"
    states = [sorted({(each.step, each.lineage.born) for each in kept}, reverse=True) for kept in offers]
    listed = [
        ", ".join(f"{step} after {born} rollbacks" if born else str(step) for step, born in own) for own in states
    ]
    shown = "; ".join(f"stage {stage} has those of {each}" for stage, each in enumerate(listed))
    return f"there is no step of which every stage has a checkpoint after equally many rollbacks ({shown})"
