"""A stage peer as the services for trainers see it, and what it computes for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from swarm_protocol.errors import PeerMoved
from swarm_training.core.moment import Moment
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.rpc.answers import StageAnswer

if TYPE_CHECKING:
    from swarm_training.stages.engine.accumulator import Accumulator
    from swarm_training.stages.engine.stage import Stage, StageGradients
    from swarm_training.stages.peer.stage_peer import StagePeer


@dataclass(frozen=True)
class HostedStage:
    """A stage, its peer and its sums."""

    stage: Stage
    peer: StagePeer
    sums: Accumulator

    @property
    def moment(self) -> Moment:
        """Return the weights' moment, which changes in the compute thread alone. Raises PeerMoved before the peer has
        joined: its results may be anything."""
        if not self.peer.peer.own.state_digest:
            raise PeerMoved("this peer has not joined its stage yet")
        return self.peer.moment


def computed(
    stage: Stage, work: pb.Work, tensors: Mapping[str, Tensor], is_backward: bool
) -> tuple[StageAnswer, StageGradients | None]:
    """Return a stage's answer, and the gradients of a backward pass. Call it in the compute thread."""
    inputs, labels = tensors["inputs"], tensors.get("labels")
    if not is_backward:
        output = stage.forward(inputs, labels, keeps=not work.forward_only)
        loss_sum = 0.0 if output.loss_sum is None else float(output.loss_sum)
        return StageAnswer(output.hidden, loss_sum, output.num_tokens or 0), None
    scale = work.loss_scale if stage.is_last else 1.0
    found = stage.backward(inputs, labels, tensors.get("grad"), loss_scale=scale)
    tensor = found.inputs if work.wants_grad else None
    return StageAnswer(tensor, found.loss_sum or 0.0, found.num_tokens or 0), found
