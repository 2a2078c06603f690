"""A peer's network resources (gRPC service, DHT node and channels), which start and close together."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.dht.addresses import tcp_target
from swarm_protocol.dht.node import Listening
from swarm_protocol.net.hosts import host_port
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import Certificate, ClientCredentials
from swarm_training.core.config import TrainingConfig
from swarm_training.core.record import JOINING, Progress
from swarm_training.ledger.archive import KeptLedger
from swarm_training.ledger.crediting import LedgerCredentials
from swarm_training.ledger.ledger import LedgerLimits
from swarm_training.ledger.orders import Orders
from swarm_training.net.channels import GrpcNetwork
from swarm_training.net.service import start_service
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.run.meetings import Environment, GradientCompression
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.state import TrainedState

_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9
_GRACE_S = 0.2


@dataclass
class PeerProcess:
    """A peer of a run with its network resources.

    Attributes:
        addresses: multiaddrs through which other peers can join.
    """

    peer: TrainingPeer
    addresses: list[str]
    _resources: AsyncExitStack

    @classmethod
    async def enter(
        cls,
        run: str,
        target_batch_size: int,
        initial_peers: Sequence[str],
        config: TrainingConfig,
        identity: Identity,
        state: TrainedState,
        compression: GradientCompression,
        access: AccessControl | None,
        token: bytes,
    ) -> PeerProcess:
        """Start the network resources and the peer. Raise the same errors as ``TrainingRun``."""
        ledger = await asyncio.to_thread(ledger_of, config, run, target_batch_size, access)
        host = await asyncio.to_thread(listening_host, config.host, initial_peers)
        listening = Listening(None if config.client_mode else host, config.dht_port, config.announce_host)
        async with AsyncExitStack() as resources:
            board = await DhtPeerRegistry.join(run, initial_peers, identity, listening, config.join_timeout_s)
            resources.push_async_callback(board.close)
            network = GrpcNetwork(ClientCredentials(identity, token))
            resources.push_async_callback(network.close)
            own = Progress(
                run,
                identity.peer_id,
                state=JOINING,
                target_batch_size=target_batch_size,
                share=0.0 if config.client_mode else config.share,
                model=state.model_digest,
            )
            peer = TrainingPeer(
                config,
                LedgerCredentials(identity, token),
                own,
                Environment(network, board, asyncio.to_thread, random.Random()),
                state,
                compression,
                None if access is None else Orders(run, access),
                ledger,
            )
            if not config.client_mode:
                certificate = Certificate.generate()
                server, bound = await start_service(peer, certificate, host, config.port, access)
                resources.push_async_callback(server.stop, _GRACE_S)
                peer.listens_at(host_port(config.announce_host or host, bound), certificate.fingerprint)
            if initial_peers:
                await peer.find_others()
            peer.start()
            addresses = list(initial_peers) if config.client_mode else await board.addresses()
            return cls(peer, addresses, resources.pop_all())

    async def leave(self) -> None:
        await self.peer.leave()
        await self._resources.aclose()


def ledger_of(config: TrainingConfig, run: str, target_batch_size: int, access: AccessControl | None) -> KeptLedger:
    """Return the ledger restored from the configured file, or an empty ledger if there is none."""
    limits, organiser = LedgerLimits.of(target_batch_size), None if access is None else access.swarm_key
    return KeptLedger.open(None if config.ledger is None else Path(config.ledger), run, limits, organiser)


def listening_host(host: str | None, initial_peers: Sequence[str]) -> str:
    """Return ``host``, else this machine's address on the route to an initial peer, else loopback if there are none.

    Raises:
        ValueError: an initial peer is not a multiaddr, or no route leads to any of the initial peers.
    """
    if host is not None:
        return host
    targets = [target for target in map(tcp_target, initial_peers) if target is not None]
    for peer_host, _ in targets:
        family = socket.AF_INET6 if ":" in peer_host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((peer_host, _ANY_PORT))  # UDP: this selects a route and sends nothing
                return str(ip_address(probe.getsockname()[0]))
        except OSError:
            continue
    if targets:
        raise ValueError(f"no way leads to {initial_peers[0]}: expected an address that can be reached")
    return _LOOPBACK
