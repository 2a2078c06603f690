"""Sessions of a server whose blocks are a formula: what they leave behind, and what follows a refused step."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from math import nan

import pytest
import torch

from swarm_protocol.errors import PeerBusy, RequestRejected, SessionLost
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.codec import decode, encode
from swarm_protocol.wire.constants import MAX_BATCH_SIZE, WIRE_VERSION
from swarm_server.admission.preemption import PARK_S
from swarm_server.net.arrivals import Arrivals
from swarm_server.rpc.step_group import BundledStep, StepGroup
from swarm_server.sessions.reading import StepReader
from swarm_server.sessions.sessions import HostedSession, Reply
from swarm_server.sessions.step_outputs import StepOutputs
from tests.worlds.servers import MODEL, NUM_BLOCKS, REVISION, Net
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)
CLIENT = Caller("anna")


class Story:
    """A server with room for ten positions.

    Attributes:
        replies: all that it has said to its client.
        put: what it has put into a bundle, while that is open.
    """

    def __init__(self) -> None:
        self.host = Net(random.Random(0)).start("server", Span(0, NUM_BLOCKS), capacity=10).host
        self.replies: list[pb.SessionReply] = []
        self.put: list[pb.SessionReply] = []
        self.has_bundle = True
        self._num_opened = 0

    async def reply(self, replies: list[pb.SessionReply]) -> None:
        self.replies += replies

    def put_reply(self, entry: bytes) -> bool:
        self.put += [pb.KeyedReply.FromString(entry).reply] * self.has_bundle
        return self.has_bundle

    async def begun(self, hosted: HostedSession, request: pb.Step) -> bool | BaseException:
        """Return the result of a step that begins without a task."""
        done: asyncio.Future[bool | BaseException] = asyncio.get_running_loop().create_future()
        group = StepGroup(lambda _steps, result: done.set_result(result))
        step = BundledStep(hosted, request, Arrivals(), request.ByteSize(), print)
        assert hosted.is_idle and group.begin(step)
        assert not hosted.is_idle and not group.begin(step)
        if group.submit():
            return MemoryError()
        return await done

    async def open(
        self, reserve_tokens: int, user: str = "", *, is_background: bool = False, copies: tuple[int, int] = (0, 0)
    ) -> HostedSession:
        self._num_opened += 1
        blocks = pb.Span(start=0, end=NUM_BLOCKS)
        contract = pb.Contract(wire_version=WIRE_VERSION, model=MODEL, revision=REVISION, blocks=blocks)
        key = self._num_opened.to_bytes(16, "big")
        request = pb.Open(contract=contract, session_key=key, batch_size=1, reserve_tokens=reserve_tokens)
        request.user, request.is_background = user, is_background
        request.num_copies, request.copy_tokens = copies
        return await self.host.open(request, CLIENT, Reply(self.reply, self.put_reply))

    @property
    def answers(self) -> list[tuple[str, int]]:
        """What became of steps, with their numbers."""
        kinds = [(reply.WhichOneof("kind"), reply) for reply in self.replies]
        return [(kind, getattr(reply, kind).number) for kind, reply in kinds]


def step(number: int, start: int, *values: float) -> pb.Step:
    hidden, _ = encode(torch.tensor([values], dtype=torch.float32)[..., None])
    return pb.Step(number=number, start_position=start, hidden=hidden)


@pytest.mark.parametrize("codec", [pb.RAW, pb.INT8_BLOCKS])
@pytest.mark.parametrize("num_wanted", [None, 0, 1])
async def test_answers_to_steps_that_were_computed_together_are_those_to_each_alone(
    num_wanted: int | None, codec: pb.Codec
) -> None:
    scheduler = (await Story().open(4)).scheduler
    rows = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0))
    together = StepOutputs(rows, 3, scheduler)
    for number, row in enumerate(rows.split(1)):
        key, request = bytes([number]) * 16, pb.Step(number=1 << 32 + number, outputs_wanted=num_wanted)
        expected = pb.KeyedReply(session_key=key)
        assert not StepOutputs(row, 1, scheduler).fill(expected.reply.output, request, codec)
        assert expected.reply.output.HasField("hidden") == (num_wanted != 0)
        entry = together.entry(key, request, number, codec)
        assert entry == expected.SerializeToString() == StepOutputs(row, 1, scheduler).entry(key, request, 0, codec)


async def test_a_step_that_comes_while_the_session_is_being_parked_stops_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it comes in one message."""
    hosted = await Story().open(4)
    began = asyncio.Event()

    class Parking:
        is_possible = True

        async def park(self, is_idle: Callable[[], bool]) -> bool:
            assert is_idle()
            began.set()
            while is_idle():
                await asyncio.sleep(0.01)
            return False

    monkeypatch.setattr(hosted, "_parking", Parking())
    parking = asyncio.ensure_future(hosted.park())
    await began.wait()
    await asyncio.sleep(0.1)
    request = step(1 << 32, 0, 1.0)
    start_s = asyncio.get_running_loop().time()
    assert await hosted.step(request, decode(request.hidden), lambda: None)
    assert not await parking
    assert asyncio.get_running_loop().time() - start_s < PARK_S / 2


async def test_a_session_is_found_by_the_client_that_opened_it_alone() -> None:
    story = Story()
    hosted = await story.open(4)
    key = (1).to_bytes(16, "big")
    assert story.host.find(key, CLIENT) is hosted
    with pytest.raises(SessionLost, match="does not know the session"):
        story.host.find(key, Caller("boris"))


async def test_the_name_of_a_user_is_short() -> None:
    await Story().open(4, user="u" * 64)
    with pytest.raises(RequestRejected, match="the user's name has 65 characters: expected at most 64"):
        await Story().open(4, user="u" * 65)


async def test_room_for_rows_that_become_copies_is_leased_at_once() -> None:
    story = Story()
    hosted = await story.open(4, copies=(3, 2))
    assert hosted.session.lease.charged == 4 + 3 * 2
    with pytest.raises(PeerBusy):
        await Story().open(4, copies=(4, 2))
    with pytest.raises(RequestRejected, match="batch size"):
        await Story().open(4, copies=(MAX_BATCH_SIZE, 0))


async def test_what_builds_on_a_refused_step_is_ignored_until_that_step_comes_again() -> None:
    """Who pushes steps is blamed for each refusal."""
    story = Story()
    hosted = await story.open(4)
    with StepReader(hosted, Arrivals(), one_refusal=True) as reader:
        for each in (step(1, 0, nan), step(2, 1, 5.0), step(1, 0, 4.0), step(2, 1, 5.0)):
            await reader.start(each)
    assert story.answers == [("failure", 1), ("output", 1), ("output", 2)]
    assert hosted.session.length == 2


async def test_a_step_that_begins_without_a_task_ends_like_any_other() -> None:
    story = Story()
    hosted, other = await story.open(4), await story.open(4)
    with StepReader(other, Arrivals()) as reader:
        for each in (step(1, 0, 4.0, 5.0), step(2, 2, 6.0)):
            await reader.start(each)
    expected = [reply.output for reply in story.replies]
    assert await story.begun(hosted, step(1, 0, nan, 5.0)) is False
    assert story.answers[2:] == [("failure", 1)] and hosted.number == 0
    assert await story.begun(hosted, step(1, 0, 4.0, 5.0)) is True
    story.has_bundle = False
    assert await story.begun(hosted, step(2, 2, 6.0)) is True
    assert [story.put[0].output, story.replies[3].output] == expected and len(story.put) == 1
    assert hosted.is_idle and hosted.number == 2


async def test_a_step_whose_output_cannot_be_bundled_ends_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    hosted = await story.open(4)

    def broken(_entry: bytes) -> bool:
        raise MemoryError

    monkeypatch.setattr(hosted, "_reply", Reply(story.reply, broken))
    assert await story.begun(hosted, step(1, 0, 4.0)) is True
    assert hosted.is_idle and story.answers == [("output", 1)]


@pytest.mark.parametrize("values", [(4.0,), (4.0, 5.0)])
async def test_an_error_before_a_step_has_begun_leaves_the_session_idle(
    monkeypatch: pytest.MonkeyPatch, values: tuple[float, ...]
) -> None:
    story = Story()
    hosted = await story.open(4)

    def broken(*_arguments: object, **_named: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(hosted.scheduler, "start", broken)
        assert isinstance(await story.begun(hosted, step(1, 0, *values)), MemoryError)
    assert await story.begun(hosted, step(1, 0, *values)) is True


@pytest.mark.parametrize(
    "message",
    [step(1, 0, 4.0), step(2, 3, 4.0), step(2, 1, *range(10)), pb.Step(number=2, stored=pb.Stored())],
    ids=["known", "gap", "no-room", "stored"],
)
async def test_a_step_that_is_not_simply_computed_needs_a_task(message: pb.Step) -> None:
    story = Story()
    hosted = await story.open(4)
    await story.begun(hosted, step(1, 0, 4.0))
    assert hosted.begin(message, ()) is None
    assert hosted.is_idle and hosted.number == 1


def test_a_preempted_session_that_has_ended_does_not_keep_others_from_being_preempted() -> None:
    async def scenario() -> None:
        story = Story()
        old, sizes = await story.open(4), (5, 6)
        for size in sizes:  # each is one more than there is
            young = await story.open(11 - size)
            with StepReader(old, Arrivals()) as reader:
                growing = asyncio.ensure_future(reader.start(step(size, 0, *range(size))))
                await young.claim.until_preempted()
                await story.host.end(young)
                await growing
        assert story.answers == [("output", size) for size in sizes]

    run_virtually(scenario(), limit_s=60.0)


def test_a_background_session_gives_way_to_any_other() -> None:
    async def scenario() -> None:
        story = Story()
        background, later = await story.open(4, is_background=True), await story.open(6)
        with StepReader(later, Arrivals()) as reader:
            growing = asyncio.ensure_future(reader.start(step(1, 0, *range(7))))
            await background.claim.until_preempted()
            await story.host.end(background)
            await growing
        assert story.answers == [("output", 1)]

    run_virtually(scenario(), limit_s=60.0)
