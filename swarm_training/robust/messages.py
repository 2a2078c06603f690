"""The messages that peers broadcast in BTARD, and the events that a peer's machine handles. No tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RobustRound:
    """One attempt at a step, as far as it is known.

    Attributes:
        owners: peers that aggregate one part of the gradient each, in the order of the parts.
        workers: the owners that contribute gradients; the other owners are validators in this step.
        tau: the clipping radius of CenteredClip for whole gradients; a part has its share of it.
        seed: the seed of the random directions and the next audits; empty until it is revealed.
    """

    step: int
    attempt: int
    owners: tuple[str, ...]
    workers: tuple[str, ...] = ()
    tau: float = 0.0
    seed: bytes = b""


@dataclass(frozen=True)
class Item:
    """The name of one part of a worker's gradient, which ``owner`` aggregates."""

    step: int
    attempt: int
    worker: str
    owner: str


# ---------------------------------------------------------------- what can be wrong


@dataclass(frozen=True)
class FalseProjection:
    """The charge that a worker published a false projection of its part for the owner, in this round."""

    worker: str
    owner: str


@dataclass(frozen=True)
class FalseAggregate:
    """The charge that the projections on an owner's part do not add up to 0, in this round."""

    owner: str


@dataclass(frozen=True)
class FalseGradient:
    """The charge that a worker contributed a false gradient to the last step, or published false projections of it."""

    worker: str


Case = FalseProjection | FalseAggregate | FalseGradient


@dataclass(frozen=True)
class Accusation:
    """A peer's accusation. ``measured``: the error in units of the tolerance; None: the data was not shown."""

    case: Case
    measured: float | None


# ---------------------------------------------------------------- broadcasts, signed by their senders


@dataclass(frozen=True)
class BroadcastMessage:
    sender: str
    step: int
    attempt: int


@dataclass(frozen=True)
class Commitment(BroadcastMessage):
    """A peer's commitment, made before the peer has seen another one.

    ``parts``: digests, none if it is a validator; ``distance``: of its gradient to the last result.
    """

    seed_hash: bytes
    distance: float
    parts: tuple[bytes, ...]


@dataclass(frozen=True)
class Receipt(BroadcastMessage):
    """An owner's list of the workers whose parts have not come, or are not the committed ones."""

    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartsOpened(BroadcastMessage):
    """Parts that an owner lacks, opened to all peers. The receiver computes the digests from the data."""

    items: tuple[Item, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class AggregateCommitted(BroadcastMessage):
    """An owner's commitment to its aggregate, before the seed is known."""

    digest: bytes


@dataclass(frozen=True)
class Reveal(BroadcastMessage):
    """An owner's share of the seed. ``missing``: owners whose aggregates have not come, or are the wrong ones."""

    seed: bytes
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class AggregateOpened(BroadcastMessage):
    """An aggregate that some owner lacks, opened to all peers."""

    digest: bytes


@dataclass(frozen=True)
class Projections(BroadcastMessage):
    """A worker's projections: ⟨z_j, clip(g_ij − v_j)⟩ for every owner j."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Accusations(BroadcastMessage):
    """The accusations of one owner or validator; usually none."""

    items: tuple[Accusation, ...] = ()


@dataclass(frozen=True)
class EvidenceOpened(BroadcastMessage):
    """Parts that a jury needs, opened to all peers."""

    items: tuple[Item, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Measurements(BroadcastMessage):
    """A juror's measurements: for every case, how far each suspect is off, in units of the tolerance."""

    values: tuple[tuple[float, ...], ...]


# ---------------------------------------------------------------- what has happened


@dataclass(frozen=True)
class Begin:
    """The beginning of a step. ``secret``: 32 random bytes of this peer; ``joined``: newcomers since the last step."""

    step: int
    secret: bytes
    joined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Received:
    """A broadcast, possibly this peer's own. All honest peers receive the same ones before the same deadline."""

    message: BroadcastMessage


@dataclass(frozen=True)
class Computed:
    """This peer's gradient: the digests of its parts, and its distance to the last aggregate."""

    round: RobustRound
    parts: tuple[bytes, ...]
    distance: float


@dataclass(frozen=True)
class PartArrived:
    item: Item
    digest: bytes


@dataclass(frozen=True)
class Aggregated:
    """The digest of the aggregate that this peer has computed."""

    round: RobustRound
    digest: bytes


@dataclass(frozen=True)
class AggregateArrived:
    step: int
    attempt: int
    owner: str
    digest: bytes


@dataclass(frozen=True)
class Projected:
    round: RobustRound
    values: tuple[float, ...]


@dataclass(frozen=True)
class Checked:
    """The results of this peer's checks, in units of the tolerance; None: the data was not shown."""

    round: RobustRound
    measured: tuple[tuple[Case, float | None], ...]


@dataclass(frozen=True)
class MeasuredCases:
    round: RobustRound
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Late:
    """The end of the time for data that only this peer waits for."""


@dataclass(frozen=True)
class Deadline:
    """The end of the time for broadcasts of this phase."""


Event = (
    Begin
    | Received
    | Computed
    | PartArrived
    | Aggregated
    | AggregateArrived
    | Projected
    | Checked
    | MeasuredCases
    | Late
    | Deadline
)


def place(event: Event) -> tuple[int, int]:
    """Return the step and attempt of an event that belongs to an attempt."""
    match event:
        case Received(message):
            return message.step, message.attempt
        case PartArrived(item):
            return item.step, item.attempt
        case AggregateArrived():
            return event.step, event.attempt
        case Computed() | Aggregated() | Projected() | Checked() | MeasuredCases():
            return event.round.step, event.round.attempt
    raise AssertionError(event)
