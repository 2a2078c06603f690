"""Addresses of DHT nodes: how they are written, and whether somebody answers there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from swarm_protocol.errors import NoSwarm
from swarm_protocol.hivemind_parts import Multiaddr

CONNECT_TIMEOUT_S = 3.0


def multiaddr(host: str, port: int) -> str:
    """The TCP multiaddr of a host name or IP address."""
    if re.fullmatch(r"[\d.]+", host):
        return f"/ip4/{host}/tcp/{port}"
    return f"/ip6/{host.strip('[]')}/tcp/{port}" if ":" in host else f"/dns4/{host}/tcp/{port}"


async def require_answer(initial_peers: Sequence[str]) -> None:
    """Tries a plain TCP connection to every peer: a dead address is found at once, and said clearly."""
    targets = [tcp_target(peer) for peer in initial_peers]
    attempts = [connects(*target) for target in targets if target is not None]
    if attempts and len(attempts) == len(targets) and not any(await asyncio.gather(*attempts)):
        raise NoSwarm(f"no initial peer answered: {', '.join(initial_peers)}")


def tcp_target(peer: str) -> tuple[str, int] | None:
    """Host and port of a TCP multiaddr; None for other transports, which only libp2p can try.

    Raises:
        ValueError: it is no multiaddr with a peer id.
    """
    try:
        Multiaddr(peer)
        if not re.search(r"/p2p/[^/]+$", peer):
            raise ValueError("no peer id")
    except ValueError:
        raise ValueError(
            f"initial peer {peer!r} is no multiaddr of a peer: expected /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID, "
            "as a server prints it after `peer=`"
        ) from None
    match = re.match(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)/p2p/[^/]+$", peer)
    return (match[1], int(match[2])) if match else None


async def connects(host: str, port: int) -> bool:
    """Whether somebody accepts a TCP connection there."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_TIMEOUT_S)
    except (OSError, UnicodeError, asyncio.TimeoutError):  # UnicodeError: no possible host name
        return False
    writer.close()
    return True
