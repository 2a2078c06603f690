"""Decides: which members are asked to relay, and which of those that would are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from swarm_protocol.dht.addresses import tcp_target
from swarm_protocol.net.ip_networks import parse_host

WANTED = 2  # relays, so that one is there while another is looked for
MOST_ASKED = 4  # at a time


def candidates(
    offered: Iterable[str], members: Iterable[str], own_id: str, known: Collection[str], failed: Mapping[str, float]
) -> list[str]:
    """Multiaddrs of members to ask next, no peer twice, without those that relay already (``known``, ids).

    Those come first that say in their records that they relay (``offered``), and among equals those that anybody can
    reach; those that ``failed`` (ids, with when) come last, the longest ago first.
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
    """The nearest of those that would relay."""
    return sorted(rtts_s, key=rtts_s.__getitem__)[:wanted]


def is_unreachable(said: Sequence[Collection[str]], addresses: Sequence[str]) -> bool:
    """Whether some member reaches none of the addresses; ``said``: of each that was asked, those that it reached.

    One is enough: those for whom a server can be reached are not hindered by a relay that is not needed.
    """
    return _num_failed(said, addresses) > 0


def serves_others(said: Sequence[Collection[str]], addresses: Sequence[str], served: bool) -> bool:
    """Whether a server that others reach at the addresses, as ``said``, should store and relay for them.

    Who does (``served``) goes on unless most do not reach it: one of them may be wrong or lie, and newcomers may know
    no other server. Who does not begins when all reach it.
    """
    num_failed = _num_failed(said, addresses)
    return 2 * num_failed <= len(said) if served else num_failed == 0


def _num_failed(said: Sequence[Collection[str]], addresses: Sequence[str]) -> int:
    return sum(not set(reached) & set(addresses) for reached in said)


def _host(address: str) -> str | None:
    try:
        target = tcp_target(address)
    except ValueError:  # strangers write records
        return None
    return None if target is None else target[0]


def _is_public(address: str) -> bool:
    ip = parse_host(_host(address) or "")
    return ip is None or ip.is_global
