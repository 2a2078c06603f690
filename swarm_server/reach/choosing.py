"""Decisions about relays: which members are asked to relay, and which of the willing ones are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from swarm_protocol.dht.addresses import tcp_target
from swarm_protocol.net.ip_networks import parse_host

WANTED = 2  # relays: one stays while another is looked for
MOST_ASKED = 4  # members at a time


def candidates(
    offered: Iterable[str], members: Iterable[str], own_id: str, known: Collection[str], failed: Mapping[str, float]
) -> list[str]:
    """Return multiaddrs of members to ask next, no peer twice, without the present relays (``known``, peer ids).

    Members whose records say that they relay (``offered``) come first, and among equals those with a public address.
    Members that ``failed`` (peer ids, with the time) come last, the longest ago first.
    """
    is_offered = dict.fromkeys(offered)
    found: dict[str, str] = {}
    for address in (*is_offered, *members):
        peer_id = address.rpartition("/p2p/")[2]
        if peer_id not in known and peer_id != own_id and _host(address) is not None:
            found.setdefault(peer_id, address)

    def order(entry: tuple[str, str]) -> tuple[float, bool, bool]:
        peer_id, address = entry
        return failed.get(peer_id, 0.0), address not in is_offered, not _is_public(address)

    return [address for _, address in sorted(found.items(), key=order)][:MOST_ASKED]


def best(rtts_s: Mapping[str, float], wanted: int) -> Sequence[str]:
    """Return the nearest of the peers that are willing to relay."""
    return sorted(rtts_s, key=rtts_s.__getitem__)[:wanted]


def is_unreachable(said: Sequence[Collection[str]], addresses: Sequence[str]) -> bool:
    """Return whether some member reaches none of the addresses; ``said`` has the addresses that each member reached.

    One such member is enough: a relay that is not needed does not hinder the members that reach the server.
    """
    return _num_failed(said, addresses) > 0


def serves_others(said: Sequence[Collection[str]], addresses: Sequence[str], served: bool) -> bool:
    """Return whether a server should store and relay for others; ``said`` has the addresses that each member reached.

    A server that already does (``served``) continues unless most members do not reach it. One member may be wrong or
    lie, and newcomers may know no other server. A server that does not yet begins when all reach it.
    """
    num_failed = _num_failed(said, addresses)
    return 2 * num_failed <= len(said) if served else num_failed == 0


def _num_failed(said: Sequence[Collection[str]], addresses: Sequence[str]) -> int:
    return sum(not set(reached) & set(addresses) for reached in said)


def _host(address: str) -> str | None:
    try:
        target = tcp_target(address)
    except ValueError:  # any stranger may have written the record
        return None
    return None if target is None else target[0]


def _is_public(address: str) -> bool:
    ip = parse_host(_host(address) or "")
    return ip is None or ip.is_global
