"""The instructions that a peer's BTARD machine gives to the code that holds the tensors and the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm_training.robust.messages import Case, Item, Message, Round


@dataclass(frozen=True)
class Finished:
    """The record of a step that counted, to which its audits refer.

    ``commitments``: digests of parts by worker, including newcomers; ``projections``: the published ones, by worker.
    """

    round: Round
    commitments: Mapping[str, tuple[bytes, ...]]
    projections: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Broadcast:
    message: Message


@dataclass(frozen=True)
class Compute:
    """The instruction to compute this peer's gradient, once a step, and split it among the owners; gives ``Computed``.

    ``contributes``: False for a validator, which computes no gradient and has no parts.
    """

    round: Round
    contributes: bool


@dataclass(frozen=True)
class SendGradient:
    """The instruction to send this peer's parts of the last step to the validator ``to``."""

    to: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class SendParts:
    """The instruction to send this peer's parts to their owners."""

    round: Round


@dataclass(frozen=True)
class Aggregate:
    """The instruction to aggregate this peer's part from the parts of all workers; gives ``Aggregated``."""

    round: Round


@dataclass(frozen=True)
class SendAggregate:
    """The instruction to send the aggregate of this peer's part to all peers."""

    round: Round


@dataclass(frozen=True)
class Open:
    """The instruction to broadcast this peer's parts with their data, as evidence or because their owner lacks them."""

    round: Round
    items: tuple[Item, ...]
    is_evidence: bool


@dataclass(frozen=True)
class OpenAggregate:
    """The instruction to broadcast this peer's aggregate with its data."""

    round: Round


@dataclass(frozen=True)
class Project:
    """The instruction to project this peer's parts on random directions; gives ``Projected``."""

    round: Round


@dataclass(frozen=True)
class Check:
    """The instruction to check all projections of this peer's part, and the audited target; gives ``Checked``."""

    round: Round
    projections: Mapping[str, tuple[float, ...]]
    target: str | None
    last: Finished | None


@dataclass(frozen=True)
class Measure:
    """The instruction to measure the suspects of every case from the evidence; gives ``Measured``."""

    round: Round
    projections: Mapping[str, tuple[float, ...]]
    last: Finished | None
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
