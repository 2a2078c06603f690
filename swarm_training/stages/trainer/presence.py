"""The network presence of a trainer: no peer calls it; it watches all stages, and is on the roster of trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swarm_protocol.process.routine import end_tasks
from swarm_training.core.config import TrainingConfig
from swarm_training.net.membership import RunMembership
from swarm_training.stages.peer.presence import WatchPresence
from swarm_training.stages.peer.watch import RunWatch, until_end
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.micro_batches import BlockMicroBatches
from swarm_training.stages.trainer.roster import TrainerRoster
from swarm_training.stages.trainer.trainer import RunSource, StepReport, Trainer

_NEWS_S = 1.0  # records on the DHT are some seconds old: by then, the peers' own news is there


async def train(
    run: str,
    num_stages: int,
    member: RunMembership,
    data: BlockMicroBatches,
    config: TrainerConfig,
    on_step: Callable[[StepReport], object] = lambda report: None,
    end: int | None = None,
    join_timeout_s: float = 60.0,
    beside: Callable[[RunWatch], Coroutine[Any, Any, None]] | None = None,
) -> int | None:
    """Train until the run has taken ``end`` steps, or until cancelled; call ``beside`` meanwhile.

    Return None, or the number of steps if the run has ended before, since the loss on held-out data falls no more.

    Raises:
        NoSwarm: no initial peer answered.
        PeerUnavailable: some stage has no peer for ``join_timeout_s``.
        ValueError: there are no initial peers, or the run has another number of micro-batches.
        RequestRejected, AccessDenied, TrainingDiverged: as ``Trainer.train``.
    """
    peer_config = TrainingConfig(counting="exact", join_timeout_s=join_timeout_s)
    watching = await WatchPresence.enter(run, num_stages, member, peer_config)
    watch, tasks = watching.watch, list[asyncio.Future[None]]()
    try:
        roster = TrainerRoster(watching.board.node, run, member.identity)
        run_source = RunSource(run, lambda: watch.view().stages, roster.trainers)
        trainer = Trainer(member.identity.peer_id, run_source, watching.network, data, config, on_step)
        if beside is not None:
            tasks.append(asyncio.ensure_future(beside(watch)))
        return await train_beside(watch, roster, trainer, data.count, end, join_timeout_s)
    finally:
        await end_tasks(tasks)
        await watching.leave()


async def train_beside(
    watch: RunWatch,
    roster: TrainerRoster,
    trainer: Trainer,
    num_micro_batches: int,
    end: int | None,
    join_timeout_s: float,
) -> int | None:
    """Train as ``train`` does, given a watch that runs, and a trainer that uses it and the roster."""
    await roster.enter(await _first_step(watch, num_micro_batches, join_timeout_s))
    staying = asyncio.gather(roster.run(), watch.relay(trainer.look_soon))
    training, ending = asyncio.ensure_future(trainer.train(end)), asyncio.ensure_future(until_end(watch))
    tasks: list[asyncio.Future[Any]] = [training, staying, ending]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            return ending.result()
        if not training.done():
            await staying  # raises: a trainer that is not heard, or does not hear others, must not go on
        await training
        return None
    finally:
        await end_tasks(tasks)
        await roster.leave()


async def _first_step(watch: RunWatch, num_micro_batches: int, timeout_s: float) -> int:
    """Return the run's step, once every stage has a peer."""
    await watch.until_complete(timeout_s)
    await asyncio.sleep(_NEWS_S)
    await watch.until_complete(timeout_s)  # once more, as the news may be that a peer is gone
    view = watch.view()
    if view.num_micro_batches != num_micro_batches:
        raise ValueError(
            f"a batch has {view.num_micro_batches} micro-batches in this run, and {num_micro_batches} here: expected "
            "the same run file"
        )
    assert view.moment is not None
    return view.moment.step
