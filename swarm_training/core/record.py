"""What a peer says of its own progress, signed with its key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from google.protobuf.message import DecodeError

from swarm_protocol.net.hivemind_parts import RSAPublicKey
from swarm_protocol.net.identity import Identity, peer_id_of
from swarm_training.core.config import WIRE_VERSION
from swarm_training.pb import training_pb2 as pb

TRAINING, MEETING, LEFT, JOINING = pb.TRAINING, pb.MEETING, pb.LEFT, pb.JOINING
PRESENT = frozenset({TRAINING, MEETING})
MAX_RECORD_BYTES = 4096
_PREFIX = b"swarm.training.v1.Progress:"
_MAX_TEXT = 512
_MAX_COUNT = 1 << 62


@dataclass(frozen=True)
class Progress:
    """The fields are described in ``protos/training.proto``."""

    run: str
    peer_id: str
    version: int = 0
    state: pb.PeerState = TRAINING
    step: int = 0
    samples: int = 0
    samples_per_s: float = 0.0
    call_s: float = 0.0
    target_batch_size: int = 1
    address: str = ""
    tls_fingerprint: bytes = b""
    share: float = 1.0
    model: bytes = b""
    state_digest: bytes = b""
    result_digest: bytes = b""

    @property
    def is_reachable(self) -> bool:
        return bool(self.address)

    def signed(self, identity: Identity) -> pb.SignedProgress:
        message = pb.Progress(wire_version=WIRE_VERSION, **{f.name: getattr(self, f.name) for f in _FIELDS})
        data = message.SerializeToString(deterministic=True)
        key = identity.private_key
        return pb.SignedProgress(
            progress=data, public_key=key.get_public_key().to_bytes(), signature=key.sign(_PREFIX + data)
        )

    @classmethod
    def parse(cls, signed: pb.SignedProgress) -> Progress:
        """Raises ValueError if it is no record, is not signed by its peer, or a field is out of range."""
        if signed.ByteSize() > MAX_RECORD_BYTES:
            raise ValueError(f"a record of progress has {signed.ByteSize()} bytes: expected {MAX_RECORD_BYTES} at most")
        try:
            message = pb.Progress.FromString(signed.progress)
        except DecodeError:
            raise ValueError("the bytes are no record of progress") from None
        if _signer_of(signed.progress, signed.public_key, signed.signature) != message.peer_id:
            raise ValueError("a record of progress is not signed by the peer that it speaks of")
        if message.wire_version != WIRE_VERSION:
            raise ValueError(f"the peer speaks version {message.wire_version} of training, and not {WIRE_VERSION}")
        record = cls(**{f.name: getattr(message, f.name) for f in _FIELDS})
        if not all(0 <= number < inf for number in (record.samples_per_s, record.call_s, record.share)):
            raise ValueError("a number in a record of progress is not finite, or negative")
        if max(record.version, record.step, record.samples) > _MAX_COUNT or record.state not in pb.PeerState.values():
            raise ValueError("a number in a record of progress is out of range")
        if any(len(text) > _MAX_TEXT or not text.isprintable() for text in (record.run, record.address)):
            raise ValueError("a name in a record of progress is too long, or not printable")
        return record


@lru_cache(maxsize=4096)
def _signer_of(data: bytes, public_key: bytes, signature: bytes) -> str:
    """Raises ValueError if it is not signed by this key, or that is no peer's."""
    peer_id = peer_id_of(public_key)
    if not RSAPublicKey.from_bytes(public_key).verify(_PREFIX + data, signature):
        raise ValueError("a record of progress has a wrong signature")
    return peer_id


_FIELDS = dataclasses.fields(Progress)
