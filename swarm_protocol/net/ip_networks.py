"""What of an IP address says whose it is."""

from __future__ import annotations

import ipaddress

_IPV6_BITS = 64  # that a provider gives to one customer

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_host(host: str) -> Address | None:
    """An IP address, which may have brackets or a zone; IPv4 inside IPv6 becomes IPv4. None if it is another name."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def customer_of(address: Address) -> str:
    """The address itself, or its /64 network of IPv6, in which one customer has as many addresses as it likes."""
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, _IPV6_BITS), strict=False))
    return str(address)
