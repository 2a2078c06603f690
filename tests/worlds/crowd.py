"""Thousands of servers, as far as the DHT can tell: each with a key, a peer id and a signed record of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence

from swarm_protocol.dht.dht import Dht, _Place
from swarm_protocol.dht.node import Listening
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.dht.shards import DhtLimits, path
from swarm_protocol.dht.stored_records import Validator
from swarm_protocol.net.hivemind_parts import DHTRecord
from swarm_protocol.net.identity import Identity
from swarm_protocol.span import Span
from tests.quick_keys import new_identity

LIMITS = DhtLimits(max_lifetime_s=2 * 3600.0)  # for all nodes of a DHT with a crowd
_LIFETIME_S = 3600.0


class Crowd:
    """Servers that share the DHT node of one of them, for lack of 10 000 machines; it signs with each one's own key."""

    def __init__(self, host: Dht, count: int, limits: DhtLimits = LIMITS) -> None:
        self.identities = [new_identity() for _ in range(count)]
        self._host, self._limits = host, limits
        host._node.protocol.record_validator = _Notary(self.identities)
        self.members = [self._member(identity) for identity in self.identities]

    def _member(self, identity: Identity) -> Dht:
        return Dht(self._host._node, self._host._swarm, identity, Listening(), limits=self._limits)

    async def publish(self, records: Sequence[ServerRecord], at_once: int = 200, first: int = 0) -> None:
        """The records last until the test is over: publishing takes longer in one process than in thousands.

        They are those of the member ``first`` and the ones after it.
        """
        for start in range(0, len(records), at_once):
            batch = records[start : start + at_once]
            coming = list(zip(self.members[first + start :][: len(batch)], batch, strict=True))
            while coming:  # as servers do, who publishes in vain, for lack of time or room, does so again
                stored = await asyncio.gather(*(member.publish(record, _LIFETIME_S) for member, record in coming))
                coming = [late for late, in_time in zip(coming, stored, strict=True) if not in_time]

    def settle(self, records: Sequence[ServerRecord]) -> None:
        """The first know their places, as if they had joined long ago, so that they need not look for them."""
        sizes: Counter[str] = Counter()
        for member, record in zip(self.members, records, strict=False):
            route = path(record.peer_id, record.span, record.num_blocks)
            depth = next(depth for depth, shard in enumerate(route) if sizes[shard] < self._limits.capacity)
            sizes[route[depth]] += 1
            member._places[record.model] = _Place(route, depth, publications=1)

    def records(self, model: str, num_blocks: int, spans: Sequence[Span]) -> list[ServerRecord]:
        """A record for each; spans are dealt in turn."""
        ids = [identity.peer_id for identity in self.identities]
        others = [(ids * 2)[index + 1 : index + 9] for index in range(len(ids))]
        return [
            _realistic(ServerRecord(peer_id, ("192.168.100.100:40000",), model, "9" * 40, num_blocks, span), near)
            for peer_id, span, near in zip(ids, itertools.cycle(spans), others, strict=False)
        ]


def _realistic(record: ServerRecord, neighbours: list[str]) -> ServerRecord:
    return dataclasses.replace(
        record,
        quant="int8",
        dtype="bfloat16",
        tokens_per_s=12.5,
        cache_tokens_left=100_000,
        queue_delay_s=0.125,
        tls_fingerprint=b"f" * 32,
        next_hop_rtts_s=dict.fromkeys(neighbours, 0.0625),
        software_version="0.1.0",
    )


class _Notary(Validator):
    def __init__(self, identities: Sequence[Identity]) -> None:
        super().__init__(identities[0].private_key)
        self._signers = {}
        for identity in identities:
            signer = Validator(identity.private_key)
            self._signers[signer.local_public_key] = signer

    def sign_value(self, record: DHTRecord) -> bytes:
        owner = re.search(rb"\[owner:.+?\]", record.subkey)
        return self._signers[owner[0]].sign_value(record) if owner else record.value
