"""Outputs of an engine by which tests compare two ways of computing."""

from __future__ import annotations

import torch

from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Session, SessionStep
from swarm_server.kv.kv_cache import CacheBudget


def session_outputs(engine: Engine, span: Span) -> list[torch.Tensor]:
    """Outputs of prompts in chunks, of decode steps of all sessions together, and of several positions at once.

    The last of the three sessions has two rows, of which one is padded.
    """
    generator, budget = torch.Generator().manual_seed(1), CacheBudget(1 << 40, 1)
    sessions = [engine.open(span, num_rows, budget.lease(""), shares=False) for num_rows in (1, 1, 2)]
    found = []
    for lengths in ((5, 0, 0), (5, 3, 0), (1, 1, 0), (1, 1, 0), (0, 0, 6), (0, 0, 2), (1, 0, 1), (4, 0, 0)):
        batch = []
        for session, length in zip(sessions, lengths, strict=True):
            if length:
                batch.append((session, SessionStep(session.length, _input(session, length, engine, generator))))
        for output in engine.run(batch):
            assert isinstance(output, torch.Tensor), output
            found.append(output)
    return found


def _input(session: Session, length: int, engine: Engine, generator: torch.Generator) -> BlockInput:
    num_rows, end = len(session.state.rows), session.length + length
    hidden = torch.randn(num_rows, length, engine.hidden_size, generator=generator)
    if num_rows == 1:
        return BlockInput(hidden)
    mask = torch.ones(num_rows, end, dtype=torch.long)
    mask[0, :2] = 0
    return BlockInput(hidden, mask, (mask.cumsum(-1) - 1).clamp(min=0)[:, session.length :])
