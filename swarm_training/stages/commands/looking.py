"""The view of a run in stages from outside, by the signed records of its peers alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

from swarm_protocol.process import network_loop
from swarm_training.commands.looking import shown_loss
from swarm_training.contract.backend import Joining
from swarm_training.contract.run_like import PeerView, RunView, StagePeerView, StageView
from swarm_training.core.bitmap import from_bits
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.evaluation.policy import shown_losses
from swarm_training.progress.policy import mean_loss
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands.building import require_stages, training_config
from swarm_training.stages.peer.presence import WatchPresence
from swarm_training.stages.peer.run_stages import RunStages, StageMember

_FIRST_S, _LOOK_S = 5.0, 0.1  # the first look waits so long until every stage has a peer


@contextmanager
def look(file: RunFile, who: Joining) -> Iterator[Callable[[], RunView]]:
    """Yield a function that returns the current view of the run. The process only watches, and no peer waits for it.

    Raises:
        ValueError: the run is not trained in stages.
        NoSwarm: no initial peer answers.
    """
    size = require_stages(file)
    config, count = training_config(file), file.stages.count
    presence = network_loop.run(WatchPresence.enter(file.run.name, count, who.membership(), config))

    async def until_known() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                while presence.watch.view().moment is None:
                    await asyncio.sleep(_LOOK_S)

    async def see() -> RunView:
        records = [presence.watch.records(stage) for stage in range(count)]
        return view_of(file.run.name, size, records)

    try:
        network_loop.run(until_known())
        yield lambda: network_loop.run(see())
    finally:
        network_loop.run(presence.leave())


def view_of(run: str, num_micro_batches: int, records: Sequence[Sequence[Progress]]) -> RunView:
    """Return the view of a run. ``records``: those of each stage's peers. The least complete stage sets ``samples``."""
    found = RunStages.of(records)
    size = found.num_micro_batches or num_micro_batches
    moments = [max(peer.moment for peer in peers) for peers in found.stages if peers]
    moment = min(moments, default=Moment(0, 0))
    stages = tuple(_stage_view(index, peers, size) for index, peers in enumerate(found.stages))
    done = min((_samples_of(stage, moment, size) for stage in stages), default=0)
    speed = min((stage.micro_batches_per_s for stage in stages), default=0.0)
    everybody = list(chain.from_iterable(records))
    held_out = shown_losses(moment, records[-1])
    return RunView(
        run,
        moment.step,
        mean_loss(records[-1]),
        done,
        size,
        (size - done) / speed if speed else None,
        sum(record.bytes_sent for record in everybody),
        sum(record.bytes_received for record in everybody),
        tuple(map(_peer_view, chain.from_iterable(stage.peers for stage in stages))),
        rollbacks=moment.rollbacks,
        stages=stages,
        held_out=shown_loss(held_out.newest),
        best_held_out=shown_loss(held_out.best),
        has_ended=found.has_ended,
    )


def _stage_view(index: int, members: Sequence[StageMember], size: int) -> StageView:
    moment = max((peer.moment for peer in members), default=Moment(0, 0))
    here = [peer for peer in members if peer.moment == moment]
    done = frozenset[int]().union(*(from_bits(peer.bits, size) for peer in here))
    return StageView(
        index,
        moment.step,
        moment.rollbacks,
        len(done),
        any(peer.holds for peer in here),
        sum(peer.samples_per_s for peer in members),
        tuple(
            StagePeerView(
                peer.peer_id,
                peer.moment.step,
                peer.moment.rollbacks,
                len(from_bits(peer.bits, size)),
                peer.holds,
                peer.samples_per_s,
                peer.next_stage,
            )
            for peer in members
        ),
    )


def _peer_view(peer: StagePeerView) -> PeerView:
    return PeerView(peer.peer_id, "", peer.micro_batches, peer.micro_batches_per_s)


def _samples_of(stage: StageView, moment: Moment, size: int) -> int:
    is_past = stage.holds or (bool(stage.peers) and Moment(stage.rollbacks, stage.step) > moment)
    return size if is_past else stage.micro_batches
