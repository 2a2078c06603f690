"""The wire form of progress records, which are signed by the peer that they describe."""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.message import DecodeError

from swarm_protocol.net.identity import Identity, verified_signer
from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb

MAX_RECORD_BYTES = 4096
_PREFIX = b"swarm.training.v1.Progress:"  # domain separation: the key's other signatures are not valid here


def sign(record: Progress, identity: Identity) -> pb.SignedProgress:
    data = record.to_proto().SerializeToString(deterministic=True)
    signature = identity.private_key.sign(_PREFIX + data)
    return pb.SignedProgress(progress=data, public_key=identity.public_key, signature=signature)


def read_signed(signed: pb.SignedProgress) -> Progress:
    """Return the record. Raise ValueError if it is malformed, not signed by its peer, or has a field out of range."""
    if signed.ByteSize() > MAX_RECORD_BYTES:
        raise ValueError(f"a record of progress has {signed.ByteSize()} bytes: expected {MAX_RECORD_BYTES} at most")
    return _read(signed.progress, signed.public_key, signed.signature)


@lru_cache(maxsize=4096)
def _read(data: bytes, public_key: bytes, signature: bytes) -> Progress:
    """Return the record in ``data``. It comes from several peers, and is read and verified once."""
    try:
        message = pb.Progress.FromString(data)
    except DecodeError:
        raise ValueError("the bytes are no record of progress") from None
    signer = verified_signer(_PREFIX + data, public_key, signature, wrong="a record of progress has a wrong signature")
    if signer != message.peer_id:
        raise ValueError("a record of progress is not signed by the peer that it describes")
    return Progress.from_proto(message)
