"""The wire form of progress records, which are signed by the peer that they describe."""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.message import DecodeError

from swarm_protocol.net.hivemind_parts import RSAPublicKey
from swarm_protocol.net.identity import Identity, peer_id_of
from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb

MAX_RECORD_BYTES = 4096
_PREFIX = b"swarm.training.v1.Progress:"  # domain separation: the key's other signatures are not valid here


def sign(record: Progress, identity: Identity) -> pb.SignedProgress:
    data = record.to_proto().SerializeToString(deterministic=True)
    key = identity.private_key
    return pb.SignedProgress(
        progress=data, public_key=key.get_public_key().to_bytes(), signature=key.sign(_PREFIX + data)
    )


def read_signed(signed: pb.SignedProgress) -> Progress:
    """Return the record. Raise ValueError if it is malformed, not signed by its peer, or has a field out of range."""
    if signed.ByteSize() > MAX_RECORD_BYTES:
        raise ValueError(f"a record of progress has {signed.ByteSize()} bytes: expected {MAX_RECORD_BYTES} at most")
    try:
        message = pb.Progress.FromString(signed.progress)
    except DecodeError:
        raise ValueError("the bytes are no record of progress") from None
    if _signer_of(signed.progress, signed.public_key, signed.signature) != message.peer_id:
        raise ValueError("a record of progress is not signed by the peer that it speaks of")
    return Progress.from_proto(message)


@lru_cache(maxsize=4096)
def _signer_of(data: bytes, public_key: bytes, signature: bytes) -> str:
    """Return the signer's peer id. Raise ValueError if the signature is wrong, or the key is not a peer's."""
    peer_id = peer_id_of(public_key)
    if not RSAPublicKey.from_bytes(public_key).verify(_PREFIX + data, signature):
        raise ValueError("a record of progress has a wrong signature")
    return peer_id
