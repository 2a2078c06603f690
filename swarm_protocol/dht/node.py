"""The start and restart of a libp2p daemon and of the DHT node that uses it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarm_protocol.dht.addresses import multiaddr, tcp_target
from swarm_protocol.dht.stored_records import Validator
from swarm_protocol.errors import NoSwarm
from swarm_protocol.failures import awaited_on_error
from swarm_protocol.net.hivemind_parts import DAEMON_ERRORS, DHTID, P2P, DHTNode, PeerID
from swarm_protocol.net.identity import Identity

_DAEMON_TIMEOUT_S = 60.0  # enough on a busy machine
_NODE_TIMEOUT_S = 20.0  # hivemind waits for ever for a daemon that is gone
_SHUTDOWN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Listening:
    """The address on which a node listens, and the one that it announces. Without ``host``, the node only queries."""

    host: str | None = None
    port: int = 0
    announce_host: str | None = None


class _Node(DHTNode):  # type: ignore[misc]
    """hivemind's node, with a remedy for peers that name the node itself as its neighbour."""

    async def _call_find_with_blacklist(self, peer_id: PeerID, keys: Collection[DHTID]) -> Any:
        """Return a peer's answer for the keys, without this node among the neighbours in the answer.

        A peer does so if it met this node while this node served others, or to do harm. hivemind 1.1.12 assumes that
        no peer does: its ``store_many`` would fail with an AssertionError.
        """
        found = await super()._call_find_with_blacklist(peer_id, keys)
        for _, neighbors in (found or {}).values():
            neighbors.pop(self.node_id, None)
        return found


async def start(
    identity: Identity, listening: Listening, node_id: DHTID | None = None, validator: Validator | None = None
) -> DHTNode:
    """Start a node that knows no peers yet; raise NoSwarm if the daemon does not start."""
    try:
        p2p = await _start_daemon(identity, listening)
    except DAEMON_ERRORS as error:
        raise NoSwarm(f"the libp2p daemon did not start: {error}") from None
    async with awaited_on_error(lambda: _stop_daemon(p2p)):  # nobody else knows the daemon
        try:
            async with asyncio.timeout(_NODE_TIMEOUT_S):
                return await _Node.create(
                    p2p=p2p,
                    node_id=node_id,
                    client_mode=listening.host is None,
                    record_validator=validator or Validator(identity.private_key),
                    # With hivemind's caches, a reader would send all that it has read to one more node, and a server
                    # that has read a key would read it again at each store.
                    cache_refresh_before_expiry=0,
                    cache_nearest=0,
                    cache_on_store=False,
                )
        except DAEMON_ERRORS:
            raise NoSwarm("the libp2p daemon ended as soon as it had started") from None


async def start_again(ended: DHTNode, identity: Identity, listening: Listening) -> DHTNode:
    """Replace a node whose daemon has ended by one with the same id, stored records and, if it is free, address.

    The new node knows no peers yet.

    Raises:
        NoSwarm: the daemon does not start.
    """
    place, validator = _same_place(listening, ended.p2p), ended.protocol.record_validator
    node = await start(identity, place, ended.node_id, validator)
    node.protocol.storage = ended.protocol.storage
    set_serving(node, not ended.protocol.client_mode)
    await _stop_daemon(ended.p2p)
    return node


def set_serving(node: DHTNode, serves: bool) -> None:
    """Set whether other nodes may query this node; a node that is not reachable should only query."""
    node.protocol.client_mode = not serves
    # Peers add a node to their routing tables by the id that it sends, so that one that only queries sends none.
    node.protocol.node_info = type(node.protocol.node_info)(node_id=node.node_id.to_bytes() if serves else b"")


async def stop(node: DHTNode) -> None:
    with suppress(*DAEMON_ERRORS):  # the daemon may end meanwhile, and hivemind waits for ever for one that is gone
        if is_alive(node):
            async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
                await node.shutdown()
    await _stop_daemon(node.p2p)


async def _stop_daemon(p2p: P2P) -> None:
    with suppress(asyncio.TimeoutError):
        async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
            await p2p.shutdown()
    Path(p2p._daemon_listen_maddr["unix"]).unlink(missing_ok=True)  # a killed daemon leaves it behind


def is_alive(node: DHTNode) -> bool:
    return node.p2p._child.returncode is None


async def addresses(node: DHTNode) -> list[str]:
    """Return the multiaddrs under which peers can join through a node: the last known ones if its daemon is gone."""
    try:
        return [str(address) for address in await node.p2p.get_visible_maddrs(latest=True)]
    except DAEMON_ERRORS:
        return [str(address) for address in await node.p2p.get_visible_maddrs()]


async def _start_daemon(identity: Identity, listening: Listening) -> P2P:
    options: dict[str, Any] = (
        {"host_maddrs": [multiaddr(listening.host, listening.port)]}
        if listening.host is not None
        else {"no_listen": True, "host_maddrs": None, "dht_mode": "client"}
    )
    if listening.announce_host is not None:
        options["announce_maddrs"] = [multiaddr(listening.announce_host, listening.port)]
    with identity.as_file() as identity_path:
        p2p = await P2P.create(
            identity_path=identity_path,
            check_if_identity_free=False,  # the check starts another daemon; our key files are locked instead
            startup_timeout=_DAEMON_TIMEOUT_S,
            auto_nat=False,  # servers find out by dial-back, and have relays and hole punching of this library's own
            nat_port_map=False,
            use_relay=False,
            **options,
        )
    # Fetch the errors with which these tasks end together with their daemon: asyncio would log them as never retrieved.
    for task in (p2p._client.control._read_task, p2p._client.control._write_task):
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return p2p


def _same_place(listening: Listening, p2p: P2P) -> Listening:
    """Return ``listening`` with the automatically chosen port of the old daemon, if that port is still free."""
    if listening.host is None or listening.port:
        return listening
    targets = [tcp_target(f"{address}/p2p/{p2p.peer_id}") for address in p2p._visible_maddrs]
    port = next((target[1] for target in targets if target is not None), 0)
    try:
        with socket.socket(socket.AF_INET6 if ":" in listening.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the old connections linger
            probe.bind((listening.host, port))
    except OSError:
        return listening
    return replace(listening, port=port)
