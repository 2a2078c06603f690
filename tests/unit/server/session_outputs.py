"""Outputs of an engine by which tests compare two ways of computing."""

from __future__ import annotations

import torch

from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import SessionStep
from swarm_server.kv.kv_cache import CacheBudget


def session_outputs(engine: Engine, span: Span) -> list[torch.Tensor]:
    """Outputs of two prompts, of decode steps of both sessions together, and of several positions at once."""
    generator, budget = torch.Generator().manual_seed(1), CacheBudget(1 << 40, 1)
    sessions = [engine.open(span, 1, budget.lease(""), shares=False) for _ in range(2)]
    found = []
    for lengths in ((5,), (5, 3), (1, 1), (1, 1), (4,)):
        batch = []
        for session, length in zip(sessions, lengths, strict=False):
            hidden = torch.randn(1, length, engine.hidden_size, generator=generator)
            batch.append((session, SessionStep(session.length, BlockInput(hidden))))
        for output in engine.run(batch):
            assert isinstance(output, torch.Tensor), output
            found.append(output)
    return found
