"""A DHT in the memory of this process: servers and clients of one test find each other without libp2p daemons.

A daemon takes half a second of a processor. Tests of finding, relaying and other processes need real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.utils.timed_storage import ValueWithExpiration

from swarm_protocol.dht.dht import Dht
from swarm_protocol.dht.node import Listening
from swarm_protocol.dht.stored_records import Validator
from swarm_protocol.net.hivemind_parts import DHTLocalStorage, Multiaddr, get_dht_time
from swarm_protocol.net.identity import Identity

_Records = dict[str, dict[Any, ValueWithExpiration]]
_swarms: dict[str, _Records] = {}
_patch = pytest.MonkeyPatch()


def hold_in_memory(swarm: str) -> None:
    """Keep the records of this swarm in memory: whoever joins it in this process needs no daemon."""
    if not _swarms:
        _patch.setattr(Dht, "join", classmethod(_join))
    _swarms[swarm] = {}


def forget(swarm: str) -> None:
    del _swarms[swarm]
    if not _swarms:
        _patch.undo()


_join_really = Dht.join.__func__


async def _join(
    cls: type[Dht],
    swarm: str,
    initial_peers: Sequence[str],
    identity: Identity,
    listening: Listening | None = None,
    **options: Any,
) -> Dht:
    if swarm not in _swarms:
        return await _join_really(cls, swarm, initial_peers, identity, listening, **options)
    for one_for_daemons in ("are_alive", "is_reachable"):
        options.pop(one_for_daemons, None)
    listening = listening or Listening()
    node = MemoryNode(_swarms[swarm], identity, asks_only=listening.host is None)
    return cls(node, swarm, identity, listening, **options)


class MemoryNode:
    """The parts of hivemind's node that ``Dht`` uses. All nodes of a swarm share the same records."""

    def __init__(self, records: _Records, identity: Identity, asks_only: bool) -> None:
        self._records = records
        self.node_id = None
        self.p2p = MemoryDaemon(identity.peer_id)
        self.protocol = SimpleNamespace(
            storage=DHTLocalStorage(),
            record_validator=Validator(identity.private_key),
            client_mode=asks_only,
            routing_table=SimpleNamespace(uid_to_peer_id={"anybody": "anybody"}, peer_id_to_uid=Everybody()),
        )

    async def store(self, key: str, value: bytes, expiration_time: float, subkey: Any) -> bool:
        """Replace the value under a key and subkey unless that expires later."""
        items = self._records.setdefault(key, {})
        is_newer = subkey not in items or items[subkey].expiration_time < expiration_time
        if is_newer:
            items[subkey] = ValueWithExpiration(value, expiration_time)
        return is_newer

    async def get(self, key: str, latest: bool = False) -> ValueWithExpiration[Mapping[Any, Any]] | None:
        now = get_dht_time()
        items = {name: item for name, item in self._records.get(key, {}).items() if item.expiration_time > now}
        return ValueWithExpiration(items, max(item.expiration_time for item in items.values())) if items else None

    async def shutdown(self) -> None:
        """Nothing runs."""


class MemoryDaemon:
    """The parts of the libp2p daemon that a server uses when nobody needs relays."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self._child = SimpleNamespace(returncode=None, wait=asyncio.Event().wait)  # it never ends
        self._daemon_listen_maddr = {"unix": Path("/nonexistent/daemon")}

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        return [Multiaddr(f"/ip4/127.0.0.1/tcp/9/p2p/{self.peer_id}")]

    async def list_peers(self) -> Iterable[Any]:
        return []

    async def add_binary_stream_handler(self, protocol: str, handle: Any) -> None:
        """Nobody opens streams."""

    async def shutdown(self) -> None:
        """Nothing runs."""


class Everybody:
    """The routing table of a node that knows all others."""

    def __contains__(self, _peer_id: object) -> bool:
        return True
