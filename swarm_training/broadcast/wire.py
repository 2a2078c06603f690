"""The wire form of BTARD's broadcasts. The sender of a broadcast is the peer that has signed it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from swarm_training.pb import training_robust_pb2 as pb
from swarm_training.robust import messages as msg

MAX_SAID_BYTES = 1 << 19
_MAX_NAME = 128


@dataclass(frozen=True)
class StatementSlot:
    """The place of a statement: an honest peer makes one statement of each kind in each attempt.

    Attributes:
        kind: the name of the statement's field in ``Said``; for a vote it also names the phase.
    """

    step: int
    attempt: int
    kind: str


def place_of(said: pb.Said) -> StatementSlot:
    """Return the place of a statement. Raise ValueError if it says nothing, or votes on no phase."""
    kind = said.WhichOneof("kind")
    if kind is None:
        raise ValueError("a statement says nothing")
    if kind == "vote":
        field = pb.Said.DESCRIPTOR.fields_by_number.get(said.vote.phase)
        if field is None or field.name not in (*_READ, "welcome"):
            raise ValueError("a vote is on no phase")
        kind = vote_on(field.name)
    return StatementSlot(said.step, said.attempt, kind)


def vote_on(kind: str) -> str:
    return f"vote on {kind}"


def kind_of(phase: type[msg.BroadcastMessage]) -> str:
    return _KINDS[phase]


def parse(content: bytes) -> pb.Said:
    """Return the statement in these bytes. Raise ValueError if they are not a statement, or too many."""
    if len(content) > MAX_SAID_BYTES:
        raise ValueError(f"a statement has {len(content)} bytes: expected {MAX_SAID_BYTES} at most")
    try:
        return pb.Said.FromString(content)
    except DecodeError:
        raise ValueError("the bytes are no statement") from None


def to_said(message: msg.BroadcastMessage) -> pb.Said:
    """Return the wire form of a message, without the session."""
    said = pb.Said(step=message.step, attempt=message.attempt)
    match message:
        case msg.Commitment():
            content = pb.Commitment(seed_hash=message.seed_hash, distance=message.distance, parts=message.parts)
            said.commitment.CopyFrom(content)
        case msg.Receipt():
            said.receipt.CopyFrom(pb.Receipt(missing=message.missing))
        case msg.PartsOpened():
            said.parts_opened.CopyFrom(_opened(message))
        case msg.AggregateCommitted():
            said.aggregate_committed = message.digest
        case msg.Reveal():
            said.reveal.CopyFrom(pb.Reveal(seed=message.seed, missing=message.missing))
        case msg.AggregateOpened():
            said.aggregate_opened = message.digest
        case msg.Projections():
            said.projections.CopyFrom(pb.Projections(values=message.values))
        case msg.Accusations():
            said.accusations.CopyFrom(pb.Accusations(items=map(_accusation, message.items)))
        case msg.EvidenceOpened():
            said.evidence_opened.CopyFrom(_opened(message))
        case msg.Measurements():
            rows = [pb.Row(values=values) for values in message.values]
            said.measurements.CopyFrom(pb.Measurements(rows=rows))
    return said


def to_message(sender: str, said: pb.Said) -> msg.BroadcastMessage:
    """Return the message. Raise ValueError if a name in it is too long; the state machine checks the rest."""
    kind = said.WhichOneof("kind")
    assert kind in _READ, kind
    return _READ[kind]((sender, said.step, said.attempt), said)


def digests_of(said: pb.Said) -> tuple[bytes, ...]:
    """Return the digests of the data that must be present for the statement to count."""
    match said.WhichOneof("kind"):
        case "parts_opened":
            return tuple(said.parts_opened.digests)
        case "evidence_opened":
            return tuple(said.evidence_opened.digests)
        case "aggregate_opened":
            return (said.aggregate_opened,)
    return ()


Stamp = tuple[str, int, int]


def _opened(message: msg.PartsOpened | msg.EvidenceOpened) -> pb.Opened:
    items = [pb.Item(step=i.step, attempt=i.attempt, worker=i.worker, owner=i.owner) for i in message.items]
    return pb.Opened(items=items, digests=message.digests)


def _items(opened: pb.Opened) -> tuple[msg.Item, ...]:
    return tuple(msg.Item(i.step, i.attempt, _name(i.worker), _name(i.owner)) for i in opened.items)


def _accusation(accusation: msg.Accusation) -> pb.Accusation:
    measured = accusation.measured or 0.0
    match accusation.case:
        case msg.FalseProjection(worker, owner):
            return pb.Accusation(case=pb.Accusation.FALSE_PROJECTION, worker=worker, owner=owner, measured=measured)
        case msg.FalseGradient(worker):
            return pb.Accusation(case=pb.Accusation.FALSE_GRADIENT, worker=worker, measured=measured)
    raise AssertionError(accusation)


def _read_accusation(accusation: pb.Accusation) -> msg.Accusation:
    worker, measured = _name(accusation.worker), accusation.measured or None
    if accusation.case == pb.Accusation.FALSE_PROJECTION:
        return msg.Accusation(msg.FalseProjection(worker, _name(accusation.owner)), measured)
    return msg.Accusation(msg.FalseGradient(worker), measured)


def _name(text: str) -> str:
    if len(text) > _MAX_NAME:
        raise ValueError(f"a name in a statement has {len(text)} characters: expected {_MAX_NAME} at most")
    return text


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(_name, texts))


_READ: Mapping[str, Callable[[Stamp, pb.Said], msg.BroadcastMessage]] = {
    "commitment": lambda stamp, said: msg.Commitment(
        *stamp, said.commitment.seed_hash, said.commitment.distance, tuple(said.commitment.parts)
    ),
    "receipt": lambda stamp, said: msg.Receipt(*stamp, _names(said.receipt.missing)),
    "parts_opened": lambda stamp, said: msg.PartsOpened(
        *stamp, _items(said.parts_opened), tuple(said.parts_opened.digests)
    ),
    "aggregate_committed": lambda stamp, said: msg.AggregateCommitted(*stamp, said.aggregate_committed),
    "reveal": lambda stamp, said: msg.Reveal(*stamp, said.reveal.seed, _names(said.reveal.missing)),
    "aggregate_opened": lambda stamp, said: msg.AggregateOpened(*stamp, said.aggregate_opened),
    "projections": lambda stamp, said: msg.Projections(*stamp, tuple(said.projections.values)),
    "accusations": lambda stamp, said: msg.Accusations(*stamp, tuple(map(_read_accusation, said.accusations.items))),
    "evidence_opened": lambda stamp, said: msg.EvidenceOpened(
        *stamp, _items(said.evidence_opened), tuple(said.evidence_opened.digests)
    ),
    "measurements": lambda stamp, said: msg.Measurements(
        *stamp, tuple(tuple(row.values) for row in said.measurements.rows)
    ),
}
_KINDS: Mapping[type[msg.BroadcastMessage], str] = {
    msg.Commitment: "commitment",
    msg.Receipt: "receipt",
    msg.PartsOpened: "parts_opened",
    msg.AggregateCommitted: "aggregate_committed",
    msg.Reveal: "reveal",
    msg.AggregateOpened: "aggregate_opened",
    msg.Projections: "projections",
    msg.Accusations: "accusations",
    msg.EvidenceOpened: "evidence_opened",
    msg.Measurements: "measurements",
}
KINDS = frozenset(_READ)  # the kinds that the state machine knows
