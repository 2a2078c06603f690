"""How many servers are counted that announce one address: an identity costs nothing, an address costs something."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable
from hashlib import sha256

from swarm_protocol.dht.records import ServerRecord

# Servers of one machine with many GPUs, or of one household or laboratory behind a router.
MAX_PER_ADDRESS = 32
_IPV6_NETWORK_BITS = 64  # what one household is given


def within_addresses(
    servers: Iterable[ServerRecord],
    preferred: Collection[str] = (),
    salt: bytes = b"",
    most: int = MAX_PER_ADDRESS,
) -> tuple[ServerRecord, ...]:
    """The servers without those beyond ``most`` of one public address, in the same order.

    Of an address, the ``preferred`` are counted first, then those that come first in an order that depends on ``salt``:
    with one that strangers do not know, they cannot make identities that come before others. A server counts at each
    address that it announces, so that a false one beside the true one does not help. Loopback, private and link-local
    addresses are not counted.
    """
    listed = list(servers)
    places = {server.peer_id: hosts_of(server) for server in listed}
    sizes = Counter(host for hosts in places.values() for host in hosts)
    if max(sizes.values(), default=0) <= most:
        return tuple(listed)

    def order(server: ServerRecord) -> tuple[bool, bytes]:
        return server.peer_id not in preferred, sha256(salt + server.peer_id.encode()).digest()

    counts: Counter[str] = Counter()
    counted = set()
    for server in sorted(listed, key=order):
        hosts = places[server.peer_id]
        if all(counts[host] < most for host in hosts):
            counts.update(hosts)
            counted.add(server.peer_id)
    return tuple(server for server in listed if server.peer_id in counted)


def hosts_of(server: ServerRecord) -> frozenset[str]:
    """The public hosts among its addresses: names, IPv4 addresses, and networks of IPv6."""
    return frozenset(host for address in server.addresses if (host := _public_host(address)))


def _public_host(address: str) -> str:
    """Empty if it is not public."""
    host = address.rpartition(":")[0].strip("[]").lower().rstrip(".")
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "" if host == "localhost" else host
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback or ip.is_private or ip.is_link_local or ip.is_unspecified:
        return ""
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.ip_network(f"{ip}/{_IPV6_NETWORK_BITS}", strict=False))
    return str(ip)
