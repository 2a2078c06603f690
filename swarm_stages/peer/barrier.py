"""When a stage may take the step whose average it holds, and when it goes back with others. Decides from data alone.

All stages step together. A stage that holds its average of step t waits until every other one holds its own, so that
until then each can still compute micro-batches of step t, for those which lack some because a peer has died. Whoever
sees anybody past the step follows: the barrier was open then.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_stages.peer.run_stages import RunStages, StageMember
from swarm_training.core.moment import Moment


def may_step(stages: RunStages, moment: Moment) -> bool:
    """Whether who holds the average of this moment may apply it."""
    if any(_is_past(peer, moment) for stage in stages.stages for peer in stage):
        return True
    return bool(stages.stages) and all(_holds(stage, moment) for stage in stages.stages)


def went_back_to(stages: RunStages, moment: Moment) -> Moment | None:
    """Where the run is after a rollback that a stage has decided; None if there was none since.

    Of a stage more than half must say so: no single peer can send a run back, but one that is alone at its stage.
    """
    found = []
    for stage in stages.stages:
        later = [peer.moment for peer in stage if peer.moment.rollbacks > moment.rollbacks]
        if 2 * len(later) > len(stage):
            found.append(min(each for each in later if each.rollbacks == max(later).rollbacks))
    if not found:
        return None
    rollbacks = max(each.rollbacks for each in found)
    return min(each for each in found if each.rollbacks == rollbacks)


def is_stranded(stages: RunStages, own_stage: int, moment: Moment) -> bool:
    """Whether another stage has gone on without this one, where nobody is left who could.

    That happens if all who held the average die after others have seen it: the others have no weights of this step any
    more.
    """
    own = stages.stages[own_stage]
    if any(_is_past(peer, moment) or (peer.moment == moment and peer.holds) for peer in own):
        return False
    others = [stage for number, stage in enumerate(stages.stages) if number != own_stage]
    return any(2 * sum(_is_past(peer, moment) for peer in stage) > len(stage) for stage in others)


def _is_past(peer: StageMember, moment: Moment) -> bool:
    return peer.moment.rollbacks == moment.rollbacks and peer.moment.step > moment.step


def _holds(stage: Sequence[StageMember], moment: Moment) -> bool:
    """Whether somebody holds the average, and nobody still has to get it: should the holders die, the rest would be
    stranded."""
    here = [peer for peer in stage if peer.moment == moment]
    return any(peer.holds for peer in here) and all(peer.holds or not any(peer.bits) for peer in here)
