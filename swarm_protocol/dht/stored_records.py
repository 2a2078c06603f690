"""The records that a DHT node stores for other nodes, the validation of theirs, and access to what is under a key."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.dht import shards
from swarm_protocol.dht.records import MAX_LIFETIME_S
from swarm_protocol.dht.shards import USUAL_LIMITS, DhtLimits
from swarm_protocol.net.hivemind_parts import (
    DHTLocalStorage,
    DHTNode,
    DHTProtocol,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    RSAPrivateKey,
    RSASignatureValidator,
    get_dht_time,
)
from swarm_protocol.net.identity import Identity, peer_id_of
from swarm_protocol.pb import swarm_pb2 as pb

_MAX_RECORD_BYTES = 8192  # including the signature; a usual record has 1 KB
_MAX_KEY_BYTES = 3 << 20  # under one key: above 4 MiB hivemind fails silently
_MAX_KNOWN = 100_000  # digests, 10 MB
# Matches the whole subkey, to exclude a second owner: hivemind requires a signature of the first owner only.
_SUBKEY = re.compile(r"([1-9A-HJ-NP-Za-km-z]+)\[owner:(ssh-rsa [A-Za-z0-9+/]+=*)\]")
_REVOKED = re.compile(r"(?:[0-9a-f]{2})+")  # the id of a grant, in hexadecimal


def subkey_of(identity: Identity) -> str:
    """Return the subkey under which a peer stores its records, one under each key of the DHT."""
    return f"{identity.peer_id}[owner:{identity.public_key.decode()}]"


@lru_cache(maxsize=20_000)
def owner_of(subkey: object) -> str:
    """Return the peer id of the owner of a record.

    Raises:
        ValueError: there is not exactly one owner; the peer id does not match the owner's key; the key is too short.
    """
    owner = _SUBKEY.fullmatch(subkey) if isinstance(subkey, str) else None
    if owner is None or owner[1] != peer_id_of(owner[2].encode()):
        raise ValueError("the record has no owner, or another one than it names")
    return owner[1]


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """The records that this node stores for other nodes: no more under one key than fits in a message.

    Above 4 MiB hivemind fails silently, and the node seems dead to those that query it.
    """

    capacity: int
    access: AccessControl | None = None  # set in a private swarm, for which only members' records are stored
    _is_storing = False  # meanwhile, hivemind stores by changing what ``get`` returns

    def limit(self, capacity: int, access: AccessControl | None) -> None:
        """Store at most ``capacity`` records under a key; with ``access``, only those of members."""
        self.capacity, self.access = capacity, access

    def store_subkey(self, key: Any, subkey: object, value: bytes, expiration_time: float) -> bool:
        """Store a record; return False if there is no room. A record under the same subkey can always be replaced."""
        if len(value) > _MAX_RECORD_BYTES:
            return False
        if self.access is not None and not is_admitted(self.access, subkey, value):
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
        self._is_storing = True
        try:
            stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        finally:
            self._is_storing = False
        return stored

    def get(self, key: Any) -> Any:
        """Return the value; in a private swarm a copy, because hivemind adds records to it that it reads elsewhere."""
        found = super().get(key)
        if self.access is None or self._is_storing or found is None or not isinstance(found.value, DictionaryDHTValue):
            return found
        copied = DictionaryDHTValue(found.value.maxsize)
        for subkey, item in found.value.items():
            copied.store(subkey, item.value, item.expiration_time)
        return type(found)(copied, found.expiration_time)


def is_admitted(access: AccessControl, subkey: object, value: bytes) -> bool:
    """Return whether a serialised value is a member server's record or a revocation; pass the latter to ``access``.

    The validator must not check this: hivemind discards a node's whole answer for one invalid record, and a record
    may have become invalid a moment ago.
    """
    try:
        data = MSGPackSerializer.loads(RSASignatureValidator._SIGNATURE_RE.sub(b"", value))
        if not isinstance(subkey, str) or not isinstance(data, bytes):
            return False
        if _REVOKED.fullmatch(subkey):
            access.revoke(data)
            return access.is_revocation(bytes.fromhex(subkey), data)
        # All messages under the keys of a swarm have their token in the same field, and no other field resembles it.
        return access.is_server(owner_of(subkey), pb.ServerRecord.FromString(data).token)
    except (ValueError, TypeError, DecodeError):
        return False


class Validator(RSASignatureValidator):  # type: ignore[misc]
    """A validator that refuses records not signed by their owner, and records that would spoil a key for its readers.

    Every record has an owner, and an owner has one record under a key. In a private swarm, revocations are accepted
    too; they carry their organiser's signature. Stored records and read records get the same checks.

    Attributes:
        max_lifetime_s: records that expire later than in this many seconds are refused.
        takes_revocations: the swarm is private.
    """

    def __init__(self, private_key: RSAPrivateKey) -> None:
        super().__init__(private_key)
        self.max_lifetime_s = MAX_LIFETIME_S
        self.takes_revocations = False
        self._known: set[bytes] = set()  # digests of valid records: five nodes send each record, at every read

    def limit(self, max_lifetime_s: float, access: AccessControl | None) -> None:
        """Refuse records that expire later than in ``max_lifetime_s``; take revocations if there is an ``access``."""
        self.max_lifetime_s, self.takes_revocations = max_lifetime_s, access is not None

    def validate(self, record: DHTRecord) -> bool:
        if record.subkey == DHTProtocol.IS_REGULAR_VALUE:
            return False  # it would replace every peer's records
        if not record.expiration_time <= get_dht_time() + self.max_lifetime_s:
            return False  # no newer record could replace it
        try:
            digest = hashlib.sha256(self._serialize_record(record)).digest()
            if digest in self._known:
                return True
            subkey = MSGPackSerializer.loads(record.subkey)
            if not (self.takes_revocations and isinstance(subkey, str) and _REVOKED.fullmatch(subkey)):
                owner_of(subkey)
            if not super().validate(record):
                return False
            MSGPackSerializer.loads(self.strip_value(record))  # unreadable data makes hivemind's search hang
        except Exception:  # untrusted bytes may raise anything
            return False
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(digest)
        return True


def limit_records(node: DHTNode, access: AccessControl | None = None, limits: DhtLimits = USUAL_LIMITS) -> None:
    """Limit the records that a node stores and reads; with ``access``, to those of a private swarm's members."""
    storage = node.protocol.storage
    # hivemind makes the storage itself, and may have stored records in it already.
    storage.__class__ = BoundedStorage
    storage.limit(limits.capacity, access)
    node.protocol.record_validator.limit(limits.max_lifetime_s, access)


class Expirations:
    """The expirations of a peer's own records, each later than all before: a later record replaces an earlier one."""

    def __init__(self) -> None:
        self._latest = 0.0

    def after(self, lifetime_s: float) -> float:
        self._latest = max(get_dht_time() + lifetime_s, self._latest + 0.001)  # a clock may be set back
        return self._latest


async def store_item(
    node: DHTNode, key: str, subkey: str, data: bytes, expires_at: float, timeout_s: float = 10.0
) -> bool:
    """Store an item under a key of the DHT; return whether a node accepted it in time."""
    try:
        async with asyncio.timeout(timeout_s):  # hivemind waits for ever for a daemon that is gone
            return bool(await node.store(key, data, expires_at, subkey=subkey))
    except TimeoutError:
        return False


async def read_items(node: DHTNode, key: str) -> Mapping[Any, Any]:
    """Return everything under a key of the DHT, by subkey, each with its expiration."""
    return items_of(await node.get(key, latest=True))


def items_of(entry: Any) -> Mapping[Any, Any]:
    """Return the items that hivemind has found under a key, by subkey; none if there is no entry, or only one value."""
    return entry.value if entry is not None and isinstance(entry.value, dict) else {}
