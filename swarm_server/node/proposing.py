"""The proposal of a group: near servers of the same model that would be faster together than one after the other."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.kernels.library import kernel
from swarm_protocol.dht.lan_discovery import LOCAL_NETWORKS
from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_protocol.net.hosts import split_address
from swarm_protocol.net.ip_networks import parse_host
from swarm_server.core.config import MOST_MEMBERS, ServerConfig
from swarm_server.group.payoff import QUANTS, Payoff
from swarm_server.net.network_probe import MeasuredLink
from swarm_server.node.hosting import FollowerFiles

NEAR_S = 1e-3  # the longest round-trip time between members that are proposed
_WORTH_PROPOSING = 1.1  # times one session's speed: less is not worth a restart
_BYTES = 4  # of a number that members exchange
_NETWORKS = [*LOCAL_NETWORKS, ipaddress.ip_network("fe80::/10")]


@dataclass(frozen=True)
class GroupProposal:
    """A group of this server and others.

    Attributes:
        others: the addresses of the other members' machines.
    """

    others: tuple[str, ...]
    payoff: Payoff

    def sentence(self) -> str:
        """Return the proposal, and how to form the group."""
        return (
            f"a group with {' and '.join(self.others)} would reach {self.payoff}; to form it, copy one group.key to "
            "all of these machines, and start each server again with its own flags and --group lab --group-size "
            f"{len(self.others) + 1} --group-key group.key, but without --blocks, --initial-blocks and --num-blocks"
        )


def can_be_in_group(config: ServerConfig, checkpoint: ModelCheckpoint) -> bool:
    """Return whether a server with this configuration could be in a group, and is not started for one already."""
    return not config.is_in_group and kernel() is not None and isinstance(checkpoint.files, FollowerFiles)


def could_join(server: ServerRecord) -> bool:
    """Return whether a server could be in a group: it is in none, in a private network, and has measured its speed."""
    is_measured = server.tokens_per_s != server.forward_tokens_per_s  # --throughput gives both
    return (
        server.members == 1
        and server.device == "cpu"
        and server.quant in QUANTS
        and server.tokens_per_s > 0
        and is_measured
        and _private_network(server) is not None
    )


def near_servers(own: ServerRecord, servers: Sequence[ServerRecord]) -> list[ServerRecord]:
    """Return the servers that could be in a group with ``own``, if the network between them is fast enough.

    They are on other machines in the same private network, serve the same revision, and compute in the same way. Of
    several servers on one machine, only the fastest is returned.
    """

    def fits(server: ServerRecord) -> bool:
        return (
            (server.model, server.revision, server.kind) == (own.model, own.revision, own.kind)
            and server.state is ServerState.ONLINE
            and could_join(server)
            and _private_network(server) == _private_network(own)
            and _host(server) != _host(own)
        )

    if not could_join(own):
        return []
    near = sorted(filter(fits, servers), key=_block_rate)
    return list({_host(server): server for server in near}.values())  # a faster one replaces others of its machine


def group_proposal(
    own: ServerRecord,
    near: Sequence[ServerRecord],
    links: Mapping[str, MeasuredLink],
    block_bytes: float,
    hidden_size: int,
) -> GroupProposal | None:
    """Return the group of ``own`` and some of the ``near`` servers that helps one session most; None if none pays.

    Args:
        links: measured links by peer id; servers without one are left out.
    """
    near = [server for server in near if server.peer_id in links]
    to_near = [links[server.peer_id] for server in near]
    exchanged_bytes = 2 * _BYTES * hidden_size  # about the inputs and outputs of a product, as ``measured`` sends them
    # Bytes of weights per second: a step of one session reads the weights of a block once.
    rates = tuple(block_bytes * _block_rate(server) for server in (own, *near))
    payoff = Payoff(
        block_bytes,
        tuple(link.rtt_s for link in to_near),
        tuple(link.rtt_s + exchanged_bytes / link.bytes_per_s for link in to_near),
        rates,
        free_bytes=(inf,) * len(rates),  # unknown, and not needed for the choice
    )
    followers = payoff.best_followers(MOST_MEMBERS - 1)
    payoff = payoff.of(followers)
    if payoff.gain < _WORTH_PROPOSING:
        return None
    return GroupProposal(tuple(_host(near[follower]) for follower in followers), payoff)


def _block_rate(server: ServerRecord) -> float:
    """Return through how many blocks the server takes one session per second."""
    return server.tokens_per_s * len(server.span)


def _host(server: ServerRecord) -> str:
    return split_address(server.addresses[0], 0)[0]


def _private_network(server: ServerRecord) -> object | None:
    """Return the private network of the server's first address; None if the address is public, or no IP address."""
    if not server.addresses or server.addresses[0].startswith("/"):  # a circuit through a relay
        return None
    try:
        address = parse_host(_host(server))
    except ValueError:  # a stranger may have written the record
        return None
    return next((network for network in _NETWORKS if address is not None and address in network), None)
