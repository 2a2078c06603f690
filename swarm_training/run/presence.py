"""A peer's network resources (gRPC service, DHT node and channels), which start and close together."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from swarm_protocol.access.access_control import AccessControl
from swarm_training.core.config import TrainingConfig
from swarm_training.core.record import JOINING, Progress
from swarm_training.ledger.archive import KeptLedger
from swarm_training.ledger.ledger import LedgerLimits
from swarm_training.net.membership import RunMembership, serve
from swarm_training.net.service import TrainingService
from swarm_training.run.meetings import Environment, GradientCompression
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.state import TrainedState


@dataclass
class PeerProcess:
    """A peer of a run with its network resources. ``addresses``: multiaddrs through which other peers can join."""

    peer: TrainingPeer
    addresses: list[str]
    _resources: AsyncExitStack

    @classmethod
    async def enter(
        cls,
        run: str,
        target_batch_size: int,
        member: RunMembership,
        config: TrainingConfig,
        state: TrainedState,
        compression: GradientCompression,
    ) -> PeerProcess:
        """Start the network resources and the peer. Raise the same errors as ``TrainingRun``."""
        ledger = await asyncio.to_thread(ledger_of, config, run, target_batch_size, member.control)
        host = await member.find_host(config)
        async with AsyncExitStack() as resources:
            board, network = await member.connect(run, config, resources, None if config.client_mode else host)
            peer = TrainingPeer(
                config,
                member,
                joining_record(run, target_batch_size, member, config, state),
                Environment(network, board, asyncio.to_thread, random.Random()),
                state,
                compression,
                member.orders(run),
                ledger,
            )
            if not config.client_mode:
                service = TrainingService(peer, member.control)
                peer.listens_at(*await serve(service.add_to, config, host, resources))
            if member.initial_peers:
                await peer.find_others()
            addresses = list(member.initial_peers) if config.client_mode else await board.addresses()
            peer.start()  # last: nothing that fails may leave its tasks behind
            return cls(peer, addresses, resources.pop_all())

    async def leave(self) -> None:
        async with self._resources:  # they close even if leaving fails or is cancelled
            await self.peer.leave()


def joining_record(
    run: str, target_batch_size: int, member: RunMembership, config: TrainingConfig, state: TrainedState
) -> Progress:
    """Return the first record of a peer, which has not joined yet."""
    return Progress(
        run,
        member.identity.peer_id,
        state=JOINING,
        target_batch_size=target_batch_size,
        share=0.0 if config.client_mode else config.share,  # nobody can send parts to a peer in client mode
        model=state.model_digest,
    )


def ledger_of(config: TrainingConfig, run: str, target_batch_size: int, access: AccessControl | None) -> KeptLedger:
    """Return the ledger restored from the configured file, or an empty ledger if there is none."""
    limits = LedgerLimits.of(target_batch_size, config.max_samples)
    organiser = None if access is None else access.swarm_key
    return KeptLedger.open(None if config.ledger is None else Path(config.ledger), run, limits, organiser)
