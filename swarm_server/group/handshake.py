"""The start of a link between two machines: both prove that they have the group's key, and agree upon fresh keys."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Self

import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from swarm_protocol.errors import SwarmError
from swarm_server.group.group_key import KEY_BYTES
from swarm_server.group.links import GroupEnded, MemberLink, NotSealed, shut_down

_PROGRAM = b"swarm-group-"
_MAGIC = _PROGRAM + b"5\n"  # the version of links and of their requests
_PUBLIC_BYTES = 32  # of an X25519 key
_HELLO_BYTES = 512
_HANDSHAKE_S = 10.0


class HandshakeFailed(SwarmError):
    """The other end of a connection is no member of this group, or cannot compute with it."""


@dataclass(frozen=True)
class Hello:
    """The terms of one member: how it computes, and a name that is its own until its process ends."""

    quant: str
    dtype: str
    revision: str = ""  # of the model; empty if it is not known before the swarm has been joined
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    byteorder: str = sys.byteorder

    def check(self, theirs: Hello) -> None:
        """Raise HandshakeFailed if the other member computes otherwise."""
        for name in ("quant", "dtype", "byteorder"):
            if getattr(self, name) != getattr(theirs, name):
                raise HandshakeFailed(
                    f"members of a group compute alike: the other has {name} {getattr(theirs, name)}, and this one "
                    f"{getattr(self, name)}"
                )
        if self.revision and theirs.revision and self.revision != theirs.revision:
            raise HandshakeFailed(
                f"members of a group have the same model: the other has revision {theirs.revision}, and this one "
                f"{self.revision}"
            )

    def to_tensor(self) -> torch.Tensor:
        """Return the bytes that are sent, always equally many."""
        return torch.tensor(list(json.dumps(asdict(self)).encode().ljust(_HELLO_BYTES)), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, data: torch.Tensor) -> Hello:
        """Parse bytes of a member that has the key. Raise HandshakeFailed if it is of another version."""
        try:
            return cls(**json.loads(bytes(data.tolist())))
        except (ValueError, TypeError):
            raise HandshakeFailed("the other member has another version of this program") from None


class Deadline(threading.Timer):
    """A timer that calls a function unless its context ends earlier. It does not keep the process alive."""

    def __init__(self, limit_s: float, function: Callable[[], None]) -> None:
        super().__init__(limit_s, function)
        self.daemon = True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.cancel()


def shake_hands(
    connection: socket.socket, group_key: bytes, hello: Hello, *, leads: bool, host: str = ""
) -> MemberLink:
    """Return the encrypted link through a new connection, with the name and the machine (``host``) of the other member.

    The keys of the link come from fresh X25519 keys of both ends and from the group's key (HKDF with SHA-256).
    Therefore an end without the group's key cannot send a record that is accepted. Whoever finds that key later cannot
    read records of the past.

    Raises:
        HandshakeFailed: the other end is no member of the group, has another key, or computes otherwise.
        GroupEnded: the other end is gone, or is silent.
    """
    with Deadline(_HANDSHAKE_S, partial(shut_down, connection)):
        sending, receiving = _link_keys(connection, group_key, leads)
        link = MemberLink(connection, None, 0 if leads else 1, _HANDSHAKE_S)
        link.seal(sending, receiving)
        theirs = torch.empty(_HELLO_BYTES, dtype=torch.uint8)
        link.send(hello.to_tensor())
        try:
            link.receive(theirs)
        except NotSealed:
            raise HandshakeFailed("the other end has another group key") from None
    answer = Hello.from_tensor(theirs)
    hello.check(answer)
    link.accept(answer.name, host)
    return link


def _link_keys(connection: socket.socket, group_key: bytes, leads: bool) -> tuple[bytes, bytes]:
    """Exchange public keys, and return the keys for sending and for receiving."""
    private = X25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    try:
        connection.sendall(_MAGIC + public)
        received = _exactly(connection, len(_MAGIC) + _PUBLIC_BYTES)
    except OSError as error:
        raise GroupEnded(f"the other end is gone: {error.strerror or error}") from None
    magic, theirs = received[: len(_MAGIC)], received[len(_MAGIC) :]
    if not _MAGIC.startswith(magic):
        other = "the other member has another version of this program"
        raise HandshakeFailed(other if magic.startswith(_PROGRAM) else "the other end is no member of a group")
    if len(theirs) < _PUBLIC_BYTES:
        raise GroupEnded("the other end is gone")
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        raise HandshakeFailed("the other end sent bytes that are no X25519 public key") from None
    # Both ends hash the same bytes: the leader's public key is always the first.
    salt = hashlib.sha256(_MAGIC + (public + theirs if leads else theirs + public)).digest()
    both = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt, b"leader and follower").derive(shared + group_key)
    of_leader, of_follower = both[:KEY_BYTES], both[KEY_BYTES:]
    return (of_leader, of_follower) if leads else (of_follower, of_leader)


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count and (more := connection.recv(count - len(received))):
        received += more
    return received
