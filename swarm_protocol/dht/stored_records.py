"""What a node of the DHT stores for others, and what it believes of what others have stored."""

from __future__ import annotations

import hashlib
from typing import Any

from swarm_protocol.dht import shards
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

_MAX_RECORD_BYTES = 8192  # signed; a usual one has 1 KB
_MAX_KNOWN = 100_000  # digests, 10 MB


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
        if known is not None and isinstance(known.value, DictionaryDHTValue) and subkey not in known.value:
            now = get_dht_time()
            if not shards.has_room([item.expiration_time - now for _, item in known.value.items()], self.capacity):
                return False
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        return stored


class Validator(RSASignatureValidator):  # type: ignore[misc]
    """Refuses records that their owner has not signed, and those that would spoil a key for all its readers."""

    def __init__(self, private_key: RSAPrivateKey) -> None:
        super().__init__(private_key)
        self._known: set[bytes] = set()  # digests of what is valid: it comes from five nodes, and next time again

    def validate(self, record: DHTRecord) -> bool:
        if record.subkey == DHTProtocol.IS_REGULAR_VALUE:
            return False  # it would replace everybody's
        try:
            digest = hashlib.sha256(self._serialize_record(record)).digest()
            if digest in self._known:
                return True
            if not super().validate(record):
                return False
            MSGPackSerializer.loads(self.strip_value(record))  # what cannot be unpacked makes hivemind's search hang
        except Exception:  # whatever a stranger's bytes provoke
            return False
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(digest)
        return True
