"""The barrier between stages: when a stage may step, and when it goes back with others. It decides from data alone.

All stages step together. A stage that holds its average of step t waits until every other stage holds its own. Until
then, each can still compute micro-batches of step t for stages that lack some because a peer has died. If more than
half of a stage's peers that have come to the step are past it, others follow them: the barrier was open then. A single
peer that claims to be past the step moves nobody if mates of it are at the step: records come from strangers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import fsum
from typing import TypeVar

from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.stages.routing.run_stages import RunStages

Norm = TypeVar("Norm", float, tuple[float, ...])


def may_step(stages: RunStages, moment: Moment) -> bool:
    """Return whether a peer that holds the average of this moment may apply it."""
    # Peers that lag behind are left out, since they may do so for as long as they download the state.
    if any(_most_are_past([peer for peer in stage if peer.moment >= moment], moment) for stage in stages.stages):
        return True
    return bool(stages.stages) and all(_holds(stage, moment) for stage in stages.stages)


def global_squared_norm(stages: RunStages, moment: Moment) -> float | None:
    """Return the squared norm of all stages' averages of this moment; None while it is not known.

    It is the sum over the stages. Once peers have applied their averages, they publish the sum instead. If peers
    publish different norms, some of them lie: the most frequent one counts, and of equally frequent ones the largest,
    with which the step is smallest.
    """
    published = [
        Counter(peer.squared_norm for peer in stage if peer.moment == moment and peer.squared_norm)
        for stage in stages.stages
    ]
    if published and all(published):
        return fsum(part for norms in published for part in _most_frequent(norms))
    after = replace(moment, step=moment.step + 1)
    past = (peer for stage in stages.stages for peer in stage if peer.moment == after)
    sums = Counter(peer.global_squared_norm for peer in past if peer.global_squared_norm is not None)
    return _most_frequent(sums) if sums else None


def went_back_to(stages: RunStages, moment: Moment) -> Moment | None:
    """Return where the run is after a rollback that a stage has decided; None if there was none since this moment.

    More than half of a stage must say so: no single peer can send a run back, unless it is alone at its stage.
    """
    found = []
    for stage in stages.stages:
        later = [peer.moment for peer in stage if peer.moment.rollbacks > moment.rollbacks]
        if 2 * len(later) > len(stage):
            # The earliest moment is the nearest to the rollback's checkpoint: other peers may have stepped since.
            found.append(min(each for each in later if each.rollbacks == max(later).rollbacks))
    if not found:
        return None
    rollbacks = max(each.rollbacks for each in found)
    return min(each for each in found if each.rollbacks == rollbacks)


def is_stranded(stages: RunStages, own_stage: int, moment: Moment) -> bool:
    """Return whether another stage has gone on without this one, where no peer is left that could follow.

    This happens if all peers that held the average die after other stages have seen it: the other stages have no
    weights of this step any more.
    """
    own = stages.stages[own_stage]
    if any(_is_past(peer, moment) or (peer.moment == moment and peer.holds) for peer in own):
        return False
    others = [stage for number, stage in enumerate(stages.stages) if number != own_stage]
    return any(_most_are_past(stage, moment) for stage in others)


def skipped_batches(stages: Iterable[Collection[Progress]]) -> int:
    """Return how many batches of the data the run has skipped: the largest number that at least half of a stage's peers
    have reached. One of two is enough, since a mate may not know yet what it has decided. ``stages``: the peers of each
    stage that may know the number."""
    claims = (sorted((peer.skipped_batches for peer in stage), reverse=True) for stage in stages)
    return max((claimed[(len(claimed) - 1) // 2] for claimed in claims if claimed), default=0)


def _is_past(peer: Progress, moment: Moment) -> bool:
    return peer.moment.rollbacks == moment.rollbacks and peer.moment.step > moment.step


def _most_are_past(stage: Sequence[Progress], moment: Moment) -> bool:
    return 2 * sum(_is_past(peer, moment) for peer in stage) > len(stage)


def _holds(stage: Sequence[Progress], moment: Moment) -> bool:
    """Return whether some peer holds the average, and each peer with micro-batches in it holds it too. If others lacked
    it and its holders died, the stage would be stranded."""
    here = [peer for peer in stage if peer.moment == moment]
    return any(peer.holds for peer in here) and all(peer.holds or not any(peer.micro_batches) for peer in here)


def _most_frequent(norms: Counter[Norm]) -> Norm:
    return max(norms, key=lambda norm: (norms[norm], norm))
