"""The addresses of a robust run's peers: signed records on the DHT, the newest of each peer."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Collection
from contextlib import suppress

from swarm_protocol.net.identity import Identity
from swarm_training.core.record import JOINING, TRAINING, Progress
from swarm_training.core.signing import read_signed, sign
from swarm_training.progress.board import PeerRegistry

_PUBLISH_S, _READ_S, _READ_EARLY_S = 15.0, 2.0, 0.5
_FRESH_S = 45.0  # records of peers that are gone stay on the DHT for a while
_MOST_RECORDS = 1024


class PeerDirectory:
    """The registry of a run's peers on the DHT.

    Attributes:
        others: ids of peers of this run whose records say that they train another model, or by other rules.
    """

    def __init__(self, own: Progress, identity: Identity, board: PeerRegistry) -> None:
        self.others: set[str] = set()
        self._heard_s: dict[str, float] = {}
        self._own = dataclasses.replace(own, version=time.time_ns() // 1_000_000)
        self._identity = identity
        self._board = board
        self._records: dict[str, Progress] = {own.peer_id: self._own}

    def record_of(self, peer_id: str) -> Progress | None:
        return self._records.get(peer_id)

    @property
    def own_id(self) -> str:
        return self._own.peer_id

    def known(self) -> frozenset[str]:
        return frozenset(self._records)

    def joining(self) -> list[str]:
        """Return the ids of the peers that want to join, according to fresh records."""
        now = asyncio.get_running_loop().time()
        fresh = [name for name, heard_s in self._heard_s.items() if now - heard_s < _FRESH_S]
        return [name for name in fresh if self._records[name].state == JOINING]

    def has_joined(self) -> None:
        """Publish from now on that this peer takes part."""
        self._own = dataclasses.replace(self._own, state=TRAINING)

    def session(self, founders: Collection[str]) -> bytes:
        """Return an id that no earlier run of the same peers has: their certificates are new at each start."""
        facts = [(name, self._records[name].tls_fingerprint.hex()) for name in sorted(founders)]
        return hashlib.sha256(repr((self._own.run, facts)).encode()).digest()

    async def run(self) -> None:
        await asyncio.gather(self._publish(), self._read())

    async def _publish(self) -> None:
        while True:
            self._own = dataclasses.replace(self._own, version=self._own.version + 1)
            await self._board.publish(sign(self._own, self._identity))
            await asyncio.sleep(_PUBLISH_S)

    async def _read(self) -> None:
        while True:
            for signed in await self._board.read():
                with suppress(ValueError):
                    self._note(read_signed(signed))
            await asyncio.sleep(_READ_S if self._own.state == TRAINING else _READ_EARLY_S)

    def _note(self, record: Progress) -> None:
        known = self._records.get(record.peer_id)
        if record.run != self._own.run or not record.is_reachable or record.peer_id == self._own.peer_id:
            return
        if record.model != self._own.model:
            self.others.add(record.peer_id)
        elif (known is None and len(self._records) < _MOST_RECORDS) or (known and record.version > known.version):
            self.others.discard(record.peer_id)
            self._records[record.peer_id] = record
            self._heard_s[record.peer_id] = asyncio.get_running_loop().time()
