"""The proposal of a group: near servers of the same model that would be faster together than one after the other."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_protocol.net.hosts import host_port, split_address
from swarm_protocol.net.ip_networks import parse_host
from swarm_server.core.config import MOST_MEMBERS
from swarm_server.group.payoff import QUANTS, Payoff

NEAR_S = 1e-3  # the longest round-trip time between members that are proposed
_WORTH_PROPOSING = 1.1  # times one session's speed: less is not worth a restart
_PORT = 31400  # where the leader waits, in the command
_BYTES = 4  # of a number that members exchange
_LAN_BYTES_PER_S = 125e6  # assumed before the bandwidth has been measured
_NETWORKS = [
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7", "fe80::/10")
]


@dataclass(frozen=True)
class GroupProposal:
    """A group that this server could lead.

    Attributes:
        hosts: the addresses of the members, this server's first.
        payoff: what the group gives, by computation.
    """

    hosts: tuple[str, ...]
    payoff: Payoff

    def sentence(self, command: str) -> str:
        """Return the proposal with the command that starts its leader. ``command`` starts this server."""
        own, *others = self.hosts
        return (
            f"a group with {' and '.join(others)} would reach {self.payoff}; to form it, end these servers and type: "
            f"{command} --group-size {len(self.hosts)} --group-listen {host_port(own, _PORT)} --group-key group.key"
        )


def could_lead(own: ServerRecord) -> bool:
    """Return whether this server could lead a group with others: it is in none, and in a private network."""
    return own.members == 1 and own.device == "cpu" and own.quant in QUANTS and _private_network(own) is not None


def near_servers(own: ServerRecord, servers: Sequence[ServerRecord]) -> list[ServerRecord]:
    """Return the servers that could be in a group with ``own``, if the network between them is fast enough.

    They are on other machines in the same private network, serve the same revision, and compute in the same way.
    """

    def fits(server: ServerRecord) -> bool:
        return (
            (server.model, server.revision, server.kind) == (own.model, own.revision, own.kind)
            and server.state is ServerState.ONLINE
            and server.tokens_per_s > 0
            and could_lead(server)
            and _private_network(server) == _private_network(own)
            and _host(server) != _host(own)
        )

    return [server for server in servers if could_lead(own) and server.peer_id != own.peer_id and fits(server)]


def group_proposal(
    own: ServerRecord,
    near: Sequence[ServerRecord],
    rtts_s: Mapping[str, float],
    block_bytes: float,
    hidden_size: int,
) -> GroupProposal | None:
    """Return the group of ``own`` and some of the ``near`` servers that helps one session most; None if none pays.

    Args:
        rtts_s: measured round-trip times by peer id; servers without one, or with a long one, are left out.
        block_bytes: bytes of the weights of a block.
    """
    if not own.tokens_per_s:
        return None
    near = [server for server in near if rtts_s.get(server.peer_id, 1.0) <= NEAR_S]
    link_bytes_per_s = own.network_tokens_per_s * _BYTES * hidden_size or _LAN_BYTES_PER_S
    sending_s = 2 * _BYTES * hidden_size / link_bytes_per_s
    near_rtts_s = tuple(rtts_s[server.peer_id] for server in near)
    rates = tuple(block_bytes * _block_rate(server) for server in (own, *near))
    exchanges_s = tuple(rtt_s + sending_s for rtt_s in near_rtts_s)
    payoff = Payoff(block_bytes, near_rtts_s, exchanges_s, rates, free_bytes=(inf,) * len(rates))
    followers = payoff.best_followers(MOST_MEMBERS - 1)
    payoff = payoff.of(followers)
    if payoff.gain < _WORTH_PROPOSING:
        return None
    return GroupProposal(tuple(map(_host, (own, *(near[follower] for follower in followers)))), payoff)


def _block_rate(server: ServerRecord) -> float:
    """Return through how many blocks the server takes one session per second."""
    return server.tokens_per_s * len(server.span)


def _host(server: ServerRecord) -> str:
    return split_address(server.addresses[0], 0)[0]


def _private_network(server: ServerRecord) -> object | None:
    """Return the private network of the server's first address; None if the address is public, or no IP address."""
    if not server.addresses or server.addresses[0].startswith("/"):  # a circuit through a relay
        return None
    address = parse_host(_host(server))
    return next((network for network in _NETWORKS if address is not None and address in network), None)
