"""The client's side of the wire: a server's answers and failures become events of the session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
import torch

from swarm_client.core.config import ClientConfig, Timeouts
from swarm_client.routing.routing import Hop
from swarm_client.transport.grpc_calls import GrpcStream
from swarm_client.transport.hops import HopOutput, HopSession, Inbox, Trouble
from swarm_client.transport.transport import ServerConnection, unwatched
from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_protocol.errors import BadReply, PeerBusy, PeerError, PeerUnavailable, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from tests.unit.client.transport.test_grpc_calls import FakeCall, rpc_error
from tests.unit.support import run, server_record, until
from tests.worlds.servers import Answering
from tests.worlds.virtual_time import run_virtually

HIDDEN = torch.randn(1, 2, 4)
LARGE = torch.randn(1, 3, 2**18)  # travels in two further parts
OPENED = pb.SessionReply(opened=pb.Opened(tokens_left=100, max_step_tokens=64))
NUMBER = 7  # of the hop
DEFAULTS = Timeouts()


class SilentCall(FakeCall):
    """A server that takes everything and never answers."""

    async def read(self) -> pb.SessionReply:
        await asyncio.Event().wait()


def events(*replies: pb.SessionReply, code: grpc.StatusCode = grpc.StatusCode.OK) -> list[HopOutput | Trouble]:
    """What comes into the session's inbox from a hop that opens, answers this, and ends the stream."""

    async def read() -> list[HopOutput | Trouble]:
        inbox = Inbox()
        await hop_session(FakeCall([OPENED, *replies], code), inbox).open(pb.Open(), timeout_s=5)
        seen = [await inbox.get()]
        while not (isinstance(seen[-1], Trouble) and seen[-1].step is None):
            seen.append(await inbox.get())
        return seen

    return run(read())


def hop_session(call: FakeCall, inbox: Inbox | None = None, timeouts: Timeouts = DEFAULTS) -> HopSession:
    hop = Hop(server_record("peer"), Span(0, 4))
    return HopSession(NUMBER, hop, GrpcStream(call, hop.server, hop.span), inbox or Inbox(), pb.Open(), None, timeouts)


def output(tensor: torch.Tensor | None, number: int = 3, **fields: object) -> list[pb.SessionReply]:
    """An output and its parts."""
    if tensor is None:
        return [pb.SessionReply(output=pb.Output(number=number, **fields))]
    wire = WireTensor.of(tensor)
    message = pb.Output(number=number, hidden=wire.header, **fields)
    return [pb.SessionReply(output=message), *(pb.SessionReply(more=part) for part in wire.parts)]


def assert_of_the_peer(error: Exception) -> None:
    assert (error.peer_id, error.span) == ("peer", Span(0, 4))


class TestOpening:
    @pytest.mark.parametrize("reply", [pb.SessionReply(), pb.SessionReply(more=b"x"), *output(HIDDEN)])
    def test_answered_by_something_else(self, reply: pb.SessionReply) -> None:
        call = FakeCall([reply])
        with pytest.raises(BadReply, match="out of turn") as caught:
            run(hop_session(call).open(pb.Open(), timeout_s=5))
        assert_of_the_peer(caught.value)
        assert call.cancelled

    def test_answered_by_bytes_that_are_no_message(self) -> None:
        call = FakeCall([None])  # so does gRPC say it
        with pytest.raises(BadReply, match="bytes that are no message"):
            run(hop_session(call).open(pb.Open(), timeout_s=5))
        assert call.cancelled

    def test_not_answered(self) -> None:
        call = SilentCall([])
        with pytest.raises(PeerUnavailable, match=r"did not answer within 0\.01 s") as caught:
            run(hop_session(call).open(pb.Open(), timeout_s=0.01))
        assert_of_the_peer(caught.value)
        assert call.cancelled


def test_a_goodbye_that_nobody_hears_takes_as_long_as_the_config_says() -> None:
    class DeafCall(FakeCall):
        async def done_writing(self) -> None:
            await asyncio.Event().wait()

    async def close() -> float:
        await hop_session(call, timeouts=Timeouts(close_s=7.0)).close()
        return asyncio.get_running_loop().time()

    call = DeafCall([])
    assert run_virtually(close()) == pytest.approx(7.0)
    assert call.cancelled


@pytest.mark.run_by(function=run_virtually)
async def test_posted_steps_are_sent_in_their_order_with_all_their_parts() -> None:
    wire, call = WireTensor.of(LARGE), FakeCall([])
    first, second = pb.Step(number=1, hidden=wire.header), pb.Step(number=2, start_position=3)
    session = hop_session(call)
    session.post(first, wire.parts)
    session.post(second, ())
    await asyncio.sleep(1.0)
    assert call.written == [
        pb.SessionRequest(step=first),
        *(pb.SessionRequest(more=part) for part in wire.parts),
        pb.SessionRequest(step=second),
    ]


class TestAnswers:
    def test_come_in_order_with_all_their_parts(self) -> None:
        large, nothing, relayed, end = events(*output(LARGE, 1), *output(None, 2), *output(HIDDEN, 3, relay=True))
        assert (large.hop, large.step, large.relay) == (NUMBER, 1, False)
        assert torch.equal(large.hidden.decode(LARGE.shape, LARGE.dtype), LARGE)
        assert nothing == HopOutput(NUMBER, 2, None, relay=False)
        assert (relayed.hop, relayed.step, relayed.relay) == (NUMBER, 3, True)
        assert torch.equal(relayed.hidden.decode(HIDDEN.shape, HIDDEN.dtype), HIDDEN)
        assert isinstance(end.error, PeerUnavailable)

    @pytest.mark.parametrize("field", [{"size_bytes": 2**40}, {"dtype": 99}, {"shape": [1] * 9}])
    def test_that_are_endless_or_malformed_are_not_read(self, field: dict[str, object]) -> None:
        (reply,) = output(HIDDEN)
        header = reply.output.hidden
        header.MergeFrom(pb.Tensor(**field))
        (trouble,) = events(reply)
        assert isinstance(trouble.error, BadReply) and "broken answer" in str(trouble.error)
        assert_of_the_peer(trouble.error)

    @pytest.mark.parametrize(
        "replies",
        [
            [pb.SessionReply()],
            [pb.SessionReply(more=b"x")],  # a part without a beginning
            [OPENED],
            [output(LARGE)[0], *output(HIDDEN)],  # the next before all parts of the first
            [output(LARGE)[0], OPENED],
            [output(LARGE)[0], pb.SessionReply(more=b"")],  # of which there could be any number
        ],
    )
    def test_out_of_turn(self, replies: list[pb.SessionReply]) -> None:
        (trouble,) = events(*replies)
        assert isinstance(trouble.error, BadReply) and "out of turn" in str(trouble.error)
        assert_of_the_peer(trouble.error)

    def test_cut_off_by_the_end_of_the_stream(self) -> None:
        (trouble,) = events(output(LARGE)[0], code=grpc.StatusCode.UNAVAILABLE)
        assert (trouble.hop, trouble.step, type(trouble.error)) == (NUMBER, None, PeerUnavailable)


class EndlessCall(FakeCall):
    """A server that opens, and then says the same again and again."""

    def __init__(self, reply: pb.SessionReply) -> None:
        super().__init__([OPENED])
        self.reply, self.num_read = reply, 0

    async def read(self) -> pb.SessionReply | object:
        await asyncio.sleep(0)
        self.num_read += 1
        is_over = self.cancelled or self.num_read > 20_000
        return grpc.aio.EOF if is_over else next(self._replies, self.reply)


FAILURE = pb.SessionReply(failure=pb.Failure(status=3, message="x" * 100_000, number=3))
BLOCK_OUTPUT = pb.SessionReply(block_output=pb.BlockOutput(number=3, block=1, hidden=WireTensor.of(HIDDEN).header))


class TestUnaskedAnswers:
    @pytest.mark.parametrize(
        "reply", [*output(HIDDEN), BLOCK_OUTPUT, FAILURE], ids=["output", "block-output", "failure"]
    )
    async def test_wait_at_the_server_until_others_are_taken(self, reply: pb.SessionReply) -> None:
        call, inbox = EndlessCall(reply), Inbox()
        hop = hop_session(call, inbox)
        await hop.open(pb.Open(), timeout_s=5)
        for _ in range(10_000):
            await asyncio.sleep(0)
        assert 1 < inbox.qsize() < 100 and call.num_read < 102
        for _ in range(1000):  # it goes on once somebody reads
            event = await inbox.get()
            assert not isinstance(event, Trouble) or len(str(event.error)) < 10_000
        await until(lambda: inbox.qsize() > 1)
        hop.abandon()
        await asyncio.wait([hop._reading])

    async def test_on_a_shared_stream_end_the_hop_if_they_are_many_or_large(self) -> None:
        for reply in (*output(HIDDEN), pb.SessionReply(failure=pb.Failure(message="x" * 1_000_000))):
            call, inbox = SilentCall([]), Inbox()
            hop = hop_session(call, inbox)
            while not call.cancelled and inbox.qsize() < 5000:
                hop.bundled_reply(reply)
            assert call.cancelled and (inbox.qsize() == 1 or reply.HasField("output"))
            events = [inbox.get_nowait() for _ in range(inbox.qsize())]
            assert isinstance(events[-1], Trouble) and isinstance(events[-1].error, BadReply)

    async def test_leaving_is_heard_once(self) -> None:
        call, inbox, heard = EndlessCall(pb.SessionReply(leaving=pb.Leaving())), Inbox(), []
        inbox.on_leaving = lambda: heard.append(1)
        hop = hop_session(call, inbox)
        await hop.open(pb.Open(), timeout_s=5)
        await until(lambda: call.num_read > 50)
        hop.abandon()
        assert (len(heard), inbox.qsize()) == (1, 1)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], PeerBusy),
        (grpc.StatusCode.INVALID_ARGUMENT.value[0], RequestRejected),
        (grpc.StatusCode.INTERNAL.value[0], PeerError),
        (0, PeerError),
        (4_000_000_000, PeerError),  # no status of gRPC
    ],
)
def test_a_refusal_becomes_its_error_and_names_its_step(status: int, error: type[Exception]) -> None:
    failure = pb.Failure(status=status, message="what happened", number=5)
    refused, good, _ = events(pb.SessionReply(failure=failure), *output(None, 6))
    assert (refused.hop, refused.step, type(refused.error)) == (NUMBER, 5, error)
    assert str(refused.error) == "what happened"
    if isinstance(refused.error, PeerError):
        assert_of_the_peer(refused.error)
    assert good == HopOutput(NUMBER, 6, None, relay=False)  # the stream goes on


async def test_closing_says_goodbye_after_what_is_still_being_sent() -> None:
    """gRPC gives up a call that is written to twice at a time, without a word to the server."""

    class SlowCall(FakeCall):
        busy = False

        async def write(self, request: pb.SessionRequest) -> None:
            assert not self.busy, "written to twice at a time"
            self.busy = True
            await asyncio.sleep(0)
            await super().write(request)
            self.busy = False

    call, wire = SlowCall([]), WireTensor.of(LARGE)
    session = hop_session(call)
    sending = asyncio.ensure_future(session.send(pb.Step(hidden=wire.header), wire.parts))
    await until(lambda: call.busy)
    await asyncio.gather(sending, session.close())
    assert [request.WhichOneof("kind") for request in call.written] == ["step", "more", "more", "close"]


class PassCall(FakeCall):
    """The stream of a pass, which is answered once all is written."""

    def __aiter__(self) -> PassCall:
        return self

    async def __anext__(self) -> pb.TensorReply:
        reply = next(self._replies, None)
        if reply is None:
            raise StopAsyncIteration
        return reply


class Channel:
    """A channel to a server, with which every stream is this call."""

    def __init__(self, call: FakeCall) -> None:
        self._call = call

    def stream_stream(self, _path: str, **_options: Any) -> Callable[..., FakeCall]:
        return lambda timeout: self._call

    stream_unary = unary_unary = unary_stream = stream_stream


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_backward_pass_sends_the_inputs_unless_the_server_has_kept_them_and_then_the_gradients(
    is_kept: bool,
) -> None:
    hidden, grad, answer = (WireTensor.of(LARGE * factor) for factor in (1.0, 2.0, 3.0))
    call = PassCall([pb.TensorReply(output=answer.header), *(pb.TensorReply(more=part) for part in answer.parts)])
    server = ServerConnection(server_record(), Channel(call), ClientConfig())  # type: ignore[arg-type]
    key = b"key" if is_kept else b""
    assert await server.backward(Span(0, 4), hidden, grad, Context(None, None), unwatched, key) == (answer, [])
    first, *more = call.written
    assert first.WhichOneof("kind") == ("kept" if is_kept else "forward")
    assert is_kept or first.forward.hidden == hidden.header
    assert more == [
        *(pb.BackwardRequest(more=part) for part in (() if is_kept else hidden.parts)),
        pb.BackwardRequest(grad=grad.header),
        *(pb.BackwardRequest(more=part) for part in grad.parts),
    ]


class SlowPass(PassCall):
    """A pass whose answer takes more than a second."""

    async def __anext__(self) -> pb.TensorReply:
        await asyncio.sleep(1.2)
        return await super().__anext__()


class SilentPass(PassCall):
    """A pass that is never answered."""

    async def __anext__(self) -> pb.TensorReply:
        return await asyncio.get_running_loop().create_future()


class UnprobedChannel(Channel):
    """A channel to a server that answers no probe."""

    def unary_unary(self, _path: str, **_options: Any) -> Callable[..., Answering]:
        async def probe(timeout: float) -> None:
            await asyncio.sleep(timeout)
            raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED)

        return lambda request, timeout: Answering(probe(timeout))


@pytest.mark.run_by(function=run_virtually)
@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_pass_that_ends_while_a_probe_fails_counts(is_answered: bool) -> None:
    hidden = WireTensor.of(HIDDEN)
    replies: list[object] = [pb.TensorReply(output=hidden.header)]
    call = SlowPass(replies) if is_answered else SilentPass()
    server = ServerConnection(server_record(), UnprobedChannel(call), ClientConfig())  # type: ignore[arg-type]
    passing = server.forward(Span(0, 4), hidden, Context(None, None), unwatched)
    if is_answered:
        assert await passing == (hidden, False)
    else:
        with pytest.raises(PeerUnavailable, match="does not answer"):
            await passing
        await until(lambda: call.cancelled)


class Line:
    """A channel to a server whose echoes take so long; each time the next, and the last again and again."""

    def __init__(self, rtts_s: Sequence[float], payloads_s: Sequence[float]) -> None:
        self._rtts_s, self._payloads_s = list(rtts_s), list(payloads_s)
        self.num_echoes = 0

    def unary_unary(self, _path: str, **_options: Any) -> Callable[..., Answering]:
        async def echo(request: pb.EchoRequest) -> pb.EchoReply:
            self.num_echoes += 1
            times_s = self._payloads_s if request.payload or request.reply_bytes else self._rtts_s
            await asyncio.sleep(times_s.pop(0) if len(times_s) > 1 else times_s[0])
            return pb.EchoReply()

        return lambda request, timeout: Answering(echo(request))

    stream_stream = stream_unary = unary_stream = unary_unary


def rate_of(line: Line) -> float:
    async def story() -> float:
        return await ServerConnection(server_record(), line, ClientConfig()).bytes_per_s()  # type: ignore[arg-type]

    return run_virtually(story())


@pytest.mark.parametrize(
    ("rtts_s", "payloads_s", "send_s"),
    [
        ([0.06, 0.01, 0.01], [0.06], 0.05),  # what else was under way held up the first
        ([0.06, 0.06, 0.06, 0.01], [0.06], 0.05),  # ... or all at first
        ([0.1], [0.6, 0.3], 0.2),  # TCP's window was small
        ([0.01], [0.2, 0.2, 0.2, 0.06, 0.06], 0.05),
        ([0.01], [0.01], 1e-5),
    ],
)
def test_the_rate_of_a_line(rtts_s: list[float], payloads_s: list[float], send_s: float) -> None:
    assert 64 * 1024 / rate_of(Line(rtts_s, payloads_s)) == pytest.approx(send_s)


@pytest.mark.run_by(function=run_virtually)
@pytest.mark.parametrize("rtts_s", [[0.3, 0.02, 0.05], [0.3, 0.05, 0.02], [0.02, 0.3, 0.05]])
async def test_the_round_trip_time_is_the_shortest_of_a_few(rtts_s: list[float]) -> None:
    assert await ServerConnection(server_record(), Line(rtts_s, []), ClientConfig()).ping() == pytest.approx(0.02)


def test_a_far_line_is_measured_in_few_round_trips() -> None:
    line = Line([0.2], [0.3])
    rate_of(line)
    assert line.num_echoes == 6
