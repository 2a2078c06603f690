"""One call of a session: the positions that it adds, and the outputs that have arrived so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarm_client.failover.journal import Journal
from swarm_client.failover.replay import Taken
from swarm_client.transport.steps import OutgoingStep, split
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import BlockInput


@dataclass
class SessionCall:
    """One call of ``RemoteSession.step``.

    Attributes:
        inputs: hidden states [batch, new, hidden_size], mask and positions; the last ``num_wanted`` outputs are used.
        before: the journal that the servers know; ``after`` adds the call's ``changes`` and inputs to it.
        steps: the inputs, cut into steps for the chain.
        outputs: the outputs by step number; None if the step's outputs are not wanted.
        num_refusals: how often servers have refused a step because of the server before them.
        is_optional: whether the call is given up if a server has no room, instead of waiting or using other servers.
        watched: the blocks whose outputs are also wanted; ``block_outputs`` has them by block and step number.
        repeats: the row of the call that each row of the batch repeats, because their inputs are equal; empty if every
            row of the batch is a row of the call.
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
    repeats: Sequence[int] = ()

    @property
    def num_copies(self) -> int:
        """Return how many rows of the batch are not rows of the call. Servers get them later, as copies."""
        return len(self.repeats) - len(self.inputs.hidden) if self.repeats else 0

    def apply_changes(self) -> None:
        """Count the changes as known to the servers, because new hops get the reordered and cropped rows."""
        self.before, self.changes = self.after.cropped(self.start), ()

    def cut(self, number: int, size: int, codec: pb.Codec) -> None:
        """Cut the inputs into steps of ``size`` positions per row, numbered from ``number``."""
        self.steps = split(
            self.inputs,
            start=self.start,
            number=number,
            size=size,
            codec=codec,
            changes=self.changes,
            num_wanted=self.num_wanted,
            every_block=bool(self.watched),
        )

    def count_refusal(self) -> int:
        """Count a step that a server has refused because of the server before it, and return ``num_refusals``."""
        self.num_refusals += 1
        return self.num_refusals

    @property
    def start(self) -> int:
        return self.after.length - self.inputs.hidden.shape[1]

    @property
    def first_number(self) -> int:
        return self.steps[0].number

    @property
    def answered(self) -> int:
        """Return the number of the last step before the first one without outputs."""
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
        """Return the block's outputs, [batch, new, hidden_size], once the call is complete."""
        return torch.cat([self.block_outputs[block, step.number] for step in self.steps], 1)

    def output(self) -> torch.Tensor:
        """Return the wanted outputs, [batch, num_wanted, hidden_size], once the call is complete."""
        outputs = (self.outputs[step.number] for step in self.steps)
        return torch.cat([output for output in outputs if output is not None], 1)

    def output_of_batch(self) -> torch.Tensor:
        """Return ``output`` for every row of the batch, including the rows that repeat others."""
        return self.output()[list(self.repeats)] if self.repeats else self.output()
