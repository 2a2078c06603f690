"""Parsing of IP addresses, and the network that identifies one customer."""

from __future__ import annotations

import ipaddress

_IPV6_BITS = 64  # the prefix that a provider assigns to one customer

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_host(host: str) -> Address | None:
    """Parse an IP address, with or without brackets or zone; map IPv4 in IPv6 to IPv4. Return None for another name."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def customer_of(address: Address) -> str:
    """Return the address, or for IPv6 its /64 network, because one customer can use any address in it."""
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, _IPV6_BITS), strict=False))
    return str(address)
