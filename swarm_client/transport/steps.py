"""A session's inputs as messages, cut into steps that keep every server of the chain busy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import BlockInput, ends_of_runs, longest_run, most_tokens
from swarm_protocol.wire.codec import decode
from swarm_protocol.wire.constants import (
    MAX_JOINED,
    MAX_RESENT,
    MAX_RESENT_BYTES,
    MAX_RESENT_STEPS,
    PAGE_TOKENS,
    PART_BYTES,
)

_CHUNKS_PER_HOP = 4  # chunks of a prompt: while the pipeline fills and drains, about one part in this many is lost
_IN_ONE_PIECE = 1 << 30  # a hop with this limit or more must get all positions of a prompt in one step


@dataclass(frozen=True)
class OutgoingStep:
    """A step as it is sent to a server. Hidden states larger than one message have further ``parts``."""

    message: pb.Step
    parts: tuple[bytes, ...]

    @property
    def number(self) -> int:
        return self.message.number

    @property
    def start(self) -> int:
        return self.message.start_position

    @property
    def end(self) -> int:
        """Return the position after the last one."""
        return self.message.start_position + self.message.hidden.shape[1]

    @property
    def num_positions(self) -> int:
        """Return the number of positions in all rows."""
        return self.message.hidden.shape[0] * self.message.hidden.shape[1]

    def fits(self, max_step_tokens: int) -> bool:
        """Return whether a server with this limit takes the step."""
        batch_size, num_tokens = self.message.hidden.shape[:2]
        joined = decode(self.message.joined) if self.message.HasField("joined") else None
        return num_tokens <= most_tokens(max_step_tokens, batch_size, joined)

    def with_hidden(self, hidden: WireTensor) -> OutgoingStep:
        """Return the same step with these hidden states, for another hop."""
        message = pb.Step()
        message.CopyFrom(self.message)
        message.hidden.CopyFrom(hidden.header)
        return OutgoingStep(message, hidden.parts)

    def without_data(self) -> pb.Step:
        """Return the message without hidden states, for a server that has kept them."""
        message = pb.Step()
        message.CopyFrom(self.message)
        message.hidden.ClearField("data")
        message.ClearField("settled")
        return message


def chunk_size(num_tokens: int, batch_size: int, limits: Sequence[int], num_slow_links: int = 0) -> int:
    """Return the positions per row and step for ``num_tokens`` new ones; ``limits``: rows × positions of each hop.

    A slow link counts as a hop: one step travels while others are computed.
    """
    size, num_stages = min(limits), len(limits) + num_slow_links
    if num_stages > 1 and size < _IN_ONE_PIECE:
        even = -(-num_tokens // (_CHUNKS_PER_HOP * num_stages))
        size = min(size, batch_size * -(-even // PAGE_TOKENS) * PAGE_TOKENS)
    size = max(1, size // batch_size)
    return size - size % PAGE_TOKENS if size > PAGE_TOKENS else size


def split(
    inputs: BlockInput,
    *,
    start: int,
    number: int,
    size: int,
    codec: pb.Codec,
    changes: Sequence[pb.Change] = (),
    num_wanted: int = 0,
    every_block: bool = False,
) -> list[OutgoingStep]:
    """Return steps of ``size`` positions for inputs that begin at position ``start``, numbered from ``number``.

    ``changes`` go with the first step. The last ``num_wanted`` outputs will be used; with ``every_block``, the servers
    also send all outputs of every block. A step does not end within a run (see ``BlockInput.joined``), so it may have
    more positions.

    Raises:
        RequestRejected: a run has more positions than any step may have.
    """
    num_tokens = inputs.hidden.shape[1]
    _require_runs_fit(inputs.joined)
    steps: list[OutgoingStep] = []
    for first, last in pairwise((0, *_ends(inputs.joined, start, num_tokens, size))):
        mask, positions, joined = inputs.attention_mask, inputs.position_ids, _part(inputs.joined, first, last)
        if positions is not None and num_tokens == 1 and all(row == [start] for row in positions.tolist()):
            positions = None  # servers number the positions themselves
        context = Context.of(
            BlockInput(
                inputs.hidden,
                None if mask is None else mask[:, : start + last],
                None if positions is None else positions[:, first:last],
                joined=joined,
            )
        )
        tokens = slice(first, last)
        new = BlockInput(inputs.hidden[:, tokens], additions=inputs.additions_at(tokens))
        hidden = WireTensor.of(new.stacked, codec)
        message = pb.Step(
            number=number + len(steps),
            changes=changes if first == 0 else (),
            start_position=start + first,
            hidden=hidden.header,
            attention_mask=context.attention_mask,
            position_ids=context.position_ids,
            outputs_wanted=max(0, last - max(first, num_tokens - num_wanted)),
            every_block=every_block,
            following_tokens=num_tokens - last,
            joined=context.joined,
        )
        steps.append(OutgoingStep(message, hidden.parts))
    return steps


def _ends(joined: torch.Tensor | None, start: int, num_tokens: int, size: int) -> Iterator[int]:
    """Yield the ends of steps of ``size`` positions. An end within a run moves behind the run.

    From there it moves on to the end of a page if possible, so that later steps begin at pages, which servers share.
    """
    may_end = range(1, num_tokens + 1) if joined is None else ends_of_runs(joined)
    end = 0
    while end < num_tokens:
        wanted = min(end + size, num_tokens)
        end = may_end[bisect_left(may_end, wanted)]
        if end > wanted and size >= PAGE_TOKENS:
            of_page = min(start + end + -(start + end) % PAGE_TOKENS - start, num_tokens)
            end = of_page if may_end[bisect_left(may_end, of_page)] == of_page else end
        yield end


def _require_runs_fit(joined: torch.Tensor | None) -> None:
    longest = 1 if joined is None else longest_run(joined)
    if joined is not None and longest > 1 and longest * len(joined) > MAX_JOINED:
        raise RequestRejected(
            f"{longest} positions in {len(joined)} rows, as of a picture, attend to each other and are computed in one "
            f"step: expected at most {MAX_JOINED} in all; use fewer rows or a smaller picture"
        )


def _part(joined: torch.Tensor | None, first: int, last: int) -> torch.Tensor | None:
    part = None if joined is None else joined[:, first:last]
    return part if part is not None and bool(part.any()) else None


def may_be_resent(steps: Sequence[pb.Step]) -> bool:
    """Return whether a server accepts these steps without data in a reroute."""
    return len(steps) <= MAX_RESENT_STEPS and sum(step.ByteSize() for step in steps) <= MAX_RESENT_BYTES


def in_messages(steps: Sequence[pb.Step]) -> Iterator[list[pb.Step]]:
    """Yield steps without data in groups that fit into one message each."""
    message: list[pb.Step] = []
    size_bytes = 0
    for step in steps:
        step_bytes = step.ByteSize()
        if message and (len(message) == MAX_RESENT or size_bytes + step_bytes > PART_BYTES):
            yield message
            message, size_bytes = [], 0
        message.append(step)
        size_bytes += step_bytes
    if message:
        yield message
