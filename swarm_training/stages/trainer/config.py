"""The settings of a trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_protocol.wire.constants import MIB
from swarm_training.stages.routing.router import RouterBackoff
from swarm_training.stages.rpc.client import WireForms


@dataclass(frozen=True)
class TrainerConfig:
    """The settings of a trainer's way through the stages.

    Attributes:
        forms: the forms in which tensors travel.
        per_peer: the micro-batches under way for each peer of the swarm, of all trainers together.
        max_under_way: the most micro-batches under way of this trainer, however many peers there are.
        first_deadline_s: the time limit for an answer if it is unknown how long answers take.
        least_deadline_s: the least time limit for any answer.
        slack: the time limit for an answer, as a factor of its expected time, including what it waits for.
        settle_s: the time in which a peer's record shows a commit.
        steal_s: the time without progress before this trainer takes on micro-batches of other trainers.
        kept_bytes: the most bytes of this step's inputs and gradients that are kept to replay a single stage.
        poll_s: the time between two looks at what the peers report.
        audit_share: the share of answers that other peers of the stage compute too; the peers must know of it.
        precision: the precision in which peers compute, by which answers of two of them may differ.
    """

    forms: WireForms = field(default_factory=WireForms)
    backoff: RouterBackoff = field(default_factory=RouterBackoff)
    per_peer: float = 2.0
    max_under_way: int = 64
    first_deadline_s: float = 60.0
    least_deadline_s: float = 5.0
    slack: float = 4.0
    settle_s: float = 10.0
    steal_s: float = 20.0
    kept_bytes: int = 512 * MIB
    poll_s: float = 0.05
    audit_share: float = 0.0
    precision: str = "fp32"
