"""The network presence of a stage peer, or of a process that only watches: service, DHT node, channels, threads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import grpc

from swarm_protocol.failures import awaited_on_error
from swarm_protocol.process.routine import end_tasks
from swarm_training.compression.compressor import Plain
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.core.config import TrainingConfig
from swarm_training.core.record import JOINING
from swarm_training.ledger.moderation import Moderation
from swarm_training.net.channels import GrpcNetwork
from swarm_training.net.membership import RunMembership, serve
from swarm_training.net.service import TrainingService
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.run.meetings import Environment, GradientCompression
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.presence import joining_record, ledger_of
from swarm_training.run.standing import now
from swarm_training.stages.peer.replicas import Replicas
from swarm_training.stages.peer.shared import SharedGradients, Spans
from swarm_training.stages.peer.stage_peer import LOOK_S, OwnStage, StagePeer
from swarm_training.stages.peer.watch import RunWatch
from swarm_training.stages.routing.run_stages import stage_run

AddServices = Callable[[grpc.aio.Server, StagePeer, GrpcNetwork], None]
_ORDERS_S = 5.0  # orders stay on the DHT for a minute


@dataclass(frozen=True)
class StageOfRun:
    """The place of a stage in a run."""

    run: str
    index: int  # the number of the stage, from 0 on
    num_stages: int
    num_micro_batches: int  # the number of micro-batches in a batch

    @property
    def runs(self) -> list[str]:
        return [stage_run(self.run, number) for number in range(self.num_stages)]


@dataclass
class StagePresence:
    """A stage peer that takes part in the network."""

    stage_peer: StagePeer
    addresses: list[str]  # multiaddrs by which other peers join
    network: GrpcNetwork  # the network for calls of other peers
    _tasks: list[asyncio.Task[None]]
    _resources: AsyncExitStack

    @classmethod
    async def enter(
        cls,
        where: StageOfRun,
        member: RunMembership,
        config: TrainingConfig,
        stage: OwnStage,
        add_services: AddServices = lambda server, peer, network: None,
        shared: Spans = (),
        board: DhtPeerRegistry | None = None,
        look_s: float | None = None,
        encoder: ErrorFeedback | None = None,
    ) -> StagePresence:
        """Join the stage, or found it (see ``StagePeer.join``), and return when the peer works.

        ``add_services``: adds services to the server, which other peers reach at the address in this peer's record.
        Before the peer has joined, they must answer with an error. ``shared``: where parameters that the first and the
        last stage both have are in the vector of gradients, see ``spans_of``. ``board``: a board of any run, on a DHT
        node that outlives the peer's presence; None: the peer has a node of its own. ``look_s``: the time to look for
        mates before the peer founds the stage. ``encoder``: the memory of what the codec loses, if it has one.

        Raises:
            ValueError: nothing can be trained so, or the other peers train another model.
            NoSwarm: no initial peer answered.
            AccessDenied: a moderator has banned this peer.
            UnreadableState: see ``StagePeer.join``.
        """
        if config.counting != "exact" or config.client_mode:
            raise ValueError("a stage peer counts exactly and can be called: expected counting 'exact', no client_mode")
        run, size = where.runs[where.index], where.num_micro_batches
        ledger = await asyncio.to_thread(ledger_of, config, run, size, member.control)
        host = await member.find_host(config)
        async with AsyncExitStack() as resources:
            thread = ThreadPoolExecutor(1, thread_name_prefix="swarm stage")
            resources.callback(thread.shutdown, wait=False, cancel_futures=True)  # a pass under way may take long
            board, network = await member.connect(run, config, resources, host, board)
            board = board.beside(run, where.run)
            record = joining_record(run, size, member, config, stage.state)
            environment = Environment(network, board, asyncio.to_thread, random.Random())
            compression, orders = GradientCompression(Plain(), encoder), member.orders(where.run)
            peer = TrainingPeer(config, member, record, environment, stage.state, compression, orders, ledger)
            watch = _watch_beside(peer, where, network, board, config.silence_s)
            replicas = Replicas(where.index, where.num_stages, peer, watch, network, asyncio.to_thread)
            compute = partial(asyncio.get_running_loop().run_in_executor, thread)
            other = where.num_stages - 1 - where.index  # of the first and the last stage, which share embeddings
            tied = SharedGradients(other, shared, peer, watch, network, asyncio.to_thread) if shared else None
            stage_peer = StagePeer(stage, peer, watch, replicas, config.codec, compute, asyncio.to_thread, tied)

            def add_all(to: grpc.aio.Server) -> None:
                TrainingService(peer, member.control).add_to(to)
                add_services(to, stage_peer, network)

            peer.listens_at(*await serve(add_all, config, host, resources))
            tasks = [asyncio.create_task(watch.run())]
            resources.push_async_callback(end_tasks, tasks)
            # It has started even if it cannot join or is cancelled: mates must not wait for it, nor its tasks go on.
            async with awaited_on_error(peer.leave):
                await stage_peer.join((LOOK_S if member.initial_peers else 0.0) if look_s is None else look_s)
                addresses = await board.addresses()
            tasks.append(asyncio.create_task(stage_peer.run()))
            return cls(stage_peer, addresses, network, tasks, resources.pop_all())

    async def wait(self) -> None:
        """Wait until ``leave``. Raises AccessDenied or UnreadableState, see ``StagePeer.run``."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()

    async def leave(self) -> None:
        """Leave the run. The sums of this peer are withdrawn: other peers compute them again."""
        async with self._resources:  # they close even if leaving fails or is cancelled
            await end_tasks(self._tasks)
            await self.stage_peer.peer.leave()


def _watch_beside(
    peer: TrainingPeer, where: StageOfRun, network: GrpcNetwork, board: DhtPeerRegistry, silence_s: float
) -> RunWatch:
    """Return a watch of all stages, which takes the records of the peer's own stage from the peer."""
    boards = {number: board.beside(name) for number, name in enumerate(where.runs) if number != where.index}
    own = {where.index: lambda: [*peer.view().all, *peer.table.heard(now(), {JOINING})]}
    return RunWatch(where.runs, network, boards, silence_s, random.Random(), own, peer.banned)


@dataclass
class WatchPresence:
    """The network presence of a process without a stage, such as a trainer; it knows which peers are at which stage."""

    watch: RunWatch
    network: GrpcNetwork  # the network for calls of those peers
    board: DhtPeerRegistry  # the board of the first stage, on this process's DHT node
    _resources: AsyncExitStack

    @classmethod
    async def enter(
        cls,
        run: str,
        num_stages: int,
        member: RunMembership,
        config: TrainingConfig,
        board: DhtPeerRegistry | None = None,
    ) -> WatchPresence:
        """Start to watch; ``board``: as for ``StagePresence``.

        Raises ValueError if there are no initial peers, NoSwarm if none can be reached."""
        if not member.initial_peers:
            raise ValueError("there are no initial peers: expected multiaddrs of peers of the run")
        runs = [stage_run(run, number) for number in range(num_stages)]
        async with AsyncExitStack() as resources:
            board, network = await member.connect(runs[0], config, resources, board=board)
            boards = {number: board.beside(name) for number, name in enumerate(runs)}
            moderation = Moderation(member.orders(run))
            watch = RunWatch(runs, network, boards, config.silence_s, random.Random(), banned=moderation.banned)
            tasks = [asyncio.create_task(watch.run())]
            resources.push_async_callback(end_tasks, tasks)
            if member.control is not None:
                tasks.append(asyncio.create_task(_follow(moderation, board.beside(runs[0], run))))
            return cls(watch, network, board, resources.pop_all())

    async def leave(self) -> None:
        await self._resources.aclose()


async def _follow(moderation: Moderation, board: DhtPeerRegistry) -> None:
    """Follow the orders of moderators until cancelled."""
    while True:
        moderation.take(await board.read_orders())
        await asyncio.sleep(_ORDERS_S)
