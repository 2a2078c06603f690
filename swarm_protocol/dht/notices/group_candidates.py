"""Candidates in the DHT for a group of servers that compute together: only those with the group's secret read them."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from dataclasses import asdict

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from google.protobuf.message import DecodeError

from swarm_protocol.dht.records import GroupCandidate, group_key_of
from swarm_protocol.dht.stored_records import owner_of, read_items, store_item, subkey_of
from swarm_protocol.net.hivemind_parts import DHTNode, get_dht_time
from swarm_protocol.net.identity import Identity
from swarm_protocol.pb import swarm_pb2 as pb

LIFETIME_S = 20.0  # of a candidate that is not published again
_NONCE_BYTES, _KEY_BYTES = 12, 32
_logger = logging.getLogger(__name__)


class CandidateRegistry:
    """The candidates for one group. Their addresses are sealed with a key that comes from the group's secret."""

    def __init__(
        self, node: Callable[[], DHTNode], swarm: str, identity: Identity, token: bytes, group: str, secret: bytes
    ) -> None:
        """Set where to read and publish.

        ``node`` returns the current node of this process, and ``token`` is the membership token in a private swarm.
        ``group`` is the group's name, ``secret`` what its members share.
        """
        # Two keys from one secret: the DHT key shows nothing of the key that seals.
        keys = HKDF(hashes.SHA256(), 2 * _KEY_BYTES, group.encode(), b"candidates of a group").derive(secret)
        self._key, self._sealing = group_key_of(swarm, keys[:_KEY_BYTES].hex()), AESGCM(keys[_KEY_BYTES:])
        self._node, self._identity, self._token = node, identity, token

    async def publish(self, candidate: GroupCandidate) -> bool:
        """Publish this process as a candidate for ``LIFETIME_S``; return whether a node accepted it."""
        nonce, text = secrets.token_bytes(_NONCE_BYTES), json.dumps(asdict(candidate)).encode()
        sealed = nonce + self._sealing.encrypt(nonce, text, self._identity.peer_id.encode())
        data = pb.GroupCandidate(sealed=sealed, token=self._token).SerializeToString()
        expires_at = get_dht_time() + LIFETIME_S
        return await store_item(self._node(), self._key, subkey_of(self._identity), data, expires_at)

    async def read(self) -> list[GroupCandidate]:
        """Return the candidates, each once. What was not sealed with the group's secret is ignored."""
        found: dict[str, GroupCandidate] = {}
        for subkey, item in (await read_items(self._node(), self._key)).items():
            try:
                sealed = pb.GroupCandidate.FromString(item.value).sealed
                nonce, text = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
                candidate = GroupCandidate(**json.loads(self._sealing.decrypt(nonce, text, owner_of(subkey).encode())))
            except (ValueError, TypeError, DecodeError, InvalidTag) as error:
                _logger.debug("ignored a candidate for a group: %r", error)
                continue
            if candidate.name not in found or candidate.leads:  # a process may have another identity when it leads
                found[candidate.name] = candidate
        return list(found.values())
