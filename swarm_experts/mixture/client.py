"""What the layers of a process share: a node of the DHT that only asks, and channels to servers of experts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from swarm_experts.core.access import Access
from swarm_experts.core.config import MixtureConfig
from swarm_experts.directory.board import Board, DhtBoard, DhtNodeOfExperts
from swarm_experts.directory.directory import Directory
from swarm_experts.mixture.dispatch import Dispatcher
from swarm_experts.net.calls import ExpertCalls, GrpcCalls
from swarm_protocol.access.tokens import Role
from swarm_protocol.dht.addresses import check_peer
from swarm_protocol.dht.node import Listening
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.process import network_loop


class Network(Protocol):
    """What a layer needs of a client."""

    @property
    def calls(self) -> ExpertCalls: ...

    def board(self, name: str, grid: Sequence[int], hidden: int) -> Board: ...


class ExpertClient:
    """A context manager, for any number of layers; it works on the network loop of this process."""

    def __init__(
        self, initial_peers: Sequence[str], identity: Identity | None = None, *, membership: Path | None = None
    ) -> None:
        """
        Args:
            initial_peers: multiaddrs of servers of experts, or other members of their DHT.
            membership: file of a private swarm, from its organiser; or the environment variable SWARM_MEMBERSHIP has
                its content. The role of a client computes experts, that of a trainer trains them. Only members are
                taken for servers then.

        Raises:
            ValueError: one of them is no multiaddr with a peer id, or there are none; or the membership cannot be used.
            NoSwarm: none of them answered.
        """
        if isinstance(initial_peers, str) or not initial_peers:
            raise ValueError("initial_peers: expected a list of at least one multiaddr, which servers print")
        for peer in initial_peers:
            check_peer(peer)
        access = Access.of(Role.CLIENT, identity, membership)
        self.calls: ExpertCalls = GrpcCalls(ClientCredentials(access.identity, access.token))
        self._dht = network_loop.run(DhtNodeOfExperts.join(initial_peers, access, Listening()))

    def board(self, name: str, grid: Sequence[int], hidden: int) -> Board:
        return DhtBoard(self._dht, name, grid, hidden)

    def close(self) -> None:
        network_loop.run(self._close())

    async def _close(self) -> None:
        await self.calls.close()
        await self._dht.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def dispatcher(
    network: Network, name: str, grid: Sequence[int], hidden: int, k: int, config: MixtureConfig
) -> Dispatcher:
    """That of one layer."""
    board = network.board(name, grid, hidden)
    directory = Directory(board, config.refresh_s, config.ban_s, time.monotonic)
    return Dispatcher(name, hidden, k, directory, network.calls, config)
