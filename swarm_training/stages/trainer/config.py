"""The settings of a trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm_protocol.wire.constants import MIB
from swarm_training.stages.routing.router import RouterBackoff
from swarm_training.stages.rpc.client import WireForms


@dataclass(frozen=True)
class TrainerConfig:
    """The settings of a trainer's way through the stages."""

    forms: WireForms = field(default_factory=WireForms)  # the forms in which tensors travel
    backoff: RouterBackoff = field(default_factory=RouterBackoff)
    per_peer: float = 2.0  # the micro-batches under way for each peer of the swarm, of all trainers together
    max_under_way: int = 64  # the most micro-batches under way of this trainer, however many peers there are
    first_deadline_s: float = 60.0  # the time limit for an answer if it is unknown how long answers take
    least_deadline_s: float = 5.0  # the least time limit for any answer
    slack: float = 4.0  # the time limit for an answer, as a factor of its expected time, including what it waits for
    settle_s: float = 10.0  # the time in which a peer's record shows a commit
    steal_s: float = 20.0  # the time without progress before this trainer takes on micro-batches of other trainers
    # The most bytes of this step's inputs and gradients that are kept to replay a single stage.
    kept_bytes: int = 512 * MIB
    poll_s: float = 0.05  # the time between two looks at what the peers report
    # The share of answers that other peers of the stage compute too; the peers must know of it.
    audit_share: float = 0.0
    precision: str = "fp32"  # the precision in which peers compute, by which answers of two of them may differ
