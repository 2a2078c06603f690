"""Parsing and formatting of hosts and ports, and this machine's address on the way to a host."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

_ANY_PORT = 9  # any port will do, because nothing is sent


def source_address(host: str) -> str:
    """Return this machine's address from which packets go to ``host``, and send nothing. Raise OSError without a route.

    It may wait for the name service.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # of a datagram socket: only the route is looked up
        address: str = probe.getsockname()[0]
    return address


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """Parse ``HOST`` or ``HOST:PORT`` into host and port; raise ValueError if the text is neither.

    An IPv6 address before a port is in brackets, which are not part of the host.
    """
    if _is_ipv6(address) or _is_ipv6(_without_brackets(address)):
        return _without_brackets(address), default_port
    host, _, port = address.rpartition(":")
    if not host:
        return address, default_port
    # More colons without brackets could be an IPv6 address of another form, with or without a port.
    is_clear = ":" not in host or (host.startswith("[") and _is_ipv6(_without_brackets(host)))
    if not port.isdecimal() or not 0 < int(port) < 65536 or not is_clear:
        raise ValueError(
            f"address {address!r} is not understood: expected HOST or HOST:PORT, where a port follows an IPv6 address "
            "in brackets"
        )
    return _without_brackets(host), int(port)


def host_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``; an IPv6 address gets brackets, unless it has them already."""
    host = _without_brackets(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback_host(host: str) -> bool:
    """Return whether ``host`` is a name or address of this machine's loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def called_host(headers: Sequence[str]) -> str:
    """Return the host in a request's only ``Host`` header, which browsers always send; empty if it is not valid."""
    try:
        (header,) = headers
        return split_address(header, 0)[0]
    except ValueError:
        return ""


def _without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
