"""Where a server listens, and under which address others reach it."""

from __future__ import annotations

import socket

import grpc

from swarm_protocol.identity import Certificate
from swarm_protocol.wire import SERVER_OPTIONS
from swarm_server.config import ServerConfig


def ip_address(host: str) -> str:
    """libp2p listens on addresses only; raises ValueError for a name that does not resolve."""
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError):
        raise ValueError(f"host {host!r} is not known: expected an address of this machine") from None


def bind(config: ServerConfig, certificate: Certificate) -> tuple[grpc.aio.Server, int]:
    """A gRPC server that is not started yet, and its port; raises ValueError if it cannot listen there."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = server.add_secure_port(f"{host}:{config.port}", certificate.server_credentials())
    except RuntimeError:
        port = 0
    if port == 0:
        raise ValueError(
            f"cannot listen on {host}:{config.port}: the port is in use or the address is not this machine's"
        )
    return server, port


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """Host and port of ``HOST`` or ``HOST:PORT``; raises ValueError if it is neither."""
    host, _, port = address.rpartition(":")
    if not host or address.endswith("]"):
        return address, default_port
    if not port.isdigit():
        raise ValueError(f"address {address!r} is not understood: expected HOST or HOST:PORT")
    return host, int(port)


def announced(config: ServerConfig, port: int) -> str:
    """Where others reach this server."""
    if config.announce_address is not None:
        host, port = split_address(config.announce_address, port)
        return f"{host}:{port}"
    if config.host in ("0.0.0.0", "::"):
        return f"{_lan_address()}:{port}"
    return f"{config.host}:{port}"


def _lan_address() -> str:
    """The address of the interface that leads outside; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: routed like any outside address
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def free_port(host: str) -> int:
    """One that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
