"""Measures how fast this server computes."""

from __future__ import annotations

import time

import torch

from swarm_protocol.block_input import BlockInput
from swarm_protocol.span import Span
from swarm_server.engine import Engine
from swarm_server.kv_cache import CacheBudget
from swarm_server.session_state import Session, Step

_MIN_TIME_S = 0.2
_CONTEXT_TOKENS = 32


def decode_tokens_per_s(engine: Engine, blocks: Span) -> float:
    """Decode steps per second of one session through ``blocks``, after a short prompt."""
    lease = CacheBudget(2**62, 1).lease("")
    session = engine.open(blocks, 1, lease, reserved=2 * _CONTEXT_TOKENS, shares=False)
    _step(engine, session, 0, _CONTEXT_TOKENS)
    _step(engine, session, _CONTEXT_TOKENS, 1)
    start, num_steps = time.perf_counter(), 0
    while num_steps < 3 or time.perf_counter() - start < _MIN_TIME_S:
        _step(engine, session, _CONTEXT_TOKENS + num_steps % _CONTEXT_TOKENS, 1)
        num_steps += 1
    speed = num_steps / (time.perf_counter() - start)
    engine.close(session)
    return speed


def _step(engine: Engine, session: Session, start: int, num_tokens: int) -> None:
    hidden = torch.zeros(1, num_tokens, engine.hidden_size)
    positions = torch.arange(start, start + num_tokens)[None]
    (output,) = engine.run([(session, Step(start, BlockInput(hidden, None, positions)))])
    if isinstance(output, Exception):
        raise output
