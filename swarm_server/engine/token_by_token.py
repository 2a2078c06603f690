"""For blocks whose code begins at zero whenever it is given several positions at once, whatever state there is.

The scan of mamba, as transformers writes it, takes no state to begin with: only single positions go on from one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.session_state import SessionStep
from swarm_server.kv.kv_cache import CacheBudget

if TYPE_CHECKING:
    from swarm_server.engine.engine import Engine

_SAME = 5e-3  # relative; rounding in int8 and bfloat16 amplifies differences of 1e-7, mistakes are of order 1


def can_go_on(engine: Engine) -> bool:
    """Whether several positions after others give what they give in one piece."""
    hidden = torch.randn(1, 5, engine.hidden_size, generator=torch.Generator().manual_seed(0))
    outputs = []
    for bounds in ((0, 5), (0, 3, 5)):
        session = engine.open(engine.layout.hosted, 1, CacheBudget(2**62, 1).lease(""), shares=False)
        for start, end in itertools.pairwise(bounds):
            (output,) = engine.run([(session, SessionStep(start, BlockInput(hidden[:, start:end])))])
        if isinstance(output, Exception):
            raise output
        outputs.append(output[:, -2:])
    whole, parts = outputs
    return bool((whole - parts).abs().max() <= _SAME * whole.abs().max())


def tokens_of(step: SessionStep) -> Iterator[SessionStep]:
    """The step's positions, one after the other.

    Raises:
        RequestRejected: some of them are padding, which only the beginning of a session may have.
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
        )
        yield SessionStep(end - 1, token, () if i else step.changes, every_block=step.every_block)
