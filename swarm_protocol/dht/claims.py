"""What is believed of records that strangers can write as many of as they like: how many of one address, and which
models there are.

An identity costs nothing, an address costs something: so few servers of one public address are counted.

The list of models has signed entries, one for a server: its record, under a key of the list. The list has a few keys,
two of which a model uses, so that it can be read at once however many servers there are. Of a model's servers only
those few write whose peer ids hash lowest; but if some entry of the model contradicts, all do. So the list says what
most of a model's servers say, as far as there is room, and who would say otherwise needs more identities than the model
has servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import lru_cache
from hashlib import sha256

from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_protocol.net.ip_networks import customer_of, parse_host

# Servers of one machine with many GPUs, or of one household or laboratory behind a router.
MAX_PER_ADDRESS = 32
NUM_SHARDS = 8  # keys of the list
WRITERS = 8  # servers of a model
MAX_MODELS = 100  # those of most servers; each is looked at by who shows all
_SHARDS_PER_MODEL = 2


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


@lru_cache(maxsize=1 << 15)  # every choice of a chain looks at all servers
def _public_host(address: str) -> str:
    """Empty if it is not public. Servers behind one relay count together, apart from those at the relay's address."""
    if address.startswith("/"):
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
    """The parts of the list in which a model stands."""
    start, apart = sha256(model.encode()).digest()[:2]
    first = start % NUM_SHARDS
    return tuple((first + number * (1 + apart % (NUM_SHARDS - 1))) % NUM_SHARDS for number in range(_SHARDS_PER_MODEL))


def should_write(own: ServerRecord, entries: Iterable[ServerRecord]) -> bool:
    """Whether a server needs to be on the list, beside the ``entries`` that others have there."""
    others = [entry for entry in entries if entry.model == own.model and entry.peer_id != own.peer_id]
    if any(entry.num_blocks != own.num_blocks for entry in others):
        return True
    return sum(_order(entry.peer_id) < _order(own.peer_id) for entry in others) < WRITERS


def models_of(entries: Iterable[ServerRecord]) -> dict[str, int]:
    """Names of models, sorted, with the number of blocks that most of their servers say; ``MAX_MODELS`` at most."""
    says = {entry.peer_id: entry for entry in entries if entry.state is not ServerState.OFFLINE}
    claims = Counter((entry.model, entry.num_blocks) for entry in says.values())
    models: dict[str, int] = {}
    for (model, num_blocks), _ in sorted(claims.items(), key=lambda claim: (-claim[1], claim[0])):
        if len(models) < MAX_MODELS:
            models.setdefault(model, num_blocks)
    return dict(sorted(models.items()))


def _order(peer_id: str) -> bytes:
    return sha256(peer_id.encode()).digest()
