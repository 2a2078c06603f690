"""The parts of hivemind we use: its DHT, and what that stands on.

hivemind's own ``__init__`` imports averaging, experts and optimisers too, and with them SciPy: 50 MB of memory and most
of a second at every start. Here the package is entered without it; it runs if somebody asks for one of its names.
"""

# ruff: noqa: E402
from __future__ import annotations

import logging
from typing import Any

from swarm_protocol.imports.late_modules import enter

__all__ = [
    "DHTID",
    "MAX_DHT_TIME_DISCREPANCY_SECONDS",
    "P2P",
    "ControlFailure",
    "DHTLocalStorage",
    "DHTNode",
    "DHTProtocol",
    "DHTRecord",
    "DictionaryDHTValue",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PDaemonError",
    "PeerID",
    "RSAPrivateKey",
    "RSAPublicKey",
    "RSASignatureValidator",
    "ValidationError",
    "crypto_pb2",
    "get_dht_time",
]


enter("hivemind", alone=None)

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P as AnyP2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time

from swarm_protocol.process.scratch import scratch_directory


class P2P(AnyP2P):  # type: ignore[misc]
    """A libp2p daemon whose sockets are in a directory that does not outlive this process."""

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> P2P:
        cls._UNIX_SOCKET_PREFIX = f"/unix{scratch_directory()}/"
        p2p: P2P = await super().create(*args, **kwargs)
        return p2p


def _is_of_use(record: logging.LogRecord) -> bool:
    """A lookup that is cancelled, by a deadline for instance, leaves a waiting task behind for each node that it was
    asking (hivemind 1.1.12, ``traverse_dht``). Nothing is lost with it, but asyncio complains when it is collected."""
    text = record.getMessage()
    return not (text.startswith("Task was destroyed but it is pending") and "coro=<Event.wait()" in text)


logging.getLogger("asyncio").addFilter(_is_of_use)
