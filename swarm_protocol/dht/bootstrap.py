"""The bootstrap of a DHT node: it meets peers when it joins, and again later if it has lost all of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from swarm_protocol.dht import node as dht_node
from swarm_protocol.dht.addresses import CONNECT_TIMEOUT_S, connects, require_answer, tcp_target
from swarm_protocol.dht.node import Listening
from swarm_protocol.errors import JoinRefused, NoSwarm
from swarm_protocol.failures import awaited_on_error
from swarm_protocol.net.hivemind_parts import (
    DAEMON_ERRORS,
    MAX_DHT_TIME_DISCREPANCY_SECONDS,
    P2P,
    ControlFailure,
    DHTNode,
    Multiaddr,
    PeerID,
    ValidationError,
)
from swarm_protocol.net.identity import Identity
from swarm_protocol.wire.printable import printable

_BACKOFF_S = 6.0  # libp2p redials an address only 5 s or more after a failure
_RETRY_S = 0.25
_SEARCH_TIMEOUT_S = 3.0
_LONG_PING_S = 8.0  # for a peer that has not answered within hivemind's 3 s


def refused(error: ValidationError) -> JoinRefused:
    """Translate hivemind's reason for refusing this node into an error for the user."""
    clocks = re.search(r"local: ([\d.]+), peer: ([\d.]+)", str(error))  # hivemind has them nowhere but in this text
    if clocks is None:
        return JoinRefused(f"the initial peer refuses this node: {printable(str(error))}")
    offset_s = float(clocks[1]) - float(clocks[2])
    size_s = abs(offset_s)
    size = f"{size_s:.0f} s" if size_s < 120 else f"{size_s / 60:.0f} min"
    where = "ahead of" if offset_s > 0 else "behind"
    return JoinRefused(
        f"the clock of this machine is {size} {where} that of the swarm, and at most "
        f"{MAX_DHT_TIME_DISCREPANCY_SECONDS} s are allowed: set it, or that of the initial peer"
    )


async def bootstrap(node: DHTNode, addresses: Sequence[str], *, joins: bool = False) -> bool:
    """Connect the node and the peers at the addresses to each other; return whether one of the peers answered.

    Addresses are full multiaddrs, with peer ids. If the node ``joins``, the clocks are compared.

    Raises:
        ValidationError: the node joins, and its clock differs from the peer's.
    """
    answers = await asyncio.gather(*(_meets(node, address, joins) for address in dict.fromkeys(addresses)))
    if any(answers):  # as hivemind does at a node's start, because the nodes with the nearest ids store a key
        with suppress(asyncio.TimeoutError):
            async with asyncio.timeout(_SEARCH_TIMEOUT_S):
                await node.find_nearest_nodes([node.node_id])
    return any(answers)


async def rejoin_if_alone(node: DHTNode, initial_peers: Sequence[str]) -> None:
    """Bootstrap the node through its initial peers again if it knows no other node.

    hivemind forgets a peer whose reply comes too late once. Without this, a node that knew only that peer would find
    nothing any more.
    """
    if not node.protocol.routing_table.uid_to_peer_id:
        await bootstrap(node, initial_peers)


async def start_joined(
    identity: Identity,
    listening: Listening,
    initial_peers: Sequence[str],
    timeout_s: float,
    *,
    are_alive: Callable[[], bool] = lambda: False,
    on_wait: Callable[[float], None] = lambda _: None,
    is_reachable: Callable[[P2P], Awaitable[bool]] | None = None,
) -> DHTNode:
    """Start a node and join through the initial peers, or start a new DHT if there are none.

    Peers that exist but do not answer, because they are frozen or busy, are retried for up to ``timeout_s``. A retry
    needs ``are_alive`` to return true, or a libp2p connection to one of the peers. ``on_wait`` is called once, with the
    longest possible wait in seconds. ``is_reachable`` runs before other peers learn of the node. If it returns False,
    the node only queries other peers.

    Raises:
        NoSwarm: no initial peer answered. JoinRefused: a peer answered, but this node may not join.
        ValueError: an initial peer is no multiaddr with a peer id.
    """
    if initial_peers:
        await require_answer(initial_peers)
    node = await dht_node.start(identity, listening)
    async with awaited_on_error(lambda: dht_node.stop(node)):  # nobody else knows the node
        if initial_peers:
            if is_reachable is not None:
                dht_node.set_serving(node, await is_reachable(node.p2p))
            await _join(node, initial_peers, timeout_s, are_alive, on_wait)
    return node


async def _join(
    node: DHTNode,
    initial_peers: Sequence[str],
    timeout_s: float,
    are_alive: Callable[[], bool],
    on_wait: Callable[[float], None],
) -> None:
    """Make the node join the DHT of its initial peers; raise NoSwarm or JoinRefused if it cannot."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    usual_timeout_s = node.protocol.wait_timeout
    try:
        while not await bootstrap(node, initial_peers, joins=True):
            left_s = deadline - clock()
            if left_s < _RETRY_S or not (are_alive() or await _is_connected(node, initial_peers)):
                raise NoSwarm(f"no initial peer answered: {', '.join(initial_peers)}")
            # From the second attempt on, a peer that is busy gets more time for its answer.
            if node.protocol.wait_timeout != _LONG_PING_S:
                node.protocol.wait_timeout = _LONG_PING_S
                on_wait(left_s)
            await asyncio.sleep(_RETRY_S)
    except ValidationError as error:
        raise refused(error) from None
    finally:
        node.protocol.wait_timeout = usual_timeout_s


async def _is_connected(node: DHTNode, initial_peers: Sequence[str]) -> bool:
    """Return whether libp2p has a connection to an initial peer, even if the process behind its daemon hangs."""
    wanted = {address.rpartition("/p2p/")[2] for address in initial_peers}
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return any(peer.peer_id.to_base58() in wanted for peer in await node.p2p.list_peers())
    except DAEMON_ERRORS:  # this node's own daemon has ended
        return False


async def _meets(node: DHTNode, address: str, joins: bool) -> bool:
    transport, _, name = address.rpartition("/p2p/")
    peer, target = PeerID.from_base58(name), tcp_target(address)
    # Try a plain connection first: a failed dial makes libp2p back off, longer each time, before it dials again.
    if peer == node.peer_id or (target is not None and not await connects(*target)):
        return False
    try:
        async with asyncio.timeout(_BACKOFF_S + CONNECT_TIMEOUT_S):
            await _connect(node, peer, Multiaddr(transport))
    except DAEMON_ERRORS:  # the peer's daemon has another identity, or does not answer
        return False
    node.blacklist.register_success(peer)  # the peer may be back after a silence
    try:
        return await node.protocol.call_ping(peer, validate=joins) is not None
    except ValidationError as error:
        if "local time" in str(error):  # the clocks differ
            raise
        return False  # the peer was too busy to ping back


async def _connect(node: DHTNode, peer: PeerID, transport: Multiaddr) -> None:
    while True:
        try:
            await node.p2p._client.connect(peer, [transport])
            return
        except ControlFailure as error:
            if "dial backoff" not in str(error):  # libp2p waits after a failed dial, see ``_BACKOFF_S``
                raise
        await asyncio.sleep(_RETRY_S)
