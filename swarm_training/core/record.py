"""The record in which a peer reports its progress."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import fsum, inf
from typing import Any, Final

from swarm_protocol.codecs.bitmap import fits, size_of
from swarm_training.core.config import MAX_MICRO_BATCHES, WIRE_VERSION
from swarm_training.core.moment import Moment
from swarm_training.pb import training_pb2 as pb

TRAINING, MEETING, LEFT, JOINING = pb.TRAINING, pb.MEETING, pb.LEFT, pb.JOINING
PRESENT = frozenset({TRAINING, MEETING})
MAX_EXCLUDED = 16  # excluded peers in a record, which has to stay small
MAX_OFFERS = 64  # checkpoints in a record
_MAX_TEXT, _MAX_PEER_ID = 512, 64
_MAX_COUNT = 1 << 62
_MAX_PARTS, _MAX_PART = 64, 2.0**1000  # numbers of a sum of squares, and the largest: a run's sum stays finite


@dataclass(frozen=True)
class Lineage:
    """The place of a checkpoint in the history of a run in stages."""

    # The number of rollbacks before the run reached this state. Checkpoints of one step at different stages belong
    # together if this number is equal.
    born: int = 0
    rollbacks: int = 0  # the number of rollbacks when the run was at this state last
    skipped_batches: int = 0  # the batches that it had skipped then


NEW_STATE = Lineage()


@dataclass(frozen=True)
class Kept:
    """The step and the digest of data that a peer holds for others, such as a checkpoint."""

    step: int
    state_digest: bytes
    lineage: Lineage = field(default=NEW_STATE, compare=False)

    @property
    def is_beginning(self) -> bool:
        """Return whether this is the state that a run begins with, which every peer can create by itself."""
        return self.step == 0 and not self.lineage.skipped_batches

    def to_proto(self) -> pb.Checkpoint:
        return pb.Checkpoint(step=self.step, state_digest=self.state_digest, **dataclasses.asdict(self.lineage))

    @classmethod
    def from_proto(cls, message: pb.Checkpoint) -> Kept:
        """Return the checkpoint. Raise ValueError if a number in it is out of range."""
        if max(message.step, message.skipped_batches) > _MAX_COUNT:
            raise ValueError("a number in a record of progress is out of range")
        lineage = Lineage(message.born, message.rollbacks, message.skipped_batches)
        return cls(message.step, message.state_digest, lineage)


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss on held-out data with the parameters of one moment."""

    moment: Moment
    loss: float  # the mean over the samples; infinity: it is not finite
    samples: int  # the number of samples; 0: the peer could not compute the loss

    @property
    def step(self) -> int:
        return self.moment.step

    def to_proto(self) -> pb.HeldOutLoss:
        moment = self.moment
        return pb.HeldOutLoss(step=moment.step, rollbacks=moment.rollbacks, loss=self.loss, samples=self.samples)

    @classmethod
    def from_proto(cls, message: pb.HeldOutLoss) -> HeldOutLoss:
        """Return the loss. Raise ValueError if a number in it is out of range."""
        if max(message.step, message.samples) > _MAX_COUNT or not message.loss > -inf:
            raise ValueError("a loss on held-out data is no number, or its step is out of range")
        return cls(Moment(message.rollbacks, message.step), message.loss, message.samples)


@dataclass(frozen=True)
class OfferedCheckpoint:
    """A checkpoint of some stage that a peer can give from its disk."""

    stage: int
    kept: Kept


@dataclass(frozen=True)
class Progress:
    """A peer's report of its progress; ``protos/training.proto`` describes the fields."""

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
    micro_batches: bytes = b""
    accepted: bytes = b""
    decided: bytes = b""
    kept: Kept | None = None
    replica: Kept | None = None
    shared: Kept | None = None
    may_move: bool = False
    next_stage: int | None = None
    excludes: tuple[str, ...] = ()
    skipped_batches: int = 0
    offers: tuple[OfferedCheckpoint, ...] = ()
    squared_norm: tuple[float, ...] = ()
    global_squared_norm: float | None = None
    held_out: HeldOutLoss | None = None
    newest_held_out: HeldOutLoss | None = None
    best_held_out: HeldOutLoss | None = None
    has_ended: bool = False
    best: Kept | None = None

    @property
    def counts_exactly(self) -> bool:
        """Return whether the batch consists of named micro-batches, each of which counts once."""
        return bool(self.micro_batches)

    @property
    def holds(self) -> bool:
        """Return whether the peer holds the decided average of its moment, and waits for peers of other runs."""
        return bool(self.decided)

    @property
    def moment(self) -> Moment:
        return Moment(self.rollbacks, self.step)

    @property
    def is_reachable(self) -> bool:
        return bool(self.address)

    def to_proto(self) -> pb.Progress:
        message = pb.Progress(wire_version=WIRE_VERSION, **{name: getattr(self, name) for name in _FIELDS})
        for name in _MESSAGES:
            if (value := getattr(self, name)) is not None:
                getattr(message, name).CopyFrom(value.to_proto())
        message.offers.extend(
            pb.StageCheckpoint(stage=offer.stage, checkpoint=offer.kept.to_proto()) for offer in self.offers
        )
        return message

    @classmethod
    def from_proto(cls, message: pb.Progress) -> Progress:
        """Return the record. Raise ValueError if a field is out of range, since records come from strangers."""
        if message.wire_version != WIRE_VERSION:
            raise ValueError(f"the peer speaks version {message.wire_version} of training, and not {WIRE_VERSION}")
        names = [name for name in _MESSAGES if message.HasField(name)]
        inner: dict[str, Any] = {name: _MESSAGES[name].from_proto(getattr(message, name)) for name in names}
        fields = {name: getattr(message, name) for name in _FIELDS}
        fields |= {name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL}
        fields |= {name: tuple(getattr(message, name)) for name in _REPEATED}
        offers = message.offers[:MAX_OFFERS]
        fields["offers"] = tuple(OfferedCheckpoint(offer.stage, Kept.from_proto(offer.checkpoint)) for offer in offers)
        record = cls(**fields, **inner)
        _check(record)
        return record


def _check(record: Progress) -> None:
    """Raise ValueError if a field of the record is out of range."""
    if not all(0 <= number < inf for number in (record.samples_per_s, record.call_s, record.share)):
        raise ValueError("a number in a record of progress is not finite, or negative")
    if not record.loss > -inf:
        raise ValueError("the loss in a record of progress is no number")
    if not 1 <= record.target_batch_size <= _MAX_COUNT:  # views divide by it
        raise ValueError("the batch in a record of progress has no samples, or too many")
    if max(getattr(record, name) for name in _COUNTS) > _MAX_COUNT or record.state not in pb.PeerState.values():
        raise ValueError("a number in a record of progress is out of range")
    if not is_squared_norm(record.squared_norm) or not is_squared_norm((record.global_squared_norm or 0.0,)):
        raise ValueError("a norm in a record of progress is no number, or negative")
    if not _fits_batch(record):
        raise ValueError("the micro-batches in a record of progress are not a part of its batch")
    _check_names(record)


def _check_names(record: Progress) -> None:
    if any(len(text) > _MAX_TEXT or not text.isprintable() for text in (record.run, record.address)):
        raise ValueError("a name in a record of progress is too long, or not printable")
    if len(record.excludes) > MAX_EXCLUDED or not all(map(_is_peer_id, record.excludes)):
        raise ValueError(f"a record of progress excludes others than up to {MAX_EXCLUDED} peers")


def is_squared_norm(parts: tuple[float, ...]) -> bool:
    """Return whether these are few numbers with a sum of at least 0, or infinity alone."""
    if not all(abs(part) <= _MAX_PART for part in parts):
        return parts == (inf,)
    return len(parts) <= _MAX_PARTS and fsum(parts) >= 0


def _is_peer_id(text: str) -> bool:
    return 0 < len(text) <= _MAX_PEER_ID and text.isascii() and text.isalnum()


def _fits_batch(record: Progress) -> bool:
    bits, size = record.micro_batches, record.target_batch_size
    return not bits or (size <= MAX_MICRO_BATCHES and fits(bits, size) and size_of(bits) == record.samples)


_MESSAGES: Final[dict[str, Any]] = {
    **dict.fromkeys(("kept", "replica", "shared", "best"), Kept),
    **dict.fromkeys(("held_out", "newest_held_out", "best_held_out"), HeldOutLoss),
}
_COUNTS: Final = ("version", "step", "samples", "loss_samples", "bytes_sent", "bytes_received", "skipped_batches")
_OPTIONAL: Final = ("next_stage", "global_squared_norm")
_REPEATED: Final = ("excludes", "squared_norm")
_FIELDS = [each.name for each in dataclasses.fields(Progress) if each.name not in (*_MESSAGES, "offers")]
