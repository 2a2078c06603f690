"""Has the fuzzer's conversations with a server, and judges the answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import Assembler
from swarm_protocol.wire.status import CUT_OFF, FirstStatus
from tests.attack.fuzzing.conversations import Call, Conversation, Ending

DEADLINE_S = 120.0  # for any answer; the machine may be busy
_PATIENCE_S = 0.05  # of who leaves, for a first reply
_CLOSE_TO = 1e-3  # relative: the same numbers in another order
_MAX_DETAILS = 500
_Code = grpc.StatusCode
REFUSALS = {
    _Code.INVALID_ARGUMENT,
    _Code.PERMISSION_DENIED,
    _Code.RESOURCE_EXHAUSTED,
    _Code.FAILED_PRECONDITION,
    _Code.NOT_FOUND,
    _Code.ABORTED,
}
_ONLY_OF = {_Code.UNAVAILABLE: "Copy"}  # the other server cannot be reached
_NUMBERS = {status.value[0] for status in REFUSALS}
_METHODS = pb.DESCRIPTOR.services_by_name["Blocks"].methods_by_name

Outputs = Callable[[torch.Tensor], torch.Tensor]


class WrongAnswer(Exception):
    """What a server must not answer."""


@dataclass(frozen=True)
class Answered:
    """How one call was answered, and how long after the last message."""

    method: str
    status: str
    seconds: float


class Talker:
    """Speaks with one server. ``outputs`` gives what its blocks make of hidden states."""

    def __init__(self, channel: grpc.aio.Channel, outputs: Outputs) -> None:
        self._methods = {name: channel.stream_stream(f"/swarm.v1.Blocks/{name}") for name in _METHODS}
        self._outputs = outputs

    async def talk(self, conversation: Conversation) -> list[Answered]:
        """Raises WrongAnswer if there is one."""
        async with contextlib.AsyncExitStack() as stack:
            for requests in conversation.sessions:
                await stack.enter_async_context(self._session(requests))
            calls, hidden = conversation.calls, conversation.hidden
            if conversation.at_once:
                return list(await asyncio.gather(*(self._call(call, hidden) for call in calls)))
            return [await self._call(call, hidden) for call in calls]

    @contextlib.asynccontextmanager
    async def _session(self, requests: Sequence[pb.SessionRequest]) -> AsyncIterator[None]:
        """An open session, if the server has room for it; it ends without a goodbye."""
        call = self._methods["Session"](timeout=DEADLINE_S)
        try:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                for request in requests:
                    await call.write(request.SerializeToString())
                    if not request.step.hidden.data:  # steps may be answered elsewhere
                        await call.read()
            yield
        finally:
            call.cancel()

    async def _call(self, call: Call, hidden: torch.Tensor | None) -> Answered:
        clock = asyncio.get_running_loop().time
        replies: list[bytes] = []
        rpc = self._methods[call.method](timeout=DEADLINE_S)
        first = FirstStatus(rpc)

        async def read() -> None:
            async for reply in rpc:
                replies.append(reply)

        async def send() -> None:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # the server has ended the stream
                for data in call.data:
                    await rpc.write(data)
                if call.ending is Ending.FINISH:
                    await rpc.done_writing()

        reading, sending = asyncio.ensure_future(read()), asyncio.ensure_future(send())
        await asyncio.wait([reading, sending], return_when=asyncio.FIRST_COMPLETED)
        sent_s = clock()
        await asyncio.wait([reading], timeout=_PATIENCE_S if call.ending is Ending.LEAVE else None)
        seconds = clock() - sent_s
        rpc.cancel()  # unless it has ended
        sending.cancel()  # which would wait for ever, had the call ended before it began
        await asyncio.wait([reading, sending])
        if not reading.cancelled():
            reading.exception()
        status, details = await first.instead_of(await rpc.code(), await rpc.details())
        if call.ending is Ending.LEAVE and status is _Code.CANCELLED:
            return Answered(call.method, "left", seconds)
        if (status, details) == CUT_OFF:
            return Answered(call.method, "cut off", seconds)
        judge(call.method, status, details)
        parsed = _parsed(call.method, replies)
        if status is _Code.OK and hidden is not None:
            self._compare(parsed, hidden)
        return Answered(call.method, status.name, seconds)

    def _compare(self, replies: Sequence[Any], hidden: torch.Tensor) -> None:
        """Nothing was changed: unless a step was refused for lack of room, the outputs are those of the model."""
        if any(isinstance(reply, pb.SessionReply) and reply.HasField("failure") for reply in replies):
            return
        output = torch.cat(_tensors(replies), 1)
        expected = self._outputs(hidden)
        if output.shape != expected.shape or (output - expected).abs().max() > _CLOSE_TO * expected.abs().max():
            raise WrongAnswer("honest hidden states were answered with other outputs than the model's")


def judge(method: str, status: grpc.StatusCode, details: str) -> None:
    if len(details) > _MAX_DETAILS or not details.isprintable():
        raise WrongAnswer(f"{status.name} with unprintable or long details: {details[:_MAX_DETAILS]!r}")
    if status is _Code.DEADLINE_EXCEEDED:
        raise WrongAnswer(f"no answer to {method} within {DEADLINE_S:g} s")
    if status is not _Code.OK and status not in REFUSALS and _ONLY_OF.get(status) != method:
        raise WrongAnswer(f"{method} was answered {status.name}: {details}")


def _parsed(method: str, replies: Sequence[bytes]) -> list[Any]:
    """Raises WrongAnswer if a reply is not what such a call may be answered with."""
    kind: type[Message] = GetMessageClass(_METHODS[method].output_type)
    try:
        messages: list[Any] = [kind.FromString(reply) for reply in replies]
        _tensors(messages)
        for message in messages:
            if isinstance(message, pb.ServerRecord):
                ServerRecord.from_proto(message)
    except (DecodeError, ValueError, RequestRejected) as error:
        raise WrongAnswer(f"{method} was answered with a message that is none: {error}") from None
    for message in messages:
        if isinstance(message, pb.SessionReply) and message.HasField("failure"):
            failure = message.failure
            if failure.status not in _NUMBERS or not failure.message.isprintable():
                raise WrongAnswer(f"a step was answered {failure.status}: {failure.message[:_MAX_DETAILS]!r}")
    return messages


def _tensors(replies: Sequence[Any]) -> list[torch.Tensor]:
    """Those of a stream, in order; raises RequestRejected if one is incomplete or inconsistent."""
    tensors: list[torch.Tensor] = []
    assembler: Assembler | None = None
    for reply in replies:
        wire = _tensor_of(reply)
        if wire is not None:
            if assembler is not None and not assembler.complete:
                raise RequestRejected("a tensor is not complete")
            assembler = Assembler(wire)
        elif isinstance(reply, pb.SessionReply | pb.TensorReply) and reply.WhichOneof("kind") == "more":
            if assembler is None:
                raise RequestRejected("a part came without its beginning")
            assembler.add(reply.more)
        if assembler is not None and assembler.complete:
            tensors.append(assembler.tensor())
            assembler = None
    return tensors


def _tensor_of(reply: Any) -> pb.Tensor | None:
    if isinstance(reply, pb.TensorReply) and reply.HasField("output"):
        return reply.output
    if isinstance(reply, pb.SessionReply):
        kind = reply.WhichOneof("kind")
        if kind in ("output", "block_output") and getattr(reply, kind).HasField("hidden"):
            return getattr(reply, kind).hidden
    return None
