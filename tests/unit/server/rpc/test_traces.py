"""A server's work for a traced request is in the request's trace; a call of anybody else leaves no span."""

from __future__ import annotations

import grpc
import pytest

from swarm_client.transport.grpc_calls import CallCounter
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.stubs import BLOCKS, ServiceStub
from swarm_protocol.telemetry.tracing import tracing
from swarm_server.net.arrivals import Arrivals
from swarm_server.rpc.registration import add_service
from swarm_server.rpc.service import BlocksService
from tests.unit.recorded import Recorded, parent_id, recorded, span_id
from tests.unit.server.rpc.any_caller import AnyCaller
from tests.unit.support import run, server_record

REFUSED = pb.SessionRequest(open=pb.Open(session_key=b"a key"))  # by a server that hosts nothing


def called(is_traced: bool) -> Recorded:
    """What is recorded of a session that is refused, and of a question."""

    async def scenario() -> None:
        server = grpc.aio.server()
        rest = {"signer": None, "judge": None, "offering": None}
        add_service(
            BlocksService(lambda: None, lambda: pb.ServerRecord(), 60.0, Arrivals(), AnyCaller(), **rest), server
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = CallCounter(ServiceStub(BLOCKS, channel), server_record())
                if not is_traced:
                    await refused(stub)
                with tracing().span("generation"):
                    if is_traced:
                        await refused(stub)
                    await stub.Describe(pb.DescribeRequest())
        finally:
            await server.stop(None)

    async def refused(stub: CallCounter) -> None:
        call = stub.Session()
        await call.write(REFUSED)
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION

    with recorded() as found:
        run(scenario())
    return found


def test_a_session_is_in_the_trace_of_its_request() -> None:
    found = called(is_traced=True)
    session, generation = found.span("swarm.v1.Blocks/Session"), found.span("generation")
    assert parent_id(session) == span_id(generation) and session.kind.name == "SERVER"
    assert dict(session.attributes or {}) == {
        "rpc.system": "grpc",
        "rpc.service": "swarm.v1.Blocks",
        "rpc.method": "Session",
        "error.type": "PeerMoved",
    }
    assert len(found.spans) == 2  # a question is no work


@pytest.mark.filterwarnings("error")
def test_a_session_of_nobodys_trace() -> None:
    assert [span.name for span in called(is_traced=False).spans] == ["generation"]
