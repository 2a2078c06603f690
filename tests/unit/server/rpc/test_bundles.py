"""Bundles of steps on a server: each is its own session's matter, and none may be too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import torch

from swarm_protocol.errors import AccessDenied, PeerBusy, RequestRejected, SessionLost
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.bundling import Outbox
from swarm_protocol.wire.codec import Assembler, encode
from swarm_protocol.wire.constants import MAX_BUNDLED, MAX_BUNDLED_BYTES
from swarm_server.engine.session_state import NextPositions
from swarm_server.net.arrivals import Arrivals
from swarm_server.net.incoming import Incoming
from swarm_server.rpc import bundles
from swarm_server.sessions.sessions import StepKind, acquired_at_once
from tests.worlds.virtual_time import run_virtually

WHOLE, _ = encode(torch.ones(1, 1, 3))
KIND = pb.FLOAT32, pb.RAW, 12, False
CUT = pb.Tensor(dtype=pb.FLOAT32, shape=[8], size_bytes=32, data=bytes(16))
CLIENT = Caller("client")
KEY, OTHER_KEY = bytes(16), bytes(15) + b"2"
FATAL = 66  # the step that cannot be computed
BROKEN = 67  # the step that cannot even begin
UNSENT = 68  # the step whose output cannot be sent


class FakeScheduler:
    """Computes next positions in the next turn of the event loop."""

    num_active, queue_s = 1, 0.0

    def start_next(
        self, positions: NextPositions, rows: Sequence[Any], _names: object, deliver: Callable, *, is_background: bool
    ) -> None:
        assert len(positions) == len(rows) and not is_background
        asyncio.get_running_loop().call_later(0, deliver, rows, positions.hidden)


class FakeSession:
    """Stands for a hosted session, which computes a step once ``gate`` is open; if it is, it needs no task."""

    client = CLIENT
    closed = False
    session = None
    names = "client", "user"
    is_background = False
    scheduler = FakeScheduler()

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.refused: list[tuple[int, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.turn = asyncio.Lock()

    def require_number(self, number: int) -> None:
        if number > 100:
            raise RequestRejected("far ahead")

    def start(self, step: pb.Step) -> Assembler:
        return Assembler(step.hidden)

    def begin(self, step: pb.Step, _known: object) -> StepKind | None:
        if step.number == BROKEN:
            raise RuntimeError("out of memory")
        if step.number > 100 or not Assembler(step.hidden).complete:
            return None
        return KIND if self.gate.is_set() and acquired_at_once(self.turn) else None

    def undo_begin(self) -> None:
        self.turn.release()

    def end(self, step: pb.Step, _outputs: object, _number: int, _time_s: float) -> bool:
        self.turn.release()
        if step.number == UNSENT:
            raise MemoryError
        if step.number != FATAL:
            self.taken.append(step.number)
        return step.number != FATAL

    def end_later(self, _step: pb.Step, _output: object, on_end: Callable[[bool | Exception], None]) -> None:
        on_end(RuntimeError("out of memory"))

    async def step(self, step: pb.Step, _payload: torch.Tensor, on_done: Callable[[], None]) -> bool:
        await self.gate.wait()
        async with self.turn:
            if step.number in (FATAL, BROKEN):
                on_done()
                raise RuntimeError("out of memory")
            self.taken.append(step.number)
        on_done()
        return True

    async def refuse(self, number: int, error: Exception) -> None:
        self.refused.append((number, str(error)))


class Story:
    """A server that has sessions under the keys ``KEY`` and ``OTHER_KEY``; ``sent``: what it has answered."""

    def __init__(self) -> None:
        self.session: Any = FakeSession()
        self.other: Any = FakeSession()
        self.arrivals = Arrivals()
        self.sent: list[pb.TakenStep] = []
        self.num_admissions = 100  # messages for which the caller is a member
        self.may_send = asyncio.Event()
        self.may_send.set()

    def admit(self) -> None:
        self.num_admissions -= 1
        if self.num_admissions < 0:
            raise AccessDenied("the membership was revoked")

    def find(self, key: bytes) -> Any:
        if key not in (KEY, OTHER_KEY):
            raise SessionLost("no such session")
        return self.session if key == KEY else self.other

    async def push(self, *messages: Any) -> None:
        """All of a stream of another server's, to its end."""
        await self.serve(_stream(messages))

    async def serve(self, stream: AsyncIterator[Any], **options: Any) -> None:
        outbox = Outbox[pb.TakenStep](pb.TakenBundle, "steps", self.send)
        take = bundles.take_pushed(self.find, self.arrivals, outbox)
        incoming = Incoming(stream, self.arrivals)
        await bundles.serve(incoming, outbox, take, admitted=self.admit, idle_timeout_s=60.0, **options)

    async def send(self, message: pb.TakenBundle) -> None:
        await self.may_send.wait()
        self.sent += message.steps


async def test_a_caller_whose_membership_ends_has_no_more_steps_computed() -> None:
    server = Story()
    server.num_admissions = 1
    with pytest.raises(AccessDenied):
        await server.push(pushed((KEY, 1)), pushed((KEY, 2), (KEY, 3)))
    assert server.session.taken == [1]


async def test_a_stream_that_is_cancelled_may_be_closed_at_once() -> None:
    """As its handler is when the client goes away. That it is still read would be an error of the server's."""

    async def silent() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None

    async def never(_message: Any) -> None:
        raise AssertionError

    stream, outbox = silent(), Outbox[Any](pb.TakenBundle, "steps", never)
    incoming = Incoming(stream, Arrivals())

    async def handled() -> None:
        async with aclosing(stream):
            await bundles.serve(incoming, outbox, lambda _tasks, _entry: None, admitted=print, idle_timeout_s=60.0)

    handling = asyncio.ensure_future(handled())
    for _ in range(5):
        await asyncio.sleep(0)
    handling.cancel()
    await asyncio.wait([handling])
    assert handling.cancelled()


async def _stream(messages: Any) -> AsyncIterator[Any]:
    for message in messages:
        yield message
        for _ in range(20):  # what can be computed is, and sent
            await asyncio.sleep(0)


def pushed(*entries: tuple[bytes, int], hidden: pb.Tensor = WHOLE) -> pb.PushBundle:
    steps = [pb.PushedStep(push_key=key, step=pb.Step(number=number, hidden=hidden)) for key, number in entries]
    return pb.PushBundle(steps=steps)


@pytest.mark.parametrize(("needed_until_s", "end_s"), [(0.0, 110.0), (200.0, 230.0)], ids=["not-needed", "needed"])
@pytest.mark.run_by(function=run_virtually)
async def test_a_silent_stream_ends_once_it_is_not_needed(needed_until_s: float, end_s: float) -> None:
    async def late() -> AsyncIterator[Any]:
        await asyncio.sleep(50.0)
        yield pushed((KEY, 1))
        await asyncio.Event().wait()

    server, clock = Story(), asyncio.get_running_loop().time
    await server.serve(late(), is_needed=lambda: clock() < needed_until_s)
    assert server.session.taken == [1] and clock() == end_s


async def test_a_stream_ends_only_once_all_its_answers_were_sent() -> None:
    """gRPC fails if a call ends in the middle of a message."""
    server = Story()
    server.may_send.clear()
    serving = asyncio.ensure_future(server.push(pushed((KEY, 1), (KEY, 2))))
    for _ in range(100):
        await asyncio.sleep(0)
    assert server.session.taken == [1, 2] and not serving.done()
    server.may_send.set()
    await serving
    assert [step.number for step in server.sent] == [1, 2]


@pytest.mark.run_by(function=run_virtually)
async def test_a_stream_ends_though_its_caller_reads_no_answers() -> None:
    server = Story()
    server.may_send.clear()
    with pytest.raises(PeerBusy, match="the replies of this server were not read within 300 s"):
        await server.push(pushed((KEY, 1)))
    with pytest.raises(RequestRejected, match="steps are in one message"):
        await server.push(pushed(*[(KEY, 1)] * (MAX_BUNDLED + 1)))
    assert server.session.taken == [1] and asyncio.get_running_loop().time() == pytest.approx(300.0)


async def test_a_session_that_is_not_there_is_lost_and_the_others_go_on() -> None:
    server = Story()
    await server.push(pushed((b"gone", 5), (KEY, 1)), pushed((KEY, 2)))
    assert server.session.taken == [1, 2]
    assert [(step.push_key, step.number, step.lost) for step in server.sent] == [
        (b"gone", 5, True),
        (KEY, 1, False),
        (KEY, 2, False),
    ]
    assert server.arrivals.used_bytes == 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pushed((KEY, 101)), "far ahead"),
        (pushed((KEY, 1), hidden=CUT), "is incomplete"),
        (pushed((KEY, FATAL)), "the server failed"),
        (pushed((KEY, BROKEN)), "the server failed"),
        (pushed((KEY, UNSENT)), "the server failed"),
    ],
    ids=["far-ahead", "cut-off", "failed", "not-begun", "not-sent"],
)
async def test_what_cannot_be_a_step_is_refused_to_its_client_alone(message: pb.PushBundle, reason: str) -> None:
    server = Story()
    both = pb.PushBundle(steps=[*message.steps, *pushed((OTHER_KEY, 1)).steps])
    await server.push(both, pushed((KEY, 2)))
    ((_, why),) = server.session.refused
    assert reason in why and server.session.taken == [2] and server.other.taken == [1]
    assert sorted((step.push_key, step.lost) for step in server.sent) == [
        (KEY, False),
        (KEY, True),
        (OTHER_KEY, False),
    ]
    assert server.arrivals.used_bytes == 0


async def test_a_step_that_fails_because_its_session_was_closed_is_not_refused() -> None:
    """The session's own stream has said why it ended."""
    server = Story()
    server.session.closed = True
    await server.push(pushed((KEY, FATAL)))
    assert server.session.refused == []
    assert [(step.number, step.lost) for step in server.sent] == [(FATAL, False)]
    assert server.arrivals.used_bytes == 0


async def test_a_stream_ends_though_its_client_cannot_be_told_of_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Story()

    async def broken(_number: int, _error: Exception) -> None:
        raise MemoryError

    monkeypatch.setattr(server.session, "refuse", broken)
    await server.push(pushed((KEY, FATAL)), pushed((KEY, 2)))
    assert [(step.number, step.lost) for step in server.sent] == [(FATAL, True), (2, False)]


async def test_steps_of_one_message_are_computed_together_and_each_session_s_in_order() -> None:
    server = Story()
    await server.push(pushed((KEY, 1), (OTHER_KEY, 1), (KEY, 2)), pushed((KEY, 3), (OTHER_KEY, 2)))
    assert server.session.taken == [1, 2, 3] and server.other.taken == [1, 2]
    server.session.gate.clear()
    pushing = asyncio.ensure_future(server.push(pushed((KEY, 4), (OTHER_KEY, 3), (KEY, 5))))
    while server.other.taken != [1, 2, 3]:
        await asyncio.sleep(0)
    server.session.gate.set()
    await pushing
    assert server.session.taken == [1, 2, 3, 4, 5]
    assert server.arrivals.used_bytes == 0


async def test_steps_that_cannot_be_submitted_are_computed_in_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Story()

    def broken(*_arguments: object, **_named: object) -> None:
        raise MemoryError

    monkeypatch.setattr(FakeScheduler, "start_next", broken)
    await server.push(pushed((KEY, 1), (OTHER_KEY, 1)))
    assert server.session.taken == server.other.taken == [1]
    assert server.arrivals.used_bytes == 0


async def test_few_steps_of_a_session_may_be_under_way() -> None:
    server = Story()
    server.session.gate.clear()
    pushing = asyncio.ensure_future(server.push(pushed(*((KEY, number) for number in range(1, 8)))))
    while len(server.session.refused) < 3:
        await asyncio.sleep(0)
    assert all("came at once" in why for _, why in server.session.refused)
    server.session.gate.set()
    await pushing
    assert len(server.session.taken) == 4


async def test_large_steps_and_more_than_a_client_may_have_are_lost_to_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Story()
    large = pb.Tensor(shape=[3], dtype=pb.FLOAT32, data=bytes(MAX_BUNDLED_BYTES), size_bytes=MAX_BUNDLED_BYTES)
    await server.push(pushed((KEY, 1), hidden=large), pushed((KEY, 2)))
    assert [(step.number, step.lost) for step in server.sent] == [(1, True), (2, False)]
    monkeypatch.setattr(bundles, "_MAX_TASKS", 2)
    await server.push(pushed((KEY, 3), (KEY, 4), (KEY, 5)), pushed((KEY, 6)))
    assert {step.number for step in server.sent if step.lost} == {1, 5}


async def test_a_message_of_very_many_steps_is_refused() -> None:
    server = Story()
    with pytest.raises(RequestRejected, match="steps are in one message"):
        await server.push(pushed(*((KEY, number) for number in range(MAX_BUNDLED + 1))))
    assert server.session.taken == []


async def test_small_answers_go_into_the_bundle_and_all_else_by_the_sessions_own_stream() -> None:
    bundled, own = [], []

    async def send(message: pb.ReplyBundle) -> None:
        bundled.extend(message.replies)

    async def otherwise(replies: list[pb.SessionReply]) -> None:
        own.extend(replies)

    outbox, all_bundles = Outbox[pb.KeyedReply](pb.ReplyBundle, "replies", send), bundles.ReplyBundles()
    sending = asyncio.ensure_future(outbox.send_all())
    small = pb.SessionReply(output=pb.Output(number=1))
    large = pb.SessionReply(output=pb.Output(number=2, hidden=pb.Tensor(data=bytes(MAX_BUNDLED_BYTES))))
    leaving = pb.SessionReply(leaving=pb.Leaving())
    relayed = pb.SessionReply(output=pb.Output(number=3, relay=True))
    with all_bundles.opened(KEY, CLIENT, outbox) as bundle:
        assert all_bundles.find(KEY, CLIENT) is bundle
        assert all_bundles.find(KEY, Caller("stranger")) is None
        with pytest.raises(RequestRejected), all_bundles.opened(KEY, CLIENT, outbox):
            pass
        with bundle.joined(b"session", otherwise) as answer:
            reply = answer.send
            assert bundle.num_sessions == 1
            for replies in ([small], [large], [leaving], [relayed], [small, pb.SessionReply(more=b"part")]):
                await reply(replies)
            waiting_bytes = outbox.size_bytes
            assert answer.put is not None and not answer.put(bytes(MAX_BUNDLED_BYTES + 1))
            assert outbox.size_bytes == waiting_bytes
        assert bundle.num_sessions == 0
    await reply([small])  # the client has ended the bundle
    while outbox.size_bytes:
        await asyncio.sleep(0)
    sending.cancel()
    assert [(entry.session_key, entry.reply) for entry in bundled] == [(b"session", small)]
    assert own == [large, leaving, relayed, small, pb.SessionReply(more=b"part"), small]
