"""Content that a peer has signed. Its bytes are checked as they arrived, so that serialisation does not matter."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache, partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from swarm_protocol.net.identity import Identity, peer_id_of, verified_signer
from swarm_training.pb import training_ledger_pb2 as pb

M = TypeVar("M", bound=Message)
_NO_KEY = "the key of a signature is no key of a peer"
_signer_of = lru_cache(maxsize=4096)(partial(verified_signer, no_key=_NO_KEY))


class ContentKind(Enum):
    """The kind of signed content. Signed bytes begin with its value, so that one kind is never taken for another."""

    CONTRIBUTION = b"swarm.training.v1.Contribution:"
    ROUND = b"swarm.training.v1.Round:"
    ORDER = b"swarm.training.v1.Order:"
    STATEMENT = b"swarm.stages.v1.Statement:"


def sign(kind: ContentKind, content: Message, identity: Identity, token: bytes) -> pb.SignedByPeer:
    """Sign a message. ``token``: the peer's token in a private run; empty otherwise."""
    data = content.SerializeToString(deterministic=True)
    return pb.SignedByPeer(
        content=data,
        public_key=identity.public_key,
        signature=identity.private_key.sign(kind.value + data),
        token=token,
    )


def signer_of(kind: ContentKind, signed: pb.SignedByPeer) -> str:
    """Return the id of the peer that has signed content of this kind. Raise ValueError if the signature is wrong."""
    return _signer_of(kind.value + signed.content, signed.public_key, signed.signature)


def claimed_signer_of(kind: ContentKind, signed: pb.SignedByPeer) -> str:
    """Return the peer id of the key, without a check of the signature. Raise ValueError if it is no peer's key."""
    try:
        return peer_id_of(signed.public_key)
    except ValueError:
        raise ValueError(_NO_KEY) from None


def parsed(kind: type[M], data: bytes, max_bytes: int) -> M:
    """Parse a message. Raise ValueError if the bytes are no such message, or more than ``max_bytes``."""
    if len(data) > max_bytes:
        raise ValueError(f"a {kind.__name__} has {len(data)} bytes: expected at most {max_bytes}")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ValueError(f"the bytes are no {kind.__name__}") from None
