"""How long a session's step may take: many times what it should, sending it among that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Hop
from swarm_client.swarm.watchdog import Watchdog
from swarm_client.transport.steps import OutgoingStep, split
from swarm_protocol.codecs.sizes import CODECS, encoded_bytes
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.unit.support import server_record

WIDTH, CHUNK = 1024, 512
MBIT = 125e3  # bytes/s


def chunks(codec: str = "raw", count: int = 1) -> list[OutgoingStep]:
    inputs = BlockInput(torch.zeros(1, count * CHUNK, WIDTH))
    return split(inputs, start=0, number=1, size=CHUNK, codec=CODECS[codec])


def allowed_s(steps: list[OutgoingStep], bytes_per_s: float | None, replayed: list[OutgoingStep] = []) -> float:  # noqa: B006
    """By a server that computes a chunk in less than half a second."""
    hop = SimpleNamespace(
        hop=Hop(server_record(forward_tokens_per_s=10_000.0), Span(0, 4)),
        replayed={step.number: step for step in replayed},
        span=Span(0, 4),
        due_batches=None,
    )
    return Watchdog(ClientConfig(step_timeout_s=1e4)).allowed_s(hop, 0, steps, 0.1, 0, bytes_per_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize("bytes_per_s", [None, 0.5 * MBIT, MBIT, 2 * MBIT, 10 * MBIT])
def test_a_chunk_may_take_what_its_line_takes(codec: str, bytes_per_s: float | None) -> None:
    size_bytes = encoded_bytes(codec, CHUNK, WIDTH, 4)
    assert allowed_s(chunks(codec), bytes_per_s) > size_bytes / (bytes_per_s or MBIT)
    assert allowed_s(chunks(codec, 3), bytes_per_s) == allowed_s(chunks(codec), bytes_per_s)  # each gets on


def test_what_else_counts_of_a_line() -> None:
    assert allowed_s([], None, chunks()) == allowed_s(chunks(), None)  # what is replayed takes as long
    fast_s = allowed_s(chunks(), float("inf"))
    assert fast_s < allowed_s(chunks(), 1e9) < fast_s + 0.1
    # Who claims to have no line at all wins little time.
    assert allowed_s(chunks(), 1.0) < 4 * encoded_bytes("raw", CHUNK, WIDTH, 4) / MBIT
