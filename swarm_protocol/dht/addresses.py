"""Addresses of DHT nodes and servers: their format, and whether a peer answers there.

The checks need neither libp2p nor hivemind, which take long to import.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Sequence

from swarm_protocol.errors import NoSwarm

CONNECT_TIMEOUT_S = 3.0
_HOSTS = "ip4|ip6|ip6zone|dns|dns4|dns6|dnsaddr|p2p"
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def multiaddr(host: str, port: int) -> str:
    """Return the TCP multiaddr of a host name or IP address."""
    if re.fullmatch(r"[\d.]+", host):
        return f"/ip4/{host}/tcp/{port}"
    return f"/ip6/{host.strip('[]')}/tcp/{port}" if ":" in host else f"/dns4/{host}/tcp/{port}"


async def require_answer(initial_peers: Sequence[str]) -> None:
    """Try a plain TCP connection to every peer, so that dead addresses are found at once; raise NoSwarm if all fail.

    A peer with another transport may answer, and only libp2p can try that.
    """
    targets = [target for target in map(tcp_target, initial_peers) if target is not None]
    if len(targets) < len(initial_peers):
        return
    if not any(await asyncio.gather(*(connects(*target) for target in targets))):
        raise NoSwarm(f"no initial peer answered: {', '.join(initial_peers)}")


def tcp_target(peer: str) -> tuple[str, int] | None:
    """Return host and port of a TCP multiaddr; None for other transports, which only libp2p can try.

    Raises:
        ValueError: the text is no multiaddr with a peer id.
    """
    check_peer(peer)
    match = re.match(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)/p2p/[^/]+$", peer)
    return (match[1], int(match[2])) if match else None


def check_peer(peer: str) -> None:
    """Raise ValueError if the text cannot be the multiaddr of a peer."""
    match = re.fullmatch(rf"/(?:{_HOSTS})(?:/[^/\s]+)+/p2p/([{_BASE58}]+)", peer)
    is_right = match is not None and _is_peer_id(match[1])
    for protocol, value in re.findall(r"/(ip4|ip6|tcp|udp)/([^/]+)", peer):
        try:
            if protocol in ("tcp", "udp"):
                is_right &= 0 <= int(value) < 65536
            else:
                is_right &= ipaddress.ip_address(value.partition("%")[0]).version == int(protocol[-1])
        except ValueError:
            is_right = False
    if not is_right:
        raise ValueError(
            f"initial peer {peer!r} is no multiaddr of a peer: expected /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID, "
            "as a server prints it after `peer=`"
        )


def _is_peer_id(text: str) -> bool:
    """Return whether the text is base58 of a key's multihash, or of a short key (libp2p specification "Peer Ids")."""
    number = 0
    for letter in text:
        number = number * 58 + _BASE58.index(letter)
    # In base58, each leading 1 is a zero byte.
    data = bytes(len(text) - len(text.lstrip("1"))) + number.to_bytes((number.bit_length() + 7) // 8, "big")
    return len(data) > 2 and data[0] in (0x00, 0x12) and data[1] == len(data) - 2  # 0x00: identity, 0x12: SHA-256


async def connects(host: str, port: int) -> bool:
    """Return whether a TCP connection to this address succeeds."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (TimeoutError, OSError, UnicodeError):  # UnicodeError: not a possible host name
        return False
    writer.close()
    return True
