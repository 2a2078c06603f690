"""The revocations of a private swarm in its DHT; servers republish them until they expire."""

from __future__ import annotations

import asyncio

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.dht.records import LIFETIME_S, revocations_key
from swarm_protocol.dht.stored_records import read_items
from swarm_protocol.net.hivemind_parts import DHTNode, get_dht_time

_RENEW_BELOW_S = LIFETIME_S / 2  # the first server that finds less lifetime left renews the entry
_PUBLISH_TIMEOUT_S = 10.0


class Revocations:
    """The synchronisation of revocations between ``access`` and the DHT."""

    def __init__(self, node: DHTNode, swarm: str, access: AccessControl) -> None:
        self._node = node
        self._key = revocations_key(swarm)
        self._access = access

    async def read(self) -> dict[str, float]:
        """Apply all revocations in the DHT; return their expirations there, by the id of the grant in hexadecimal."""
        items = await read_items(self._node, self._key)
        for item in items.values():
            if isinstance(item.value, bytes):
                self._access.revoke(item.value)
        return {subkey: item.expiration_time for subkey, item in items.items() if isinstance(subkey, str)}

    async def keep(self) -> None:
        """Read the revocations, and republish known ones that are missing or about to expire in the DHT."""
        expirations = await self.read()
        now = get_dht_time()
        for grant_id, data in self._access.revocations().items():
            if expirations.get(grant_id.hex(), now) - now < _RENEW_BELOW_S:
                await self._store(grant_id, data)

    async def publish(self, grant_id: bytes, data: bytes) -> bool:
        """Store a signed revocation; return whether a node accepted it."""
        try:
            async with asyncio.timeout(_PUBLISH_TIMEOUT_S):
                return await self._store(grant_id, data)
        except TimeoutError:
            return False

    async def _store(self, grant_id: bytes, data: bytes) -> bool:
        expires_at = get_dht_time() + LIFETIME_S
        stored = await self._node.store(self._key, data, expires_at, subkey=grant_id.hex())
        return bool(stored) or grant_id.hex() in await self.read()  # the node that answers last may be no member
