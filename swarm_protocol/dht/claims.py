"""Limits on records that an attacker can create in any number: servers per address, and the list of models.

An identity is free, but an address has a cost. Therefore only a few servers per public address count.

The list of models has signed entries: the records of servers, under keys of the list. The list has a few keys, and each
model uses two of them, so that one read is enough however many servers there are. Only the few servers of a model whose
peer ids hash lowest write entries. If entries of a model contradict each other, all its servers write. Therefore the
list shows what the majority of a model's servers say, as far as there is room, and an attacker needs more identities
than the model has servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import lru_cache
from hashlib import sha256

from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_protocol.net.ip_networks import customer_of, parse_host

# Enough for one machine with many GPUs, or for one household or laboratory behind a router.
MAX_PER_ADDRESS = 32
NUM_SHARDS = 8  # keys of the list of models
WRITERS = 8  # servers of a model that write entries
MAX_MODELS = 100  # the models with most servers; a client that shows all of them reads each
_SHARDS_PER_MODEL = 2


def within_addresses(
    servers: Iterable[ServerRecord],
    preferred: Collection[str] = (),
    salt: bytes = b"",
    most: int = MAX_PER_ADDRESS,
) -> tuple[ServerRecord, ...]:
    """Return the servers in the same order, without those beyond ``most`` of one public address.

    For each address, the ``preferred`` servers count first, then the others in an order that depends on ``salt``. If
    the salt is secret, attackers cannot choose identities that come first. A server counts at each address that it
    announces, so that a false address beside the true one does not help. Loopback, private and link-local addresses
    are not counted.
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
    """Return the public hosts among the server's addresses: names, IPv4 addresses, and IPv6 networks."""
    return frozenset(host for address in server.addresses if (host := _public_host(address)))


@lru_cache(maxsize=1 << 15)  # each selection of a chain looks at all servers
def _public_host(address: str) -> str:
    """Return the public host of an address; empty if it has none.

    Servers behind one relay count together, but apart from servers at the relay's own address.
    """
    if address.startswith("/"):  # a circuit, which begins with the relay's multiaddr
        relay = address.split("/")[2:3]
        host = _public_host(f"{relay[0]}:1") if relay else ""
        return f"relay {host}" if host else ""
    host = address.rpartition(":")[0].strip("[]").lower().rstrip(".")
    ip = parse_host(host)
    if ip is None:
        return "" if host == "localhost" else host
    return "" if ip.is_loopback or ip.is_private or ip.is_link_local or ip.is_unspecified else customer_of(ip)


# ---------------------------------------------------------------- the list of models


def shards_of(model: str) -> tuple[int, ...]:
    """Return the parts of the list in which a model is listed."""
    start, apart = sha256(model.encode()).digest()[:2]
    first = start % NUM_SHARDS  # the other is at least one and at most NUM_SHARDS - 1 places further: never the same
    return tuple((first + number * (1 + apart % (NUM_SHARDS - 1))) % NUM_SHARDS for number in range(_SHARDS_PER_MODEL))


def should_write(own: ServerRecord, entries: Iterable[ServerRecord]) -> bool:
    """Return whether a server needs its own entry on the list, beside the ``entries`` of other servers."""
    others = [entry for entry in entries if entry.model == own.model and entry.peer_id != own.peer_id]
    if any(entry.num_blocks != own.num_blocks for entry in others):
        return True
    return sum(_order(entry.peer_id) < _order(own.peer_id) for entry in others) < WRITERS


def models_of(entries: Iterable[ServerRecord]) -> dict[str, int]:
    """Return the sorted model names with the block count that most of their servers claim; ``MAX_MODELS`` at most."""
    votes = {entry.peer_id: entry for entry in entries if entry.state is not ServerState.OFFLINE}  # one per server
    claims = Counter((entry.model, entry.num_blocks) for entry in votes.values())
    models: dict[str, int] = {}
    for (model, num_blocks), _ in sorted(claims.items(), key=lambda claim: (-claim[1], claim[0])):
        if len(models) < MAX_MODELS:
            models.setdefault(model, num_blocks)
    return dict(sorted(models.items()))


def _order(peer_id: str) -> bytes:
    return sha256(peer_id.encode()).digest()
