"""What a peer's BTARD machine wants done by whoever holds the tensors and the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm_training.robust.messages import Case, Item, Message, Round


@dataclass(frozen=True)
class Finished:
    """The round of a step that counted: what its audits refer to.

    ``commitments``: digests of parts by worker, newcomers' too; ``projections``: what the workers said.
    """

    round: Round
    commitments: Mapping[str, tuple[bytes, ...]]
    projections: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Broadcast:
    message: Message


@dataclass(frozen=True)
class Compute:
    """Computes one's gradient of this step, if that is not done yet, and splits it among the owners: ``Computed``.

    ``contributes``: a validator does not, and has no parts.
    """

    round: Round
    contributes: bool


@dataclass(frozen=True)
class SendGradient:
    """To the validator: one's parts of the last step."""

    to: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class SendParts:
    """To their owners."""

    round: Round


@dataclass(frozen=True)
class Aggregate:
    """One's own part, from all workers': ``Aggregated``."""

    round: Round


@dataclass(frozen=True)
class SendAggregate:
    """One's own part, to all."""

    round: Round


@dataclass(frozen=True)
class Open:
    """Broadcasts parts of one's own, with their data: as evidence, or because their owner lacks them."""

    round: Round
    items: tuple[Item, ...]
    is_evidence: bool


@dataclass(frozen=True)
class OpenAggregate:
    """Broadcasts one's aggregate with its data."""

    round: Round


@dataclass(frozen=True)
class Project:
    """One's parts on random directions: ``Projected``."""

    round: Round


@dataclass(frozen=True)
class Check:
    """What others said of one's part, if one is an owner, and the target of one's audit: ``Checked``."""

    round: Round
    projections: Mapping[str, tuple[float, ...]]
    target: str | None
    last: Finished | None


@dataclass(frozen=True)
class Measure:
    """Every case's suspects, from evidence: ``Measured``."""

    round: Round
    projections: Mapping[str, tuple[float, ...]]
    last: Finished | None
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Remove:
    """The peer takes part no more. ``is_banned``: it has lied; else it was silent, and may return as a newcomer."""

    peer: str
    reason: str
    is_banned: bool


@dataclass(frozen=True)
class Finish:
    """The aggregates of this round are the step's gradient."""

    round: Round


Instruction = (
    Broadcast
    | Compute
    | SendGradient
    | SendParts
    | Aggregate
    | SendAggregate
    | Open
    | OpenAggregate
    | Project
    | Check
    | Measure
    | Remove
    | Finish
)
