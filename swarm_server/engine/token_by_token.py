"""Steps of one position at a time, for blocks whose code ignores the previous state if it gets several positions.

The Mamba scan in transformers takes no initial state: only a single position continues from the previous state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.session_state import SessionStep
from swarm_server.engine.ways import opened, outputs_of, same

if TYPE_CHECKING:
    from swarm_server.engine.engine import Engine


def can_go_on(engine: Engine) -> bool:
    """Return whether a sequence in two pieces gives the same outputs as the sequence in one piece."""
    hidden = torch.randn(1, 5, engine.hidden_size, generator=torch.Generator().manual_seed(0))
    outputs = []
    for bounds in ((0, 5), (0, 3, 5)):
        session = opened(engine, engine.layout.hosted)
        for start, end in itertools.pairwise(bounds):
            (output,) = outputs_of(engine, [(session, SessionStep(start, BlockInput(hidden[:, start:end])))])
        outputs.append(output[:, -2:])
    whole, parts = outputs
    return same(parts, whole)


def tokens_of(step: SessionStep) -> Iterator[SessionStep]:
    """Yield the step as one step per position, in order.

    Raises:
        RequestRejected: some new positions are padding, which is allowed only at the beginning of a session.
    """
    inputs = step.inputs
    mask, positions = inputs.attention_mask, inputs.position_ids
    if mask is not None and not bool(mask[:, step.start :].all()):
        raise RequestRejected("these blocks take padding at the beginning of a session only")
    for i in range(inputs.hidden.shape[1]):
        end = step.start + i + 1
        token = BlockInput(
            inputs.hidden[:, i : i + 1],
            None if mask is None else mask[:, :end],
            None if positions is None else positions[:, i : i + 1],
            additions=inputs.additions_at(slice(i, i + 1)),
        )
        yield SessionStep(end - 1, token, () if i else step.changes, every_block=step.every_block)
