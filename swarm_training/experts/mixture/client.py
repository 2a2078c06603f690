"""The client that layers of a process share: a DHT node that only reads, and channels to servers of experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.access.tokens import Role
from swarm_protocol.dht.addresses import check_peer
from swarm_protocol.dht.node import Listening
from swarm_protocol.failures import Closing
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.process import network_loop
from swarm_training.experts.directory.board import DhtExpertRegistry, DhtNodeOfExperts
from swarm_training.experts.net.calls import GrpcCalls


class ExpertClient(Closing):
    """The client of any number of layers, a context manager; it works on the network loop of this process."""

    def __init__(self, initial_peers: Sequence[str], *, membership: Path | None = None) -> None:
        """Join the DHT of the experts.

        Args:
            initial_peers: multiaddrs of servers of experts, or of other members of their DHT.
            membership: the membership file of a private swarm, from its organiser; the environment variable
                SWARM_MEMBERSHIP may have its content instead. The client role allows forward passes, the trainer role
                training too. Only members are accepted as servers then.

        Raises:
            ValueError: there are no initial peers, one is no multiaddr with a peer id, or the membership is unusable.
            NoSwarm: no initial peer answered.
        """
        if isinstance(initial_peers, str) or not initial_peers:
            raise ValueError("initial_peers: expected a list of at least one multiaddr, which servers print")
        for peer in initial_peers:
            check_peer(peer)
        access = SwarmAccess.of(Role.CLIENT, membership)
        self.calls = GrpcCalls(ClientCredentials(access.identity, access.token))
        self._dht = network_loop.run(DhtNodeOfExperts.join(initial_peers, access, Listening()))

    def board(self, name: str, grid: Sequence[int], hidden: int) -> DhtExpertRegistry:
        return DhtExpertRegistry(self._dht, name, grid, hidden)

    def close(self) -> None:
        network_loop.run(self._close())

    async def _close(self) -> None:
        await self.calls.close()
        await self._dht.close()
