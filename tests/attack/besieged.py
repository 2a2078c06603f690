"""A server under attack from strangers who write into its DHT, with as many identities as they like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from swarm_client import DistributedModel
from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_protocol.dht.records import ServerState, servers_key
from swarm_protocol.dht.stored_records import subkey_of
from swarm_protocol.net.hivemind_parts import (
    DHTID,
    DHTNode,
    DHTRecord,
    MSGPackSerializer,
    PeerID,
    RSASignatureValidator,
    get_dht_time,
)
from swarm_protocol.net.identity import Identity
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.process.local_registry import DEFAULT_SWARM
from tests.attack.attacked import Attacked, attacked
from tests.quick_keys import new_identity
from tests.swarm.pair import ends_only_at_its_length

LIFETIME_S = 100.0


class Stranger:
    """A node of the DHT that stores what it likes."""

    def __init__(self, initial_peer: str) -> None:
        self._target = PeerID.from_base58(initial_peer.rpartition("/p2p/")[2])
        self._last_s = 0.0
        joining = DHTNode.create(initial_peers=[initial_peer], host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        self._node = background.run(joining)

    def store(self, keys: Sequence[str], owner: Identity, value: bytes, lifetime_s: float = LIFETIME_S) -> list[bool]:
        """Has the server store a value, signed by its owner; returns for each key whether it has.

        It expires later than what was stored before for as long, and takes its place.
        """
        signer, subkey = RSASignatureValidator(owner.private_key), subkey_of(owner)
        expires_at = get_dht_time() + lifetime_s
        if lifetime_s == LIFETIME_S:
            expires_at = self._last_s = max(expires_at, self._last_s + 0.001)
        packed = MSGPackSerializer.dumps(value)
        ids = [DHTID.generate(key) for key in keys]
        names = MSGPackSerializer.dumps(subkey)
        signed = [signer.sign_value(DHTRecord(one.to_bytes(), names, packed, expires_at)) for one in ids]
        storing = self._node.protocol.call_store(
            self._target, ids, signed, [expires_at] * len(ids), subkeys=[subkey] * len(ids)
        )
        return list(background.run(storing) or [False] * len(ids))

    def close(self) -> None:
        background.run(self._node.shutdown())


class Besieged(Attacked):
    """An honest server with the whole model, and strangers whose records stand beside its own."""

    @cached_property
    def stranger(self) -> Stranger:
        stranger = Stranger(self.server.ready["peer"])
        self.cleanup.callback(stranger.close)
        return stranger

    @cached_property
    def _identities(self) -> list[Identity]:
        return []

    def owners(self, number: int) -> list[Identity]:
        """Always the same ones: what they have withdrawn still has its place for a while."""
        self._identities += [new_identity() for _ in range(number - len(self._identities))]
        return self._identities[:number]

    @property
    def key(self) -> str:
        return servers_key(DEFAULT_SWARM, self.record.model)

    @contextmanager
    def client(self, **options: Any) -> Iterator[Any]:
        """A new one, which knows nobody."""
        config = ClientConfig(initial_peers=(self.server.ready["peer"],), draft="none", **options)
        with DistributedModel.from_pretrained(str(self.model), config=config) as remote:
            yield ends_only_at_its_length(remote)

    def forged(self, owner: Identity, **fields: Any) -> pb.ServerRecord:
        """Of a server that is better than the honest one, by what it says."""
        claims = dict(peer_id=owner.peer_id, tokens_per_s=1e6, forward_tokens_per_s=1e6, addresses=("127.0.0.1:1",))
        message = replace(self.record, **claims).to_proto()
        for name, value in fields.items():
            setattr(message, name, value)
        return message

    def publish(self, owner: Identity, message: pb.ServerRecord, lifetime_s: float = LIFETIME_S) -> bool:
        return self.stranger.store([self.key], owner, message.SerializeToString(), lifetime_s)[0]

    def withdraw(self, owners: Sequence[Identity]) -> None:
        for owner in owners:
            self.publish(owner, self.forged(owner, state=ServerState.OFFLINE.value))


def besieged(directory: Path) -> AbstractContextManager[Besieged]:
    return attacked(directory, Besieged)
