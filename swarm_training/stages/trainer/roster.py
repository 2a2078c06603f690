"""The roster of a run's trainers, which share the micro-batches of each step: short-lived records on the DHT."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from google.protobuf.message import DecodeError

from swarm_protocol.dht.stored_records import Expirations, owner_of, read_items, store_item, subkey_of
from swarm_protocol.net.hivemind_parts import DHTNode
from swarm_protocol.net.identity import Identity
from swarm_training.stages.pb import stages_pb2 as pb

LIFETIME_S = 10.0  # the time for which a step waits for a trainer that was killed
_RENEW_S = 3.0  # three times in a lifetime, so that a renewal which fails does no harm
_TIMEOUT_S = 5.0
_SOON_STEPS = 2  # the steps until other trainers have read of a newcomer


class TrainerRoster:
    """The roster of a run's trainers. All its methods are for one event loop."""

    def __init__(self, node: DHTNode, run: str, identity: Identity) -> None:
        self._node = node
        self._key = f"swarm.stages.v1/{run}/trainers"
        self._subkey = subkey_of(identity)
        self._own_id = identity.peer_id
        self._first_steps: dict[str, int] = {}
        self._own_first: int | None = None
        self._expirations = Expirations()

    def trainers(self) -> Mapping[str, int]:
        """Return the step from which on each trainer takes part, by peer id."""
        own = {} if self._own_first is None else {self._own_id: self._own_first}
        return {**self._first_steps, **own}

    async def enter(self, step: int) -> None:
        """Take part from this step on if there is no other trainer, else soon after."""
        await self._read()
        self._own_first = step + _SOON_STEPS if self._first_steps else step
        await self._publish(LIFETIME_S)

    async def run(self) -> None:
        """Keep the own record alive, and read those of others, until cancelled."""
        while True:
            await asyncio.sleep(_RENEW_S)
            await self._publish(LIFETIME_S)
            await self._read()

    async def leave(self) -> None:
        """Leave the roster. The other trainers share the micro-batches of this one."""
        if self._own_first is not None:
            self._own_first = None
            await self._publish(0.5)

    async def _publish(self, lifetime_s: float) -> None:
        # A record on the DHT cannot be removed, but a later one replaces it.
        record = pb.TrainerRecord(has_left=self._own_first is None, first_step=self._own_first or 0)
        data, expires_at = record.SerializeToString(), self._expirations.after(lifetime_s)
        await store_item(self._node, self._key, self._subkey, data, expires_at, _TIMEOUT_S)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                items = await read_items(self._node, self._key)
        except TimeoutError:
            return
        self._first_steps = {}
        for subkey, item in items.items():
            with suppress(DecodeError, TypeError, ValueError):  # a stranger's record may be anything
                record, peer_id = pb.TrainerRecord.FromString(item.value), owner_of(subkey)
                if peer_id != self._own_id and not record.has_left:
                    self._first_steps[peer_id] = record.first_step
