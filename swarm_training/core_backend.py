"""The backend of the commands, which reaches a run over the network with ``TrainingRun`` itself."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

import torch
from torch import nn

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_protocol.process import network_loop
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.process.scratch import scratch_directory
from swarm_protocol.wire.printable import printable
from swarm_training.commands.looking import peers_of, shown_bans, shown_users, view_of
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.compression.power_sgd import PowerSGD
from swarm_training.contract.backend import Backend, Joining
from swarm_training.contract.views import RunView
from swarm_training.core.config import TrainingConfig
from swarm_training.core.record import Progress
from swarm_training.ledger.collecting import Collector, pull
from swarm_training.ledger.contributions import RoundContributions
from swarm_training.ledger.ledger import LAST, Ledger, LedgerLimits
from swarm_training.ledger.moderation import Moderation
from swarm_training.net.channels import GrpcNetwork
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.run.options import RunOptions
from swarm_training.run.training_run import TrainingRun

_MAX_ASKED = 8  # peers, each of which may lack rounds that other peers have
_logger = logging.getLogger(__name__)


def open_run(who: Joining, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> TrainingRun:
    """Start the run if there are no initial peers, else join it. Raises what ``TrainingRun`` raises."""
    config = dataclasses.replace(who.config, **dataclasses.asdict(who.address), client_mode=who.client_mode)
    if config.checkpoint_every:
        config = dataclasses.replace(config, checkpoint_directory=scratch_directory())
    rank = who.power_sgd_rank
    options = RunOptions(
        identity=who.identity,
        compressor=PowerSGD([each.shape for each in parameters], rank, who.run) if rank else None,
        encoder=ErrorFeedback(codec_of(config.codec)) if who.error_feedback else None,
        access=None if who.organiser is None else AccessControl(who.organiser),
        token=who.token,
        resumed_at=who.resumed_at,
        local=who.local,
        evaluation=who.evaluation,
    )
    return TrainingRun(
        who.run,
        parameters,
        optimizer,
        target_batch_size=who.target_batch_size,
        initial_peers=who.initial_peers,
        config=config,
        options=options,
    )


@contextmanager
def look(who: Joining) -> Iterator[Callable[[], RunView]]:
    """Yield a function that returns the run's present view. It uses a DHT node that only queries, and requests rounds
    of the ledger from peers. No peer waits for this process. Raises NoSwarm if no initial peer answers."""
    ledger = Ledger(who.run, LedgerLimits.of(who.target_batch_size, who.config.max_samples), who.organiser)
    member, resources = who.membership(), AsyncExitStack()
    known: list[Progress] = []
    moderation = Moderation(member.orders(who.run))

    async def see(board: DhtPeerRegistry) -> RunView:
        moderation.take(await board.read_orders())
        # The collector reads the same list.
        known[:] = peers_of(who.run, await board.read(), moderation.banned())
        bans = shown_bans(moderation.bans())
        view = view_of(who.run, who.target_batch_size, tuple(known), bans, who.config.max_samples)
        return dataclasses.replace(view, users=shown_users(ledger.totals()))

    async def keep(data: bytes, round_: RoundContributions) -> bool:
        return ledger.take(data, round_)

    async def start() -> DhtPeerRegistry:
        board, network = await member.connect(who.run, TrainingConfig(), resources)
        collector = Collector(ledger, network, lambda: known, lambda: LAST, keep, asyncio.to_thread, random.Random())
        resources.push_async_callback(end_tasks, [asyncio.create_task(collector.run())])
        return board

    try:
        board = network_loop.run(start())
        yield lambda: network_loop.run(see(board))
    finally:
        network_loop.run(resources.aclose())


def read_ledger(who: Joining) -> Ledger:
    """Return the ledger of all rounds that some of the peers give, with every signature checked here.

    Raises NoSwarm if no initial peer answers, PeerUnavailable if no peer of the run gives its rounds.
    """
    ledger = Ledger(who.run, LedgerLimits.of(who.target_batch_size, who.config.max_samples), who.organiser)

    async def take(data: bytes) -> bool:
        return ledger.add(data) is not None

    async def ask(network: GrpcNetwork, peer: Progress) -> bool:
        try:
            await pull(ledger, lambda request: network.rounds(peer, request), take)
        except (SwarmError, TimeoutError) as error:
            _logger.warning("%s gives no rounds: %s", peer.peer_id, error)
            return False
        except ValueError as error:
            _logger.warning("%s has given a wrong round: %s", peer.peer_id, printable(str(error)))
        return True

    async def ask_some(board: DhtPeerRegistry, network: GrpcNetwork) -> bool:
        peers = [peer for peer in peers_of(who.run, await board.read()) if peer.is_reachable]
        chosen = random.sample(peers, min(len(peers), _MAX_ASKED))
        return any([await ask(network, peer) for peer in chosen])

    async def read() -> None:
        async with AsyncExitStack() as resources:
            board, network = await who.membership().connect(who.run, TrainingConfig(), resources)
            if not await ask_some(board, network):
                raise PeerUnavailable(f"no peer of run {who.run!r} that can be reached has given its rounds")

    network_loop.run(read())
    return ledger


def send_order(who: Joining, order: bytes) -> None:
    """Put an order on the run's DHT, beside this moderator's earlier orders there; members pass the order on.

    Raises NoSwarm if no initial peer answers, PeerUnavailable if none of them keeps the order.
    """

    async def publish() -> None:
        board = await who.membership().join(who.run, TrainingConfig())
        try:
            await board.publish_order(order)
        finally:
            await board.close()

    network_loop.run(publish())


BACKEND = Backend(open_run, look, send_order, read_ledger)
