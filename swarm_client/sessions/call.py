"""The positions that one step of a session adds, and what has become of them so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarm_client.failover.journal import Journal
from swarm_client.failover.replay import Taken
from swarm_client.transport.steps import OutgoingStep
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import BlockInput


@dataclass
class Call:
    """One call of ``RemoteSession.step``.

    Attributes:
        inputs: [batch, new, hidden_size] and what belongs to them; of the outputs, the last ``num_wanted`` are wanted.
        before: what the servers know; ``after``: with the rows changed by ``changes``, and the inputs.
        steps: the inputs, cut for the chain.
        outputs: by the step's number; None if none are wanted.
        num_refusals: steps that servers have refused because of the server before.
        is_optional: it is given up where a server has no room for it, rather than made with other servers, or later.
        watched: the blocks whose outputs are wanted besides; ``block_outputs``: those, by block and the step's number.
    """

    inputs: BlockInput
    num_wanted: int
    before: Journal
    after: Journal
    changes: Sequence[pb.Change]
    steps: list[OutgoingStep] = field(default_factory=list)
    outputs: dict[int, torch.Tensor | None] = field(default_factory=dict)
    num_refusals: int = 0
    watched: range = range(0)
    is_optional: bool = False
    block_outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @property
    def start(self) -> int:
        return self.after.length - self.inputs.hidden.shape[1]

    @property
    def first_number(self) -> int:
        return self.steps[0].number

    @property
    def answered(self) -> int:
        """Number of the last step whose outputs are here, as are those of all before."""
        missing = (step.number for step in self.steps if step.number not in self.outputs)
        return next(missing, self.steps[-1].number + 1) - 1

    @property
    def complete(self) -> bool:
        num_steps = len(self.steps)
        return (
            num_steps > 0
            and len(self.outputs) == num_steps
            and len(self.block_outputs) == num_steps * len(self.watched)
        )

    @property
    def taken(self) -> list[Taken]:
        reordered = any(change.WhichOneof("kind") == "reorder" for change in self.changes)
        return [Taken(step.number, step.start, step.end, reordered and step is self.steps[0]) for step in self.steps]

    def step(self, number: int) -> OutgoingStep | None:
        index = number - self.first_number
        return self.steps[index] if 0 <= index < len(self.steps) else None

    def forget_outputs(self) -> None:
        self.outputs.clear()
        self.block_outputs.clear()

    def output_of(self, block: int) -> torch.Tensor:
        """[batch, new, hidden_size], once the call is complete."""
        return torch.cat([self.block_outputs[block, step.number] for step in self.steps], 1)

    def output(self) -> torch.Tensor:
        """[batch, num_wanted, hidden_size], once the call is complete."""
        outputs = (self.outputs[step.number] for step in self.steps)
        return torch.cat([output for output in outputs if output is not None], 1)
