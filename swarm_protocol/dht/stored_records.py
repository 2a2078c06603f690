"""What a node of the DHT stores for others, and what it believes of what others have stored."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Any

from swarm_protocol.dht import shards
from swarm_protocol.dht.records import MAX_LIFETIME_S
from swarm_protocol.net.hivemind_parts import (
    DHTLocalStorage,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    RSAPrivateKey,
    RSASignatureValidator,
    get_dht_time,
)
from swarm_protocol.net.identity import Identity, peer_id_of

_MAX_RECORD_BYTES = 8192  # signed; a usual one has 1 KB
_MAX_KEY_BYTES = 3 << 20  # under one key: above 4 MiB hivemind fails silently
_MAX_KNOWN = 100_000  # digests, 10 MB
# The whole subkey, which leaves no room for a second owner: hivemind asks for the signature of the first it finds.
_SUBKEY = re.compile(r"([1-9A-HJ-NP-Za-km-z]+)\[owner:(ssh-rsa [A-Za-z0-9+/]+=*)\]")


def subkey_of(identity: Identity) -> str:
    """Under which a peer's records stand: one for each key of the DHT."""
    return f"{identity.peer_id}[owner:{identity.private_key.get_public_key().to_bytes().decode()}]"


@lru_cache(maxsize=20_000)
def owner_of(subkey: object) -> str:
    """The peer id of the owner of a record.

    Raises:
        ValueError: there is none, or more than one; the peer id is not that of the owner's key; the key is too short.
    """
    owner = _SUBKEY.fullmatch(subkey) if isinstance(subkey, str) else None
    if owner is None or owner[1] != peer_id_of(owner[2].encode()):
        raise ValueError("its owner is nobody, or somebody else")
    return owner[1]


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """What this node stores for others: no more under one key than fits in a message.

    Above 4 MiB hivemind fails silently: to those who ask, the node seems dead.
    """

    capacity: int

    def store_subkey(self, key: Any, subkey: object, value: bytes, expiration_time: float) -> bool:
        """Returns False if there is no room; a record that stands there can always be replaced."""
        if len(value) > _MAX_RECORD_BYTES:
            return False
        known = self.get(key)
        if known is not None and isinstance(known.value, DictionaryDHTValue):
            others = [(name, item) for name, item in known.value.items() if name != subkey]
            if sum(len(str(name)) + len(item.value) for name, item in others) + len(value) > _MAX_KEY_BYTES:
                return False
            now = get_dht_time()
            lifetimes_left_s = [item.expiration_time - now for _, item in others]
            if subkey not in known.value and not shards.has_room(lifetimes_left_s, self.capacity):
                return False
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        return stored


class Validator(RSASignatureValidator):  # type: ignore[misc]
    """Refuses records that their owner has not signed, and those that would spoil a key for all its readers.

    Every record has an owner, of whom there is one under a key. What is stored and what is read are checked alike.

    Attributes:
        max_lifetime_s: what expires later than in so many seconds is refused.
    """

    def __init__(self, private_key: RSAPrivateKey) -> None:
        super().__init__(private_key)
        self.max_lifetime_s = MAX_LIFETIME_S
        self._known: set[bytes] = set()  # digests of what is valid: it comes from five nodes, and next time again

    def validate(self, record: DHTRecord) -> bool:
        if record.subkey == DHTProtocol.IS_REGULAR_VALUE:
            return False  # it would replace everybody's
        if not record.expiration_time <= get_dht_time() + self.max_lifetime_s:
            return False  # nothing newer could take its place
        try:
            digest = hashlib.sha256(self._serialize_record(record)).digest()
            if digest in self._known:
                return True
            owner_of(MSGPackSerializer.loads(record.subkey))
            if not super().validate(record):
                return False
            MSGPackSerializer.loads(self.strip_value(record))  # what cannot be unpacked makes hivemind's search hang
        except Exception:  # whatever a stranger's bytes provoke
            return False
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(digest)
        return True
