"""Measures how fast this server computes."""

from __future__ import annotations

import time

import torch

from swarm_protocol.block_input import BlockInput
from swarm_server.blocks import BlockStack
from swarm_server.engine import Engine

_MIN_TIME_S = 0.2
_CONTEXT_TOKENS = 32


def decode_tokens_per_s(stack: BlockStack) -> float:
    """Decode steps per second of one session through all hosted blocks, after a short prompt."""
    engine = Engine(stack)
    session = engine.open(stack.span, batch_size=1)

    def step(num_tokens: int) -> None:
        hidden = torch.zeros(1, num_tokens, stack.hidden_size)
        positions = torch.arange(session.length, session.length + num_tokens)[None]
        engine.step(session, BlockInput(hidden, None, positions))

    step(_CONTEXT_TOKENS)
    step(1)
    start, num_steps = time.perf_counter(), 0
    while num_steps < 3 or time.perf_counter() - start < _MIN_TIME_S:
        step(1)
        num_steps += 1
        if num_steps % _CONTEXT_TOKENS == 0:
            engine.crop(session, _CONTEXT_TOKENS)
    return num_steps / (time.perf_counter() - start)
