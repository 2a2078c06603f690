"""Where a server listens, and under which address others reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from swarm_protocol.dht.addresses import tcp_target
from swarm_protocol.errors import NoSwarm
from swarm_protocol.net.hosts import host_port
from swarm_protocol.net.tls import Certificate
from swarm_protocol.process.local_registry import is_loopback
from swarm_protocol.wire.constants import SERVER_OPTIONS
from swarm_server.reach.own_addresses import source_address

LOOPBACK = "127.0.0.1"
_ANY_PORT = 9  # which it is does not matter


def ip_address(host: str) -> str:
    """libp2p listens on addresses only; raises ValueError for a name that does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise ValueError(f"host {host!r} is not known: expected an address of this machine") from None


def listening_host(host: str | None, initial_peers: Sequence[str], registered: Sequence[str] = ()) -> str:
    """The address to listen on: ``host``, else the one of this machine from which the swarm is reached.

    Args:
        initial_peers: multiaddrs of members of the swarm.
        registered: of those on this machine, where there are no ``initial_peers``. Without any, or if they are on the
            loopback, it is the loopback.

    Raises:
        ValueError: ``host`` is not known, or is the loopback, which peers elsewhere cannot reach.
        NoSwarm: no way leads to the initial peers.
    """
    remote = [peer for peer in initial_peers or registered if tcp_target(peer) and not is_loopback(peer)]
    if host is not None:
        address = ip_address(host)
        if ipaddress.ip_address(address).is_loopback and remote and len(remote) == len(initial_peers):
            raise ValueError(
                f"host {host} is for this machine alone, and {remote[0]} is elsewhere: leave --host out, or give an "
                "address that others can reach"
            )
        return address
    reason = ""
    for peer in remote:
        target = tcp_target(peer)
        assert target is not None
        try:
            return source_address(target[0])
        except OSError as error:
            reason = f"no way leads from this machine to {peer}: {error.strerror or error}"
    if initial_peers and len(remote) == len(initial_peers):
        raise NoSwarm(reason)
    return LOOPBACK


@contextmanager
def claimed(host: str, port: int) -> Iterator[None]:
    """Held by a server for its libp2p port: libp2p itself would share the port with another, which breaks both.

    Port 0 is none yet.

    Raises:
        ValueError: the port is in use, or the address is not this machine's.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(socket.AF_UNIX) as claim, socket.socket(family, kind, protocol) as probe:
        try:
            if port:
                claim.bind(f"\0swarm-lm {host} {port}")  # an abstract socket: gone with its process
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a connection that has ended lately
            probe.bind(target)
        except OSError:
            raise ValueError(_cannot_listen(host, port)) from None
        probe.close()
        yield


def _cannot_listen(host: str, port: int) -> str:
    return f"cannot listen on {host_port(host, port)}: the port is in use or the address is not this machine's"


def bind(host: str, port: int, certificate: Certificate) -> tuple[grpc.aio.Server, int]:
    """A gRPC server that is not started yet, and its port; raises ValueError if it cannot listen there.

    Port 0 stands for a free one.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    try:
        bound = server.add_secure_port(host_port(host, port), certificate.server_credentials())
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ValueError(_cannot_listen(host, port))
    return server, bound


def lan_address() -> str:
    """The address of the interface that leads outside, else the loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", _ANY_PORT))  # TEST-NET-1: routed like any outside address
            address: str = probe.getsockname()[0]
        except OSError:
            return LOOPBACK
    return address


def free_port(host: str) -> int:
    """One that nobody uses at this moment."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(target)
        port: int = probe.getsockname()[1]
    return port
