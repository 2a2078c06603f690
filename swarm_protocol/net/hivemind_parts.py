"""The parts of hivemind that are used: its DHT, and the modules below the DHT.

hivemind's own ``__init__`` also imports averaging, experts and optimisers, and through them SciPy: 50 MB of memory and
most of a second at every start. Here ``enter`` defers its code until a caller needs one of its names.
"""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
import logging
from typing import Any

from swarm_protocol.imports.late_modules import enter
from swarm_protocol.imports.libp2p import require_libp2p

__all__ = [
    "DAEMON_ERRORS",
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


require_libp2p()  # an import that fails would not say what to do
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

from swarm_protocol.process.scratch import socket_directory

# The errors of a call to the libp2p daemon that refuses or has ended. A timeout is an OSError, too.
DAEMON_ERRORS = (ControlFailure, P2PDaemonError, OSError, asyncio.IncompleteReadError)


class P2P(AnyP2P):  # type: ignore[misc]
    """A libp2p daemon whose sockets are in a directory that does not outlive this process."""

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> P2P:
        cls._UNIX_SOCKET_PREFIX = f"/unix{socket_directory()}/"  # hivemind has no argument for it
        p2p: P2P = await super().create(*args, **kwargs)
        return p2p


def _is_of_use(record: logging.LogRecord) -> bool:
    """Return False for asyncio's harmless errors about tasks of cancelled lookups (hivemind 1.1.12)."""
    text = record.getMessage()
    return not (text.startswith("Task was destroyed but it is pending") and "coro=<Event.wait()" in text)


logging.getLogger("asyncio").addFilter(_is_of_use)
# hivemind reports every problem of its daemon on stderr; the user sees relevant failures through this library's errors.
logging.getLogger("hivemind").setLevel(logging.CRITICAL)
