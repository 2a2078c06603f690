"""The entrance of a process into a run: its DHT node, its calls to other peers, and the service that they call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import grpc

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.dht.addresses import tcp_target
from swarm_protocol.dht.node import Listening
from swarm_protocol.net.hosts import host_port, source_address
from swarm_protocol.net.tls import Certificate, ClientCredentials
from swarm_protocol.rpc.serving import start_server
from swarm_training.core.config import TrainingConfig
from swarm_training.ledger.orders import Orders
from swarm_training.net.channels import GrpcNetwork
from swarm_training.progress.board import DhtPeerRegistry

_LOOPBACK = "127.0.0.1"
_GRACE_S = 0.2  # for calls that are under way when the server stops


@dataclass(frozen=True)
class RunMembership(SwarmAccess):
    """The identity and rights with which a process enters a run, and the members through which it does.
    ``initial_peers``: multiaddrs of members of the run; none: the run begins here."""

    initial_peers: Sequence[str] = ()

    async def find_host(self, config: TrainingConfig) -> str:
        """Return the host to listen on, see ``listening_host``."""
        return await asyncio.to_thread(listening_host, config.host, self.initial_peers)

    async def join(self, run: str, config: TrainingConfig, host: str | None = None) -> DhtPeerRegistry:
        """Join the run's DHT, as ``DhtPeerRegistry.join``. Without ``host``, the node only queries."""
        listening = Listening(host, config.dht_port, config.announce_host)
        return await DhtPeerRegistry.join(run, self.initial_peers, self.identity, listening, config.join_timeout_s)

    def network(self) -> GrpcNetwork:
        return GrpcNetwork(ClientCredentials(self.identity, self.token))

    async def connect(
        self,
        run: str,
        config: TrainingConfig,
        resources: AsyncExitStack,
        host: str | None = None,
        board: DhtPeerRegistry | None = None,
    ) -> tuple[DhtPeerRegistry, GrpcNetwork]:
        """Join as ``join`` does, or use a given ``board``. Return the board and the network. ``resources`` closes the
        network and then the board, but leaves a given board open."""
        if board is None:
            board = await self.join(run, config, host)
            resources.push_async_callback(board.close)
        network = self.network()
        resources.push_async_callback(network.close)
        return board, network

    def orders(self, run: str) -> Orders | None:
        """Return a registry of the moderators' orders; None in a run without an organiser."""
        return None if self.control is None else Orders(run, self.control)


async def serve(
    add_services: Callable[[grpc.aio.Server], None], config: TrainingConfig, host: str, resources: AsyncExitStack
) -> tuple[str, bytes]:
    """Start a server that stops with ``resources``. Return its address for other peers, and its TLS fingerprint. Raise
    ValueError if listening on the address fails."""
    certificate = Certificate.generate()
    server, bound = await start_server(add_services, certificate, host, config.port)
    resources.push_async_callback(server.stop, _GRACE_S)
    return host_port(config.announce_host or host, bound), certificate.fingerprint


def listening_host(host: str | None, initial_peers: Sequence[str]) -> str:
    """Return ``host``, else this machine's address on the route to an initial peer, else loopback if there are none.
    Raise ValueError if an initial peer is not a multiaddr, or no route leads to any of the initial peers."""
    if host is not None:
        return host
    targets = [target for target in map(tcp_target, initial_peers) if target is not None]
    for peer_host, _ in targets:
        with suppress(OSError):
            return source_address(peer_host)
    if targets:
        raise ValueError(f"no route leads to {initial_peers[0]}: expected an address that can be reached")
    return _LOOPBACK
