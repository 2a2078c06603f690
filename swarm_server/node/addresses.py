"""The address that a server listens on, and the address under which others reach it."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from swarm_protocol.dht.addresses import tcp_target
from swarm_protocol.errors import NoSwarm
from swarm_protocol.file_lock import try_lock
from swarm_protocol.net.hosts import source_address
from swarm_protocol.process.local_registry import is_loopback
from swarm_protocol.rpc.serving import cannot_listen
from swarm_server.reach.own_addresses import LOOPBACK, outside_addresses


def ip_address(host: str) -> str:
    """Return the IP address of ``host``, which libp2p needs. Raise ValueError for a name that does not resolve."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        raise ValueError(f"host {host!r} is not known: expected an address of this machine") from None


def listening_host(host: str | None, initial_peers: Sequence[str], registered: Sequence[str] = ()) -> str:
    """Return the address to listen on: ``host``, else the address of this machine from which it reaches the swarm.

    Args:
        registered: multiaddrs of members on this machine, used if there are no ``initial_peers``. Without any, or if
            all are on the loopback, the result is the loopback.

    Raises:
        ValueError: ``host`` is not known, or is the loopback, which peers elsewhere cannot reach.
        NoSwarm: this machine has no route to the initial peers.
    """
    remote = [peer for peer in initial_peers or registered if tcp_target(peer) and not is_loopback(peer)]
    all_are_remote = bool(initial_peers) and len(remote) == len(initial_peers)
    if host is not None:
        address = ip_address(host)
        if all_are_remote and ipaddress.ip_address(address).is_loopback:
            raise ValueError(
                f"host {host} is for this machine alone, and {remote[0]} is elsewhere: leave --host out, or give an "
                "address that others can reach"
            )
        return address
    address, reason = _way_to(remote)
    if not address and all_are_remote:
        raise NoSwarm(reason)
    return address or LOOPBACK


def _way_to(peers: Sequence[str]) -> tuple[str, str]:
    """Return the address from which this machine reaches the first reachable peer, or "" and the reason for none."""
    reason = ""
    for peer in peers:
        target = tcp_target(peer)
        assert target is not None
        try:
            return source_address(target[0]), ""
        except OSError as error:
            reason = f"there is no route from this machine to {peer}: {error.strerror or error}"
    return "", reason


@contextmanager
def claimed(host: str, port: int) -> Iterator[None]:
    """Hold a server's libp2p port, because libp2p itself would share the port with another server, which breaks both.

    Port 0 means that no port is chosen yet.

    Raises:
        ValueError: the port is in use, or the address is not this machine's.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with ExitStack() as claim, socket.socket(family, kind, protocol) as probe:
        try:
            if port:
                claim.enter_context(_name_taken(f"swarm-lm {host} {port}"))
            if os.name == "posix":  # on Windows, this would take a port from another program
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also a port whose connection just ended
            probe.bind(target)
        except OSError:
            raise ValueError(cannot_listen(host, port)) from None
        probe.close()
        yield


def _name_taken(name: str) -> AbstractContextManager[object]:
    """Take a name on this machine, and return the context that holds it. Outside Linux, each user has own names.

    Raises:
        OSError: another process has taken the name.
    """
    if sys.platform == "linux":
        named = socket.socket(socket.AF_UNIX)
        try:
            named.bind(f"\0{name}")  # an abstract socket: the kernel removes it with its process
        except OSError:
            named.close()
            raise
        return named
    path = Path(tempfile.gettempdir(), re.sub(r"\W+", "-", name) + ".lock")
    file = open(path, "w")  # noqa: SIM115  (the caller closes it, which releases the lock)
    if try_lock(file):
        return file
    file.close()
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def lan_address() -> str:
    """Return the IPv4 address of the interface that leads outside, else the loopback."""
    return next((address for address in outside_addresses() if ":" not in address), LOOPBACK)


def free_port(host: str) -> int:
    """Return a port that nobody uses at this moment."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(target)
        port: int = probe.getsockname()[1]
    return port
