"""What comes over real gRPC: bytes that are no message are refused in one sentence, and nothing is logged of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from swarm_protocol.errors import PeerBusy
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.stubs import BLOCKS, ServiceStub
from swarm_protocol.wire.constants import MAX_MESSAGE_BYTES, MIB, SERVER_OPTIONS
from swarm_server.net.arrivals import Arrivals
from swarm_server.rpc.registration import add_service
from swarm_server.rpc.service import BlocksService
from tests.unit.server.rpc.any_caller import AnyCaller
from tests.unit.support import run

METHODS = pb.DESCRIPTOR.services_by_name["Blocks"].methods_by_name
UNARY = [name for name, method in METHODS.items() if not method.client_streaming]
UNREAD = {"PutAdapter", "Forward", "Backward"}  # by a server that hosts nothing


def asked(
    method: str, *messages: bytes, ends: bool = False, stall_timeout_s: float = 60.0, host: Any = None
) -> tuple[grpc.StatusCode, str]:
    """How a server answers these bytes that hosts nothing, or has a ``host``; ``ends``: nothing more comes."""

    async def scenario() -> tuple[grpc.StatusCode, str]:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        arrivals = Arrivals(stall_timeout_s=60.0, min_bytes_per_s=100 * MIB)
        record = pb.ServerRecord(model="model")
        rest = {"signer": None, "judge": None, "offering": None}
        service = BlocksService(lambda: host, lambda: record, 60.0, arrivals, AnyCaller(), **rest)
        add_service(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        options = [("grpc.max_send_message_length", -1)]
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                assert await ServiceStub(BLOCKS, channel).Describe(pb.DescribeRequest()) == record
                arrivals.stall_timeout_s = stall_timeout_s
                call = channel.stream_stream(f"/swarm.v1.Blocks/{method}")()
                for data in messages:
                    await call.write(data)
                if ends:
                    await call.done_writing()
                return await call.code(), await call.details()
        finally:
            await server.stop(None)

    return run(scenario())


@pytest.mark.parametrize("method", sorted(set(METHODS) - UNREAD))
def test_bytes_that_are_no_message(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        code, details = asked(method, b"\xff\xff\n")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == f"the bytes sent are no message: expected a {METHODS[method].input_type.name}"
    assert [
        record for record in caplog.records if record.name.startswith(("swarm_server", "swarm_protocol", "grpc"))
    ] == []


def test_a_message_that_is_too_large_is_not_read() -> None:
    code, details = asked("Session", pb.SessionRequest(more=bytes(MAX_MESSAGE_BYTES)).SerializeToString())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details


class FullHost:
    """The sessions of a server without room."""

    async def open(self, *_arguments: object) -> None:
        for _ in range(10):  # meanwhile, the next message is being read
            await asyncio.sleep(0)
        raise PeerBusy("there is no room")


def test_a_session_that_is_refused_while_its_next_message_is_read_ahead_ends_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opening = pb.SessionRequest(open=pb.Open(user="u" * 64 * 1024))  # a server reads ahead after a large message
    answer = asked("Session", opening.SerializeToString(), host=FullHost())
    assert answer == (grpc.StatusCode.RESOURCE_EXHAUSTED, "there is no room") and not caplog.records


@pytest.mark.parametrize("method", UNARY)
def test_a_message_that_does_not_come(method: str) -> None:
    assert asked(method, ends=True) == (grpc.StatusCode.INVALID_ARGUMENT, "a call came without its message")
    code, details = asked(method, stall_timeout_s=0.1)
    assert code is grpc.StatusCode.NOT_FOUND and "a request came too slowly" in details
