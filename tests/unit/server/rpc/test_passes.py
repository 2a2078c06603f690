"""Passes without a session are computed in pieces that do not hold up decoding."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.codec import decode, encode
from swarm_protocol.wire.constants import WIRE_VERSION
from swarm_server.adapters.dropout import Dropout
from swarm_server.core.counters import Counters
from swarm_server.net.arrivals import Arrivals
from swarm_server.net.incoming import Incoming
from swarm_server.net.validation import RequestValidator
from swarm_server.rpc import passes
from tests.unit.support import run

CLIENT = Caller("client")


class Blocks:
    """They double their input. ``shapes``: of the pieces that they were given; ``dropouts``: of their elements."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.dropouts: list[Dropout] = []

    def forward(self, _blocks: Span, inputs: BlockInput, _adapter: None, dropout: Dropout) -> torch.Tensor:
        self.shapes.append(tuple(inputs.hidden.shape[:2]))
        self.dropouts.append(dropout)
        return 2 * inputs.hidden


@pytest.mark.parametrize(
    ("batch_size", "num_tokens", "shapes"),
    [
        (5, 3, [(2, 3), (2, 3), (1, 3)]),
        (4, 2, [(3, 2), (1, 2)]),
        (7, 1, [(7, 1)]),
        (2, 9, [(1, 9), (1, 9)]),  # a row cannot be cut
    ],
)
def test_as_many_rows_at_a_time_as_a_step_may_have_positions(
    batch_size: int, num_tokens: int, shapes: list[tuple[int, int]]
) -> None:
    hidden = torch.arange(2.0 * batch_size * num_tokens).view(batch_size, num_tokens, 2)
    blocks = Blocks()
    (reply,) = forward(blocks, hidden)
    assert blocks.shapes == shapes
    first_rows = accumulate((rows for rows, _ in shapes[:-1]), initial=0)
    assert blocks.dropouts == [Dropout(9, first_row) for first_row in first_rows]  # as in one piece
    assert torch.equal(decode(reply.output), 2 * hidden)


def test_outputs_are_encoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noted(tensor: torch.Tensor, codec: pb.Codec) -> tuple[pb.Tensor, list[bytes]]:
        threads.append(threading.current_thread())
        return encode(tensor, codec)

    monkeypatch.setattr(passes, "encode", noted)
    forward(Blocks(), torch.ones(1, 2, 2))
    assert threads and threading.main_thread() not in threads


def forward(blocks: Blocks, hidden: torch.Tensor) -> list[pb.TensorReply]:
    async def train(call: Callable[[], torch.Tensor], _client: Caller, _num_positions: int) -> torch.Tensor:
        return call()

    async def stream() -> AsyncIterator[Any]:
        wire, _ = encode(hidden)
        contract = pb.Contract(wire_version=WIRE_VERSION, model="model", revision="0", blocks=pb.Span(start=0, end=4))
        yield pb.ForwardRequest(forward=pb.Forward(contract=contract, hidden=wire, dropout_seed=9))

    async def story() -> list[pb.TensorReply]:
        services: Any = SimpleNamespace(
            validator=RequestValidator("model", "0", Span(0, 4), 2, None, max_step_tokens=7),
            engine=SimpleNamespace(stateless=blocks),
            scheduler=SimpleNamespace(train=train),
            counters=Counters(),
        )
        with ExitStack() as request:
            return await passes.forward(services, CLIENT, Incoming(stream(), Arrivals()), request, None)

    return run(story())
