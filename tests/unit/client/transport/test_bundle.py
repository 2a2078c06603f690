"""The stream that sessions share: who gets which answer, and who hears of its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarm_client.transport.bundle import StepBundle
from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from tests.unit.support import until


class FakeStream:
    """Stands for the server: keeps what is written, says what the test puts into ``replies``."""

    def __init__(self) -> None:
        self.written: list[pb.StepBundle] = []
        self.replies: asyncio.Queue[pb.ReplyBundle | SwarmError] = asyncio.Queue()
        self.cancelled = False

    async def write(self, message: pb.StepBundle) -> None:
        self.written.append(message)

    async def read(self) -> pb.ReplyBundle:
        reply = await self.replies.get()
        if isinstance(reply, SwarmError):
            raise reply
        return reply

    def cancel(self) -> None:
        self.cancelled = True

    def ended_error(self) -> PeerUnavailable:
        return PeerUnavailable("the stream has ended")


class Member:
    def __init__(self, key: bytes) -> None:
        self.session_key = key
        self.replies: list[int] = []
        self.lost: list[str] = []

    def bundled_reply(self, reply: pb.SessionReply) -> None:
        self.replies.append(reply.output.number)

    def bundle_lost(self, error: SwarmError) -> None:
        self.lost.append(str(error))


async def opened(stream: Any, on_end: Any = lambda: None) -> StepBundle:
    stream.replies.put_nowait(pb.ReplyBundle())
    return await StepBundle.open(stream, 10.0, on_end)


def answers(*entries: tuple[bytes, int]) -> pb.ReplyBundle:
    output = [(key, pb.SessionReply(output=pb.Output(number=number))) for key, number in entries]
    return pb.ReplyBundle(replies=[pb.KeyedReply(session_key=key, reply=reply) for key, reply in output])


async def test_steps_of_one_turn_are_one_message_and_answers_find_their_sessions() -> None:
    stream, first, second = FakeStream(), Member(b"first"), Member(b"second")
    bundle = await opened(stream)
    bundle.join(first)
    bundle.join(second)
    bundle.post(first, pb.Step(number=7))
    bundle.post(second, pb.Step(number=9))
    await until(lambda: len(stream.written) == 2)
    assert stream.written[0].key == bundle.key and not stream.written[0].steps
    assert [(entry.session_key, entry.step.number) for entry in stream.written[1].steps] == [
        (b"first", 7),
        (b"second", 9),
    ]
    stream.replies.put_nowait(answers((b"second", 9), (b"nobody", 1), (b"first", 7)))
    await until(lambda: first.replies)
    assert (first.replies, second.replies) == ([7], [9])
    bundle.leave(first)
    stream.replies.put_nowait(answers((b"first", 8), (b"second", 10)))
    await until(lambda: len(second.replies) == 2)
    assert first.replies == [7]


async def test_all_members_hear_of_the_end_once_and_why() -> None:
    stream, ended = FakeStream(), asyncio.Event()
    member, gone = Member(b"member"), Member(b"gone")
    bundle = await opened(stream, ended.set)
    bundle.join(member)
    bundle.join(gone)
    bundle.leave(gone)
    stream.replies.put_nowait(PeerUnavailable("the server is on fire"))
    await ended.wait()
    assert bundle.ended  # before anybody is told, who would join it again
    await until(lambda: member.lost)
    assert stream.cancelled
    assert (member.lost, gone.lost) == (["the server is on fire"], [])


@pytest.mark.parametrize("error", [PeerUnavailable("no such method"), None], ids=["refused", "silent"])
async def test_one_that_the_server_does_not_open_is_cancelled(error: SwarmError | None) -> None:
    stream: Any = FakeStream()
    if error is not None:
        stream.replies.put_nowait(error)
    with pytest.raises(PeerUnavailable if error is not None else TimeoutError):
        await StepBundle.open(stream, 10.0 if error is not None else 0.1, lambda: None)
    assert stream.cancelled
