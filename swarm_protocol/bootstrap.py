"""How a DHT node that runs already comes to know others: those it knew may be gone, or it may have been alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from swarm_protocol.dht_addresses import connects, tcp_target
from swarm_protocol.hivemind_parts import ControlFailure, DHTNode, Multiaddr, P2PDaemonError, PeerID

_CONNECT_TIMEOUT_S = 3.0
_BACKOFF_S = 6.0  # libp2p does not dial an address again for 5 s, or more, after it has failed
_RETRY_S = 0.25
_SEARCH_TIMEOUT_S = 3.0


async def bootstrap(node: DHTNode, addresses: Sequence[str]) -> bool:
    """Makes the node and those at the addresses known to one another; returns whether one of them answered.

    Addresses are full multiaddrs, with peer ids.
    """
    answers = await asyncio.gather(*(_meets(node, address) for address in dict.fromkeys(addresses)))
    if any(answers):  # as hivemind does when a node starts: who is near to it stores what is near to it
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(node.find_nearest_nodes([node.node_id]), _SEARCH_TIMEOUT_S)
    return any(answers)


async def _meets(node: DHTNode, address: str) -> bool:
    transport, _, name = address.rpartition("/p2p/")
    peer, target = PeerID.from_base58(name), tcp_target(address)
    # A plain connection first: one that fails makes libp2p wait, longer each time, before it dials again.
    if peer == node.peer_id or (target is not None and not await connects(*target)):
        return False
    try:
        connecting = _connect(node, peer, Multiaddr(transport))
        await asyncio.wait_for(connecting, _BACKOFF_S + _CONNECT_TIMEOUT_S)
    # The daemon says that it is somebody else, or does not answer itself.
    except (ControlFailure, P2PDaemonError, OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
        return False
    node.blacklist.register_success(peer)  # it may be back after a silence
    return await node.protocol.call_ping(peer) is not None


async def _connect(node: DHTNode, peer: PeerID, transport: Multiaddr) -> None:
    while True:
        try:
            return await node.p2p._client.connect(peer, [transport])
        except ControlFailure as error:
            if "dial backoff" not in str(error):
                raise
        await asyncio.sleep(_RETRY_S)
