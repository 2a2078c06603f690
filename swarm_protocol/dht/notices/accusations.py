"""Accusations in the DHT: every server publishes its own evidence, and the servers that its clients doubt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.dht.records import LIFETIME_S, accusations_key
from swarm_protocol.dht.stored_records import owner_of, read_items, store_item, subkey_of
from swarm_protocol.net.hivemind_parts import DHTNode, get_dht_time
from swarm_protocol.net.identity import Identity
from swarm_protocol.pb import swarm_pb2 as pb

MAX_EVIDENCE = 4  # per server: what fits into a DHT record
MAX_DOUBTED = 8  # servers that one server may name
_logger = logging.getLogger(__name__)


class AccusationRegistry:
    """The accusations against servers of one model."""

    def __init__(
        self, node: Callable[[], DHTNode], swarm: str, model: str, identity: Identity, access: AccessControl | None
    ) -> None:
        """Set where to read and publish; ``node`` returns the current node of this process."""
        self._node = node
        self._key = accusations_key(swarm, model)
        self._subkey = subkey_of(identity)
        self._access = access

    async def read(self) -> list[tuple[str, pb.Accusations]]:
        """Return the unverified accusations, each with the peer id of its publisher."""
        found = []
        for subkey, item in (await read_items(self._node(), self._key)).items():
            try:
                publisher, message = owner_of(subkey), pb.Accusations.FromString(item.value)
            except (ValueError, TypeError, DecodeError) as error:
                _logger.debug("ignored accusations: %r", error)
                continue
            if self._access is None or self._access.is_server(publisher, message.token):
                del message.evidence[MAX_EVIDENCE:], message.doubted[MAX_DOUBTED:]
                found.append((publisher, message))
        return found

    async def publish(self, evidence: Sequence[pb.Evidence], doubted: Sequence[str], token: bytes) -> bool:
        """Replace this peer's published accusations; return whether a node accepted them.

        ``doubted`` are peer ids, and ``token`` is the membership token in a private swarm. The last ``MAX_EVIDENCE``
        and the first ``MAX_DOUBTED`` are published.
        """
        message = pb.Accusations(evidence=evidence[-MAX_EVIDENCE:], doubted=doubted[:MAX_DOUBTED], token=token)
        data, expires_at = message.SerializeToString(), get_dht_time() + LIFETIME_S
        return await store_item(self._node(), self._key, self._subkey, data, expires_at)
