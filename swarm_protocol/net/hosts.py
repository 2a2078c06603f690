"""Parsing and formatting of hosts and ports."""

from __future__ import annotations

import ipaddress


def split_address(address: str, default_port: int) -> tuple[str, int]:
    """Parse ``HOST`` or ``HOST:PORT`` into host and port; raise ValueError if the text is neither.

    An IPv6 address before a port is in brackets, which are not part of the host.
    """
    if _is_ipv6(address) or _is_ipv6(_without_brackets(address)):
        return _without_brackets(address), default_port
    host, _, port = address.rpartition(":")
    if not host:
        return address, default_port
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


def _without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
