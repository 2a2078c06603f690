"""What strangers send is refused with a sentence, over gRPC as it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from swarm_protocol.errors import BadReply, PeerBusy, PeerMoved, PeerUnavailable, RequestRejected, SwarmError
from swarm_protocol.net.tls import Certificate, ClientCredentials
from swarm_protocol.pb import swarm_pb2
from swarm_protocol.wire.codec import encode
from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.core.expert import Expert
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.net.calls import GrpcCalls
from swarm_training.experts.pb import experts_pb2 as pb
from swarm_training.experts.replicas.keeper import Keeper
from swarm_training.experts.server.host import ExpertHost
from swarm_training.experts.server.registry import build
from swarm_training.experts.server.service import start_service
from tests.worlds.experts import MemoryBoard
from tests.worlds.identities import identity

HIDDEN = 4
CELL = (1, 2)
ROWS = torch.arange(12.0).view(3, HIDDEN)


@asynccontextmanager
async def running_host() -> AsyncIterator[tuple[GrpcCalls, ExpertHolder, ExpertHost]]:
    config = ExpertServerConfig("demo", HIDDEN, grid=(4, 4))
    host = ExpertHost(config)
    torch.manual_seed(0)
    host.experts[CELL] = Expert(build("linear", HIDDEN), 0.0, 1.0)
    certificate = Certificate.generate()
    running = asyncio.ensure_future(host.pool.run())
    server, port = await start_service(host, Keeper(config, MemoryBoard()), certificate, "127.0.0.1", 0, None)
    calls = GrpcCalls(ClientCredentials(identity(1)))
    try:
        yield calls, ExpertHolder(identity(0).peer_id, f"127.0.0.1:{port}", certificate.fingerprint), host
    finally:
        await calls.close()
        await server.stop(None)
        running.cancel()
        host.pool.close()


async def test_calls_give_what_the_expert_computes() -> None:
    async with running_host() as (calls, holder, host):
        module = host.experts[CELL].module
        assert torch.equal(await calls.forward(holder, "demo", CELL, ROWS), module(ROWS))
        assert torch.equal(await calls.backward(holder, "demo", CELL, ROWS, ROWS), ROWS @ module.weight)


def tensor(values: torch.Tensor, **changed: object) -> swarm_pb2.Tensor:
    wire = encode(values)[0]
    for name, value in changed.items():
        wire.ClearField(name)
        wire.MergeFrom(swarm_pb2.Tensor(**{name: value}))
    return wire


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"name": "other"}, PeerMoved, "there is no expert other.1.2 here"),
        ({"cell": [1, 3]}, PeerMoved, "there is no expert demo.1.3 here"),
        ({"cell": [1] * 5000}, PeerMoved, "there is no expert demo.1.1"),
        ({"inputs": tensor(torch.zeros(3, 5))}, RequestRejected, r"\[3, 5\] of torch.float32: expected \[rows, 4\]"),
        ({"inputs": tensor(torch.zeros(4))}, RequestRejected, r"\[4\] of torch.float32: expected \[rows, 4\]"),
        ({"inputs": tensor(torch.zeros(0, 4))}, RequestRejected, "at least one row"),
        ({"inputs": tensor(torch.zeros(3, 4, dtype=torch.int64))}, RequestRejected, "of torch.int64: expected"),
        ({"inputs": tensor(torch.full((3, 4), torch.nan))}, RequestRejected, "not finite"),
        ({"inputs": tensor(ROWS, data=b"short")}, RequestRejected, "only 5 of 48 bytes"),
        ({"inputs": tensor(ROWS, shape=[1 << 40, 4])}, RequestRejected, "takes .* bytes, not 48 as announced"),
        ({"inputs": tensor(ROWS, size_bytes=1 << 40)}, RequestRejected, "over the limit of 786432 bytes"),
        ({"inputs": tensor(torch.zeros(50_000, 4))}, RequestRejected, "over the limit of 786432 bytes"),
        ({"inputs": swarm_pb2.Tensor()}, RequestRejected, "dtype 0 is unknown"),
    ],
)
async def test_requests_that_are_wrong_are_refused(
    changed: dict[str, object], kind: type[SwarmError], message: str
) -> None:
    request = pb.ForwardRequest(name="demo", cell=CELL, inputs=tensor(ROWS))
    for name, value in changed.items():
        request.ClearField(name)
        request.MergeFrom(pb.ForwardRequest(**{name: value}))
    async with running_host() as (calls, holder, _host):
        with pytest.raises(kind, match=message):
            await calls.send_forward(holder, request)
        assert len(await calls.forward(holder, "demo", CELL, ROWS)) == 3  # the server goes on


async def test_gradients_of_another_number_of_rows_are_refused() -> None:
    async with running_host() as (calls, holder, _host):
        with pytest.raises(RequestRejected, match="3 rows of inputs and 2 of gradients"):
            await calls.backward(holder, "demo", CELL, ROWS, ROWS[:2])


async def test_a_message_beyond_all_limits_is_refused() -> None:
    async with running_host() as (calls, holder, _host):
        request = pb.ForwardRequest(name="x" * (3 << 20))
        with pytest.raises(PeerBusy, match="larger than max"):
            await calls.send_forward(holder, request)


async def test_who_shows_another_certificate_is_not_called() -> None:
    async with running_host() as (calls, holder, _host):
        with pytest.raises(PeerUnavailable, match="another TLS certificate than its record promises"):
            await calls.forward(replace(holder, tls_fingerprint=b"\0" * 32), "demo", CELL, ROWS)
        with pytest.raises(PeerUnavailable, match="no server answers at 'nowhere'"):
            await calls.forward(replace(holder, address="nowhere"), "demo", CELL, ROWS)


class Liar:
    """Answers rows of another size."""

    async def forward(self, caller: str, request: pb.ForwardRequest) -> pb.ForwardReply:
        return pb.ForwardReply(outputs=tensor(torch.zeros(3, HIDDEN + 1)))

    async def backward(self, caller: str, request: pb.BackwardRequest) -> pb.BackwardReply:
        return pb.BackwardReply(grad_inputs=tensor(torch.full((3, HIDDEN), torch.inf)))


async def test_answers_that_do_not_fit_are_not_believed() -> None:
    certificate = Certificate.generate()
    keeper = Keeper(ExpertServerConfig("demo", HIDDEN), MemoryBoard())
    server, port = await start_service(Liar(), keeper, certificate, "127.0.0.1", 0, None)
    calls = GrpcCalls(ClientCredentials(identity(1)))
    holder = ExpertHolder(identity(0).peer_id, f"127.0.0.1:{port}", certificate.fingerprint)
    with pytest.raises(BadReply, match=r"has answered \[3, 5\] of torch.float32: expected \[3, 4\]"):
        await calls.forward(holder, "demo", CELL, ROWS)
    with pytest.raises(BadReply, match="not finite"):
        await calls.backward(holder, "demo", CELL, ROWS, ROWS)
    await calls.close()
    await server.stop(None)
