"""The network presence of a stage peer, or of a process that only watches: service, DHT node, channels, threads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.dht.node import Listening
from swarm_protocol.net.hosts import host_port
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import Certificate, ClientCredentials
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.rpc.serving import start_server
from swarm_training.compression.compressor import Compressor, Encoder, Plain
from swarm_training.core.config import TrainingConfig, check_run_name
from swarm_training.core.record import JOINING, Progress
from swarm_training.ledger.crediting import LedgerCredentials
from swarm_training.ledger.orders import Orders
from swarm_training.net.channels import GrpcNetwork
from swarm_training.net.service import TrainingService
from swarm_training.pb.training_pb2_grpc import add_TrainingServicer_to_server
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.run.meetings import Environment, GradientCompression
from swarm_training.run.moderation import Moderation
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.presence import ledger_of, listening_host
from swarm_training.run.standing import now
from swarm_training.run.state import TrainedState
from swarm_training.stages.peer.counting import StepSums
from swarm_training.stages.peer.replicas import Replicas
from swarm_training.stages.peer.run_stages import stage_run
from swarm_training.stages.peer.shared import SharedGradients, Spans
from swarm_training.stages.peer.stage_peer import LOOK_S, OwnStage, StagePeer
from swarm_training.stages.peer.watch import RunWatch

AddServices = Callable[[grpc.aio.Server, StagePeer, GrpcNetwork], None]
_GRACE_S = 0.2
_ORDERS_S = 5.0  # orders stay on the DHT for a minute


@dataclass(frozen=True)
class StageOfRun:
    """The place of a stage in a run. Raises ValueError if there is no such place.

    Attributes:
        index: the number of the stage, from 0 on.
        num_micro_batches: the number of micro-batches in a batch.
    """

    run: str
    index: int
    num_stages: int
    num_micro_batches: int

    def __post_init__(self) -> None:
        check_run_name(self.run)
        if not 0 <= self.index < self.num_stages:
            raise ValueError(
                f"the stage is {self.index}: expected 0 to {self.num_stages - 1}, the number of stages less 1"
            )

    @property
    def runs(self) -> list[str]:
        return [stage_run(self.run, number) for number in range(self.num_stages)]


@dataclass(frozen=True)
class RunMembership:
    """The identity of this process, and where it begins.

    Attributes:
        initial_peers: multiaddrs of members of the run; none: the run begins here.
        access, token: the access control of a private run, and this process's token for it.
    """

    identity: Identity = field(default_factory=Identity.generate)
    initial_peers: Sequence[str] = ()
    access: AccessControl | None = None
    token: bytes = field(default=b"", repr=False)


@dataclass
class StagePresence:
    """A stage peer that takes part in the network.

    Attributes:
        addresses: multiaddrs by which other peers join.
        network: the network for calls of other peers.
    """

    stage_peer: StagePeer
    addresses: list[str]
    network: GrpcNetwork
    _tasks: list[asyncio.Task[None]]
    _resources: AsyncExitStack

    @classmethod
    async def enter(
        cls,
        where: StageOfRun,
        member: RunMembership,
        config: TrainingConfig,
        state: TrainedState,
        sums: StepSums,
        add_services: AddServices = lambda server, peer, network: None,
        compressor: Compressor | None = None,
        encoder: Encoder | None = None,
        shared: Spans = (),
        board: DhtPeerRegistry | None = None,
        look_s: float | None = None,
    ) -> StagePresence:
        """Join the stage, or found it (see ``StagePeer.join``), and return when the peer works.

        ``add_services``: adds services to the server, which other peers reach at the address in this peer's record.
        Before the peer has joined, they must answer with an error. ``shared``: where parameters that the first and the
        last stage both have are in the vector of gradients, see ``spans_of``. ``board``: a board of any run, on a DHT
        node that outlives the peer's presence; None: the peer has a node of its own. ``look_s``: the time to look for
        mates before the peer founds the stage.

        Raises:
            ValueError: nothing can be trained so, or the other peers train another model.
            NoSwarm: no initial peer answered.
            AccessDenied: a moderator has banned this peer.
        """
        if config.counting != "exact" or config.client_mode:
            raise ValueError("a stage peer counts exactly and can be called: expected counting 'exact', no client_mode")
        run, size, access = where.runs[where.index], where.num_micro_batches, member.access
        ledger = await asyncio.to_thread(ledger_of, config, run, size, access)
        host = await asyncio.to_thread(listening_host, config.host, member.initial_peers)
        listening = Listening(host, config.dht_port, config.announce_host)
        async with AsyncExitStack() as resources:
            thread = ThreadPoolExecutor(1, thread_name_prefix="swarm stage")
            resources.callback(thread.shutdown, wait=False, cancel_futures=True)
            if board is None:
                board = await DhtPeerRegistry.join(
                    run, member.initial_peers, member.identity, listening, config.join_timeout_s
                )
                resources.push_async_callback(board.close)
            board = board.beside(run, where.run)
            network = GrpcNetwork(ClientCredentials(member.identity, member.token))
            resources.push_async_callback(network.close)
            record = Progress(
                run,
                member.identity.peer_id,
                state=JOINING,
                target_batch_size=size,
                share=config.share,
                model=state.model_digest,
            )
            peer = TrainingPeer(
                config,
                LedgerCredentials(member.identity, member.token),
                record,
                Environment(network, board, asyncio.to_thread, random.Random()),
                state,
                GradientCompression(compressor or Plain(), encoder),
                None if access is None else Orders(where.run, access),
                ledger,
            )
            boards = {number: board.beside(name) for number, name in enumerate(where.runs) if number != where.index}
            own = {where.index: lambda: [*peer.view().all, *peer.table.heard(now(), {JOINING})]}
            watch = RunWatch(where.runs, network, boards, config.silence_s, random.Random(), own, peer.banned)
            replicas = Replicas(where.index, where.num_stages, peer, watch, network, asyncio.to_thread)
            compute = partial(_call_in, thread)
            other = where.num_stages - 1 - where.index
            tied = SharedGradients(other, shared, peer, watch, network, asyncio.to_thread) if shared else None
            own_stage = OwnStage(where.index, state, sums)
            stage_peer = StagePeer(own_stage, peer, watch, replicas, config.codec, compute, asyncio.to_thread, tied)
            certificate = Certificate.generate()

            def add_all(to: grpc.aio.Server) -> None:
                add_TrainingServicer_to_server(TrainingService(peer, access), to)  # type: ignore[no-untyped-call]
                add_services(to, stage_peer, network)

            server, bound = await start_server(add_all, certificate, host, config.port)
            resources.push_async_callback(server.stop, _GRACE_S)
            peer.listens_at(host_port(config.announce_host or host, bound), certificate.fingerprint)
            tasks = [asyncio.create_task(watch.run())]
            resources.push_async_callback(end_tasks, tasks)
            await stage_peer.join((LOOK_S if member.initial_peers else 0.0) if look_s is None else look_s)
            tasks.append(asyncio.create_task(stage_peer.run()))
            return cls(stage_peer, await board.addresses(), network, tasks, resources.pop_all())

    async def wait(self) -> None:
        """Wait until ``leave``. Raises AccessDenied if a moderator has banned this peer."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():
                task.result()

    async def leave(self) -> None:
        """Leave the run. The sums of this peer are withdrawn: other peers compute them again."""
        await end_tasks(self._tasks)
        await self.stage_peer.peer.leave()
        await self._resources.aclose()


@dataclass
class WatchPresence:
    """The network presence of a process without a stage, such as a trainer; it knows which peers are at which stage.

    Attributes:
        network: the network for calls of those peers.
        board: the board of the first stage, on this process's DHT node.
    """

    watch: RunWatch
    network: GrpcNetwork
    board: DhtPeerRegistry
    _tasks: list[asyncio.Task[None]]

    @classmethod
    async def enter(cls, run: str, num_stages: int, member: RunMembership, config: TrainingConfig) -> WatchPresence:
        """Start to watch. Raises ValueError if there are no initial peers, NoSwarm if none can be reached."""
        if not member.initial_peers:
            raise ValueError("there are no initial peers: expected multiaddrs of peers of the run")
        runs = [stage_run(run, number) for number in range(num_stages)]
        board = await DhtPeerRegistry.join(
            runs[0], member.initial_peers, member.identity, Listening(), config.join_timeout_s
        )
        network = GrpcNetwork(ClientCredentials(member.identity, member.token))
        boards = {number: board.beside(name) for number, name in enumerate(runs)}
        moderation = Moderation(None if member.access is None else Orders(run, member.access))
        watch = RunWatch(runs, network, boards, config.silence_s, random.Random(), banned=moderation.banned)
        tasks = [asyncio.create_task(watch.run())]
        if member.access is not None:
            tasks.append(asyncio.create_task(_follow(moderation, board.beside(runs[0], run))))
        return cls(watch, network, board, tasks)

    async def leave(self) -> None:
        await end_tasks(self._tasks)
        await self.network.close()
        await self.board.close()


async def _follow(moderation: Moderation, board: DhtPeerRegistry) -> None:
    """Follow the orders of moderators until cancelled."""
    while True:
        moderation.take(await board.read_orders())
        await asyncio.sleep(_ORDERS_S)


async def _call_in(thread: ThreadPoolExecutor, function: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(thread, function)
