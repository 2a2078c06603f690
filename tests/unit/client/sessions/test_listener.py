"""What hops say, and what their silence means: who is replaced, what the user hears, and what is passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_client.core.background import now_s
from swarm_client.failover.journal import Journal
from swarm_client.sessions.call import SessionCall
from swarm_client.sessions.listener import ChainListener, _late_hop
from swarm_client.sessions.opening import Opener, Opening
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.hops import BlockAnswer, HopEvent, HopOutput, HopSession, Inbox, Trouble
from swarm_client.transport.steps import split
from swarm_client.transport.wire_tensor import WireTensor
from swarm_protocol.errors import AccessDenied, BadReply, PeerError, PeerUnavailable, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.constants import FIRST_STEP
from tests.worlds.fake_servers import NUM_BLOCKS, FakeServers, client_of, record
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)

NEW, SIZE, HIDDEN = 5, 2, 3  # steps of 2, 2 and 1 positions
FIRST, SECOND, LAST = FIRST_STEP, FIRST_STEP + 1, FIRST_STEP + 2
SILENCE_S, STEP_S = 1.0, 20.0


class Session:
    """Three hops, and a call of three steps, of whose outputs the last is wanted."""

    def __init__(
        self, servers: FakeServers, swarm: Swarm, hops: list[HopSession], inbox: Inbox, hidden_size: int = HIDDEN
    ) -> None:
        inputs = BlockInput(torch.randn(1, NEW, hidden_size))
        before = Journal.empty(1)
        steps = split(inputs, start=0, number=FIRST, size=SIZE, codec=pb.RAW, num_wanted=1)
        self.call = SessionCall(inputs, 1, before, before.copy().appended(inputs), (), steps)
        self.servers, self.hops, self.inbox = servers, hops, inbox
        self.num_answers = 0
        self.others: list[HopEvent] = []
        self.listener = ChainListener(hops, swarm, inbox, self._answered, self.others.append)
        self.listener.made_progress()

    def handle(self, event: HopEvent) -> dict[int, Exception]:
        """Who is to be replaced, and why, by their places."""
        failures = self.listener.handle(event, self.call)
        return {self.hops.index(hop): error for hop, error in failures.items()}

    def says(self, index: int, step: int, hidden: torch.Tensor | None = None, **relay: Any) -> dict[int, Exception]:
        wire = None if hidden is None else WireTensor.of(hidden)
        return self.handle(HopOutput(self.hops[index].number, step, wire, bool(relay), **relay))

    def refuses(self, index: int, step: int | None, error: Exception | None = None) -> dict[int, Exception]:
        return self.handle(Trouble(self.hops[index].number, step, error or RequestRejected("it is wrong")))

    def stands(self, *numbers: int) -> None:
        """Where the hops say that they are."""
        for hop, number in zip(self.hops, numbers, strict=True):
            self.servers.progress[hop.session_key] = pb.SessionProgress(number=number)

    async def sent_to(self, index: int) -> list[pb.Step]:
        await asyncio.sleep(1.0)
        (call,) = [call for call in self.servers.calls if call.request.session_key == self.hops[index].session_key]
        return call.steps

    def _answered(self) -> None:
        self.num_answers += 1


@asynccontextmanager
async def opened(hidden_size: int = HIDDEN, step_s: float = STEP_S, **others: str) -> AsyncIterator[Session]:
    """``others``: blocks of further servers, which come later."""
    servers = FakeServers(a="0:2", b="2:4", c="4:6")
    async with client_of(servers, step_timeout_s=step_s) as swarm:
        inbox = Inbox()
        hops = await Opener(swarm, inbox).open_span(Span(0, NUM_BLOCKS), Opening(batch_size=1, reserve_tokens=8), None)
        servers.records.update({name: record(name, span) for name, span in others.items()})
        await swarm.view(0.0)
        made = Session(servers, swarm, hops, inbox, hidden_size)
        yield made
        made.listener.end_call()


# ------------------------------------------------------------ answers


@pytest.mark.parametrize(
    "hidden",
    [None, torch.zeros(1, 2, HIDDEN), torch.zeros(1, 1, HIDDEN + 1), torch.full((1, 1, HIDDEN), float("nan"))],
    ids=["nothing", "of-two-positions", "too-wide", "nan"],
)
async def test_a_wrong_output_is_blamed_on_its_server(hidden: torch.Tensor | None) -> None:
    async with opened() as session:
        ((index, error),) = session.says(2, LAST, hidden).items()
        assert index == 2 and isinstance(error, BadReply) and error.peer_id == "c"
        assert not session.call.outputs and not session.num_answers


async def test_what_servers_cannot_send_to_one_another_is_relayed() -> None:
    async with opened() as session:
        hidden = torch.randn(1, 2, HIDDEN)
        assert session.says(0, SECOND, hidden, route=0) == {}
        assert session.says(0, SECOND, hidden, route=1) == {}  # to a hop that is not there any more
        assert session.says(2, SECOND, hidden, route=0) == {}  # there is nobody after it
        (step,) = await session.sent_to(1)
        assert (step.number, step.start_position) == (SECOND, SIZE)
        assert step.hidden == WireTensor.of(hidden).header
        assert not session.call.outputs

        ((index, error),) = session.says(0, SECOND, hidden[:, :1], route=0).items()
        assert index == 0 and isinstance(error, BadReply)
        assert len(await session.sent_to(1)) == 1


async def test_outputs_of_blocks_are_taken_from_who_has_the_block() -> None:
    async with opened() as session:
        session.call.watched = range(0, 6)
        output = torch.randn(1, 2, HIDDEN)
        b = session.hops[1].number
        assert session.handle(BlockAnswer(b, FIRST, 3, WireTensor.of(output))) == {}
        assert torch.equal(session.call.block_outputs[3, FIRST], output)
        for wrong in (BlockAnswer(b, FIRST, 4, WireTensor.of(output)), BlockAnswer(b, LAST, 3, WireTensor.of(output))):
            assert isinstance(session.handle(wrong)[1], BadReply)
        assert list(session.call.block_outputs) == [(3, FIRST)]


async def test_what_others_say_is_theirs() -> None:
    async with opened() as session:
        stranger = Trouble(99, None, PeerUnavailable("gone"))
        assert session.handle(stranger) == {}
        assert session.others == [stranger]


# ------------------------------------------------------------ trouble


async def test_who_may_not_come_in_hears_it() -> None:
    async with opened() as session:
        with pytest.raises(AccessDenied):
            session.refuses(1, None, AccessDenied("not a member"))


async def test_what_the_first_hop_refuses_is_the_users_mistake() -> None:
    async with opened() as session:
        with pytest.raises(RequestRejected, match="it is wrong"):
            session.refuses(0, FIRST)
        assert session.listener.refused == FIRST  # nothing of the call has been taken
        session.listener.made_progress()
        assert session.listener.refused is None
        session.says(2, FIRST)
        with pytest.raises(RequestRejected):
            session.refuses(0, SECOND)
        assert session.listener.refused is None
        assert session.refuses(0, FIRST) == {}  # which is answered already


async def test_what_a_later_hop_refuses_is_blamed_on_the_one_before_then_on_both_and_is_told_in_the_end() -> None:
    async with opened() as session:
        ((index, error),) = session.refuses(1, FIRST).items()
        assert index == 0 and isinstance(error, BadReply) and error.peer_id == "a"
        assert session.refuses(1, SECOND) == {}  # builds on the one that was refused
        assert session.refuses(1, FIRST).keys() == {0, 1}
        third = session.refuses(1, FIRST)
        assert third.keys() == {0, 1} and isinstance(third[1], PeerError) and third[1].peer_id == "b"
        with pytest.raises(RequestRejected, match="it is wrong"):
            session.refuses(1, FIRST)


async def test_a_refusal_is_over_once_the_step_is_answered() -> None:
    async with opened() as session:
        session.refuses(1, FIRST)
        session.says(2, FIRST)
        assert session.refuses(1, SECOND).keys() == {0, 1}  # not in the wake of the first one


# ------------------------------------------------------------ silence


async def next_trouble(session: Session) -> tuple[int, Exception, float]:
    """Who is to be replaced, why, and after how many seconds."""
    start_s = now_s()
    event = await session.listener.next_event(session.call)
    assert isinstance(event, Trouble) and event.step is None
    ((index, error),) = session.handle(event).items()
    return index, error, now_s() - start_s


async def test_a_hop_that_does_not_say_where_it_is_is_replaced_soon() -> None:
    async with opened() as session:
        session.stands(LAST, FIRST, 0)
        session.servers.unreachable.add(session.hops[1].session_key)
        index, error, seconds = await next_trouble(session)
        assert index == 1 and isinstance(error, PeerUnavailable)
        assert seconds < 2 * SILENCE_S


async def test_an_unexpected_error_of_a_question_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def progress(**_options: Any) -> pb.SessionProgress:
        raise ArithmeticError("nobody has thought of it")

    async with opened() as session:
        session.stands(LAST, FIRST, 0)
        monkeypatch.setattr(session.hops[1], "progress", progress)
        with pytest.raises(ArithmeticError):
            await next_trouble(session)


@pytest.mark.parametrize(("heard_s", "late_s", "least_s"), [(0.0, 0.0, 4.0), (9.5, 0.0, 10.0), (0.0, 5.0, 9.0)])
async def test_silence_is_no_failure_while_others_hear_the_server_or_this_client_is_late(
    heard_s: float, late_s: float, least_s: float
) -> None:
    """``heard_s``: so long another session has answers of the server; ``late_s``: so long this client hears nobody."""
    async with opened() as session:
        session.stands(LAST, FIRST, 0)
        session.servers.unheard.add(session.hops[1].session_key)
        loop, progress = asyncio.get_running_loop(), session.listener._swarm.progress
        for number in range(1, int(heard_s) + 1):
            loop.call_later(number, lambda: progress.answered("b", loop.time()))
        loop.call_later(2.0, lambda: setattr(loop, "_now", loop.time() + late_s))
        index, error, seconds = await next_trouble(session)
        assert index == 1 and "does not answer" in str(error)
        assert least_s <= seconds < least_s + 8.0


async def test_a_server_that_others_hear_and_this_session_does_not_is_replaced_late() -> None:
    async with opened() as session:
        session.stands(LAST, FIRST, 0)
        session.servers.unheard.add(session.hops[1].session_key)
        loop, progress = asyncio.get_running_loop(), session.listener._swarm.progress
        for number in range(1000):
            loop.call_later(number / 4, lambda: progress.answered("b", loop.time()))
        index, error, seconds = await next_trouble(session)
        assert index == 1 and "does not answer" in str(error)
        assert STEP_S < seconds < 2 * STEP_S


async def test_a_dead_server_is_replaced_although_nobody_knows_how_far_another_one_is() -> None:
    async with opened() as session:
        session.stands(LAST, FIRST, 0)
        session.servers.unheard.add(session.hops[0].session_key)
        session.servers.unreachable.add(session.hops[1].session_key)
        loop, progress = asyncio.get_running_loop(), session.listener._swarm.progress
        for number in range(1000):
            loop.call_later(number / 4, lambda: progress.answered("a", loop.time()))
        index, _, seconds = await next_trouble(session)
        assert index == 1 and seconds < STEP_S


async def test_a_client_that_is_late_does_not_take_servers_for_stalled() -> None:
    async with opened() as session:
        session.stands(LAST, FIRST, 0)
        loop = asyncio.get_running_loop()
        loop.call_later(3.0, lambda: setattr(loop, "_now", loop.time() + 30.0))
        *_, seconds = await next_trouble(session)
        assert seconds > 30.0 + STEP_S


@pytest.mark.parametrize(
    ("numbers", "slow"),
    [((FIRST, FIRST, 0), 0), ((LAST, FIRST, FIRST), 1), ((LAST, LAST, SECOND), 2), ((LAST + 9, LAST, SECOND), 2)],
)
async def test_who_has_what_it_needs_and_does_not_get_on_is_replaced_late(numbers: tuple[int, ...], slow: int) -> None:
    async with opened() as session:
        session.stands(*numbers)
        index, error, seconds = await next_trouble(session)
        assert index == slow and "did not finish a step within 20 s" in str(error)
        assert seconds > STEP_S


@pytest.mark.parametrize(("num_ahead", "late"), [(4, 0), (5, 1)])
def test_a_server_that_waits_for_the_next_one_to_take_its_outputs_is_not_late(num_ahead: int, late: int) -> None:
    assert _late_hop([8 - num_ahead, 8, 8]) == late
    assert _late_hop([0, 8 - num_ahead, 8]) == late + 1
    assert _late_hop([0] * 3) is None


@pytest.mark.parametrize(("numbers", "late"), [((5, 0, 0), 1), ((10, 5, 0), 2), ((4, 0, 0), 0)])
async def test_in_a_replay_too_the_server_that_others_wait_for_is_late(numbers: tuple[int, ...], late: int) -> None:
    """All hops are new, and get ten earlier steps before those of the call."""
    async with opened() as session:
        replayed = split(BlockInput(torch.randn(1, 10, HIDDEN)), start=0, number=1, size=1, codec=pb.RAW)
        for hop in session.hops:
            hop.remember({step.number: step for step in replayed})
        session.stands(*numbers)
        index, error, _ = await next_trouble(session)
        assert index == late and "did not finish a step within" in str(error)


async def test_nobody_is_late_while_a_server_computes_what_the_others_wait_for() -> None:
    async with opened(step_s=100.0, d="2:4") as session:
        waiting = asyncio.ensure_future(next_trouble(session))
        session.listener._swarm.progress.answered("c", now_s())
        slow = session.hops[2].session_key
        for second in range(int(2 * STEP_S)):
            session.stands(LAST, FIRST, 0)
            session.servers.progress[slow] = pb.SessionProgress(computed=second + 1, num_batches=1, num_waiting=1)
            await asyncio.sleep(1.0)
        assert not waiting.done()
        start_s = now_s()
        index, *_ = await waiting
        assert index == 1 and now_s() - start_s < STEP_S


@pytest.mark.parametrize(("done", "num_left"), [(0, 3), (SECOND, 1)])
async def test_a_prompt_may_be_overtaken_by_as_much_as_is_left_of_it(done: int, num_left: int) -> None:
    """In each of the streams that wait on the server: it computes shorter ones first."""
    async with opened() as session:
        waiting = asyncio.ensure_future(session.listener.next_event(session.call))
        key = session.hops[0].session_key
        session.servers.progress[key] = pb.SessionProgress(number=done, computed=1, num_batches=100, num_waiting=50)
        await asyncio.sleep(3 * SILENCE_S)
        assert session.hops[0].due_batches == 100 + 4 * 50 * num_left + 16
        waiting.cancel()


@pytest.mark.parametrize("index", [0, 1])
async def test_a_prompt_may_be_overtaken_by_all_of_a_burst(index: int) -> None:
    """One other step waits when it comes, and 39 a second later; ``index``: of the server where they wait."""
    async with opened(step_s=100.0, d="0:2", e="2:4") as session:
        waiting = asyncio.ensure_future(next_trouble(session))
        start_s = now_s()
        session.listener._swarm.progress.answered("ab"[index], start_s)
        key = session.hops[index].session_key
        while not waiting.done():
            seconds = int(now_s() - start_s)
            session.stands(LAST if index else 0, 0, 0)
            session.servers.progress[key] = pb.SessionProgress(
                computed=seconds + 1, num_batches=10 * seconds, num_waiting=40 if seconds > 1 else 2
            )
            await asyncio.sleep(1.0)
        assert (await waiting)[0] == index
        most_s = (4 * 40 * 3 + 16) / 10
        assert most_s < now_s() - start_s < most_s + 10.0


async def test_who_gets_on_slowly_is_let_be() -> None:
    async with opened() as session:
        waiting = asyncio.ensure_future(session.listener.next_event(session.call))
        for number in (FIRST, SECOND, LAST):
            session.stands(number, 0, 0)
            await asyncio.sleep(STEP_S - 2 * SILENCE_S)
        assert not waiting.done()
        waiting.cancel()


@pytest.mark.parametrize(
    ("far", "numbers", "late", "is_slow"),
    [
        ((), (LAST, FIRST, 0), 1, False),
        ((0, 1, 2), (LAST, FIRST, 0), 1, True),  # on its way from the first to the second
        ((0,), (FIRST, 0, 0), 0, True),  # from the client
        ((2,), (LAST, LAST, LAST), 2, True),  # back to it
    ],
)
async def test_who_sends_or_is_sent_a_large_step_is_let_be(
    far: tuple[int, ...], numbers: tuple[int, ...], late: int, is_slow: bool
) -> None:
    """Steps of 1.2 MB over lines that nobody has measured."""
    async with opened(hidden_size=150_000, step_s=100.0, d="0:2", e="2:4", f="4:6") as session:
        session.stands(*numbers)
        for index in far:
            hop = session.hops[index]
            hop.hop = replace(hop.hop, server=replace(hop.hop.server, addresses=("192.0.2.1:1",)))
        if len(far) == 1:  # servers know their lines to one another
            session.listener._swarm.links.see(session.call.inputs, Span(0, NUM_BLOCKS))
            for hop in session.hops:
                hop.hop = replace(hop.hop, server=replace(hop.hop.server, network_tokens_per_s=1e6))
        index, error, seconds = await next_trouble(session)
        assert index == late and "did not finish a step within" in str(error)
        assert 15 < seconds < 20 if is_slow else seconds < 8
