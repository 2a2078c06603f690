"""The addresses of this machine, which may change while a server runs."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress

from swarm_protocol.dht.addresses import tcp_target
from swarm_protocol.net.hosts import host_port, source_address, split_address
from swarm_protocol.net.ip_networks import parse_host
from swarm_protocol.process.local_registry import is_loopback

ANY_HOSTS = ("0.0.0.0", "::")
LOOPBACK = "127.0.0.1"
_OUTSIDE = ("192.0.2.1", "2001:db8::1")  # documentation addresses: routed like any outside address


def outside_addresses() -> list[str]:
    """Return the addresses of the interfaces that lead outside, by IPv4 and IPv6; the list may be empty."""
    found = []
    for host in _OUTSIDE:
        with suppress(OSError):
            found.append(source_address(host))
    return found


def every_host() -> str:
    """Return the wildcard host, to listen on all present and future addresses: of both families if possible."""
    return "::" if is_own("::") else "0.0.0.0"


class OwnAddresses:
    """The addresses at which others reach this machine directly.

    Attributes:
        host: the address at which the libp2p daemon listens; it changes when the machine moves.
        grpc_host: the address at which gRPC listens.
        port: the port of gRPC; 0 before it is known.
    """

    def __init__(self, host: str, announce_address: str | None, is_chosen: bool, joined_through: Sequence[str]) -> None:
        """Create the addresses; ``is_chosen`` means that the host was not given, but found as the way to the swarm.

        ``joined_through`` are multiaddrs of members, given or found; empty if there was no swarm.
        """
        self.host, self.port = host, 0
        self._announce_address = announce_address
        self._is_local = (ip := parse_host(host)) is not None and ip.is_loopback
        self._follows = is_chosen and not self._is_local
        self._joined_through = joined_through
        self.grpc_host = every_host() if self._follows else host

    def use_port(self, port: int) -> None:
        """Note the port at which gRPC listens."""
        self.port = port

    def move(self, host: str) -> None:
        """Note the present address of this machine."""
        self.host = host

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach the server."""
        return self._is_local and self._announce_address is None

    @property
    def announced_host(self) -> str | None:
        return None if self._announce_address is None else split_address(self._announce_address, self.port)[0]

    def direct(self) -> tuple[str, ...]:
        """Return ``HOST:PORT`` addresses of gRPC, the best first."""
        if self._announce_address is not None:
            return (host_port(*split_address(self._announce_address, self.port)),)
        return tuple(host_port(host, self.port) for host in self.hosts())

    def hosts(self) -> list[str]:
        """Return the hosts at which others reach this machine directly, the best first."""
        if self.announced_host is not None:
            return [self.announced_host]
        hosts = {} if self.host in ANY_HOSTS else {":" in self.host: self.host}  # by family
        if self.grpc_host in ANY_HOSTS:
            for other in outside_addresses():
                if self.grpc_host == "::" or ":" not in other:
                    hosts.setdefault(":" in other, other)
        return list(hosts.values()) or [LOOPBACK]

    def moved(self) -> str | None:
        """Return the address that now leads to the swarm if the present one no longer does, else None.

        The result is also None while there is no route. Names are looked up, which may take seconds.
        """
        if not self._follows:
            return None
        targets = [target for peer in self._joined_through if not is_loopback(peer) and (target := tcp_target(peer))]
        if not targets and is_own(self.host):
            return None  # others may have joined through this address
        ways = []
        for host in [target[0] for target in targets] or _OUTSIDE:
            with suppress(OSError):
                ways.append(source_address(host))
            if self.host in ways:
                return None
        return next(iter(ways), None)


def is_own(host: str) -> bool:
    """Return whether ``host`` is an address of this machine at present."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
