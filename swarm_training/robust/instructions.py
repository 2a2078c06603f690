"""The instructions that a peer's BTARD machine gives to the code that holds the tensors and the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm_training.robust.messages import BroadcastMessage, Case, Item, RobustRound


@dataclass(frozen=True)
class StepRecord:
    """The record of a step that counted, to which its audits refer.

    ``commitments``: digests of parts by worker, including newcomers; ``projections``: the published ones, by worker.
    """

    round: RobustRound
    commitments: Mapping[str, tuple[bytes, ...]]
    projections: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Broadcast:
    message: BroadcastMessage


@dataclass(frozen=True)
class Compute:
    """The instruction to compute this peer's gradient, once a step, and split it among the owners; gives ``Computed``.

    ``contributes``: False for a validator, which computes no gradient and has no parts.
    """

    round: RobustRound
    contributes: bool


@dataclass(frozen=True)
class SendGradient:
    """The instruction to send this peer's parts of the last step to the validator ``to``."""

    to: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class SendParts:
    """The instruction to send this peer's parts to their owners."""

    round: RobustRound


@dataclass(frozen=True)
class Aggregate:
    """The instruction to aggregate this peer's part from the parts of all workers; gives ``Aggregated``."""

    round: RobustRound


@dataclass(frozen=True)
class SendAggregate:
    """The instruction to send the aggregate of this peer's part to all peers."""

    round: RobustRound


@dataclass(frozen=True)
class OpenParts:
    """The instruction to broadcast this peer's parts with their data, as evidence or because their owner lacks them."""

    round: RobustRound
    items: tuple[Item, ...]
    is_evidence: bool


@dataclass(frozen=True)
class OpenAggregate:
    """The instruction to broadcast this peer's aggregate with its data."""

    round: RobustRound


@dataclass(frozen=True)
class Project:
    """The instruction to project this peer's parts on random directions; gives ``Projected``."""

    round: RobustRound


@dataclass(frozen=True)
class CheckProjections:
    """The instruction to check all projections of this peer's part, and the audited target; gives ``Checked``."""

    round: RobustRound
    projections: Mapping[str, tuple[float, ...]]
    target: str | None
    last: StepRecord | None


@dataclass(frozen=True)
class Measure:
    """The instruction to measure the suspects of every case from the evidence; gives ``MeasuredCases``."""

    round: RobustRound
    projections: Mapping[str, tuple[float, ...]]
    last: StepRecord | None
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Remove:
    """The removal of a peer. ``is_banned``: the peer has lied; otherwise it may return as a newcomer."""

    peer: str
    reason: str
    is_banned: bool


@dataclass(frozen=True)
class Finish:
    """The end of a step: the aggregates of this round are the step's gradient."""

    round: RobustRound


Instruction = (
    Broadcast
    | Compute
    | SendGradient
    | SendParts
    | Aggregate
    | SendAggregate
    | OpenParts
    | OpenAggregate
    | Project
    | CheckProjections
    | Measure
    | Remove
    | Finish
)
