"""What peers broadcast in BTARD, what a peer's machine is told, and what it wants done. Data alone, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One attempt at a step, as far as it is known.

    Attributes:
        owners: who aggregates a part of the gradient each, in the parts' order.
        workers: those of them who contribute gradients; the others are validators in this step.
        tau: of CenteredClip, for whole gradients; a part has its share of it.
        seed: of the random directions and the next audits; empty until it is revealed.
    """

    step: int
    attempt: int
    owners: tuple[str, ...]
    workers: tuple[str, ...] = ()
    tau: float = 0.0
    seed: bytes = b""


@dataclass(frozen=True)
class Item:
    """A worker's part for an owner."""

    step: int
    attempt: int
    worker: str
    owner: str


# ---------------------------------------------------------------- what can be wrong


@dataclass(frozen=True)
class FalseProjection:
    """Of the worker's part for the owner, in this round."""

    worker: str
    owner: str


@dataclass(frozen=True)
class FalseAggregate:
    """The projections on this owner's part do not add up to 0, in this round."""

    owner: str


@dataclass(frozen=True)
class FalseGradient:
    """What the worker contributed to the last step, or what it said of its projections there."""

    worker: str


Case = FalseProjection | FalseAggregate | FalseGradient


@dataclass(frozen=True)
class Accusation:
    """``measured``: in units of what is tolerated; None: the accused has not shown what it had to show."""

    case: Case
    measured: float | None


# ---------------------------------------------------------------- broadcasts, signed by their senders


@dataclass(frozen=True)
class Message:
    sender: str
    step: int
    attempt: int


@dataclass(frozen=True)
class Commitment(Message):
    """Before anybody has seen anything. ``parts``: digests, none of a validator; ``distance``: to the last result."""

    seed_hash: bytes
    distance: float
    parts: tuple[bytes, ...]


@dataclass(frozen=True)
class Receipt(Message):
    """Of an owner: whose parts have not come, or are not those that were committed."""

    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartsOpened(Message):
    """To everybody: parts that an owner lacks. Digests are those of the data, computed by who receives it."""

    items: tuple[Item, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class AggregateCommitted(Message):
    """Of an owner, before the seed is known."""

    digest: bytes


@dataclass(frozen=True)
class Reveal(Message):
    """Of the seed's share; ``missing``: owners whose aggregates have not come, or are not those that were committed."""

    seed: bytes
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class AggregateOpened(Message):
    """To everybody: an aggregate that somebody lacks."""

    digest: bytes


@dataclass(frozen=True)
class Projections(Message):
    """Of a worker: ⟨z_j, clip(g_ij − v_j)⟩ for every owner j."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Accusations(Message):
    """Of owners and validators; usually none."""

    items: tuple[Accusation, ...] = ()


@dataclass(frozen=True)
class EvidenceOpened(Message):
    """To everybody: parts that a jury needs."""

    items: tuple[Item, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Measurements(Message):
    """Of a juror: for every case, how far each suspect is off, in units of what is tolerated."""

    values: tuple[tuple[float, ...], ...]


# ---------------------------------------------------------------- what has happened


@dataclass(frozen=True)
class Begin:
    """A step begins. ``secret``: 32 random bytes of this peer's own; ``joined``: newcomers since the last step."""

    step: int
    secret: bytes
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Received:
    """A broadcast, one's own included. All honest peers receive the same ones before the same deadline."""

    message: Message


@dataclass(frozen=True)
class Computed:
    """One's own gradient: its parts' digests and its distance to the last aggregate."""

    round: Round
    parts: tuple[bytes, ...]
    distance: float


@dataclass(frozen=True)
class PartArrived:
    item: Item
    digest: bytes


@dataclass(frozen=True)
class Aggregated:
    """One's own part."""

    round: Round
    digest: bytes


@dataclass(frozen=True)
class AggregateArrived:
    step: int
    attempt: int
    owner: str
    digest: bytes


@dataclass(frozen=True)
class Projected:
    round: Round
    values: tuple[float, ...]


@dataclass(frozen=True)
class Checked:
    """What one had to check, in units of what is tolerated; None: it was not shown."""

    round: Round
    measured: tuple[tuple[Case, float | None], ...]


@dataclass(frozen=True)
class Measured:
    round: Round
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Late:
    """There is no more time for data that only this peer waits for."""


@dataclass(frozen=True)
class Deadline:
    """There is no more time for broadcasts of this phase."""


Event = (
    Begin
    | Received
    | Computed
    | PartArrived
    | Aggregated
    | AggregateArrived
    | Projected
    | Checked
    | Measured
    | Late
    | Deadline
)


def place(event: Event) -> tuple[int, int]:
    """Step and attempt of an event that belongs to one."""
    match event:
        case Received(message):
            return message.step, message.attempt
        case PartArrived(item):
            return item.step, item.attempt
        case AggregateArrived():
            return event.step, event.attempt
        case Computed() | Aggregated() | Projected() | Checked() | Measured():
            return event.round.step, event.round.attempt
    raise AssertionError(event)
