"""What a peer says of its own progress."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import inf

from swarm_training.core.config import WIRE_VERSION
from swarm_training.core.moment import Moment
from swarm_training.pb import training_pb2 as pb

TRAINING, MEETING, LEFT, JOINING = pb.TRAINING, pb.MEETING, pb.LEFT, pb.JOINING
PRESENT = frozenset({TRAINING, MEETING})
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
    loss: float = 0.0
    loss_samples: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    rollbacks: int = 0

    @property
    def moment(self) -> Moment:
        return Moment(self.rollbacks, self.step)

    @property
    def is_reachable(self) -> bool:
        return bool(self.address)

    def to_proto(self) -> pb.Progress:
        return pb.Progress(wire_version=WIRE_VERSION, **{field.name: getattr(self, field.name) for field in _FIELDS})

    @classmethod
    def from_proto(cls, message: pb.Progress) -> Progress:
        """Raises ValueError if a field is out of range: records come from strangers."""
        if message.wire_version != WIRE_VERSION:
            raise ValueError(f"the peer speaks version {message.wire_version} of training, and not {WIRE_VERSION}")
        record = cls(**{f.name: getattr(message, f.name) for f in _FIELDS})
        if not all(0 <= number < inf for number in (record.samples_per_s, record.call_s, record.share)):
            raise ValueError("a number in a record of progress is not finite, or negative")
        if not record.loss > -inf:
            raise ValueError("the loss in a record of progress is no number")
        if max(_counts(record)) > _MAX_COUNT or record.state not in pb.PeerState.values():
            raise ValueError("a number in a record of progress is out of range")
        if any(len(text) > _MAX_TEXT or not text.isprintable() for text in (record.run, record.address)):
            raise ValueError("a name in a record of progress is too long, or not printable")
        return record


def _counts(record: Progress) -> tuple[int, ...]:
    own = record.version, record.step, record.samples, record.loss_samples
    return *own, record.bytes_sent, record.bytes_received


_FIELDS = dataclasses.fields(Progress)
