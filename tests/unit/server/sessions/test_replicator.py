"""A session is copied in pieces while its steps go on; the copy has all positions once, in order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_server.core.counters import Counters
from swarm_server.kv.kv_transfer import Stored
from swarm_server.net.push import GiveUp
from swarm_server.sessions import replicator
from swarm_server.sessions.replicator import Replicator


class FakePusher:
    """The other server: takes steps, or none at all."""

    is_there = True

    def __init__(self, _neighbours: object, _to: pb.NextHop, give_up: GiveUp) -> None:
        self._give_up = give_up

    async def send(self, step: pb.Step, parts: list[bytes]) -> None:
        if self.is_there:
            TAKEN.append(step)
        else:
            await self._give_up(step, parts)

    async def drain(self) -> bool:
        return self.is_there

    async def retire(self) -> None:
        pass


TAKEN: list[pb.Step] = []


class Source:
    """A session, by default of one row, and a scheduler that reads what it has stored."""

    def __init__(self, length: int, slots: tuple[int, ...] = ()) -> None:
        self.session = SimpleNamespace(length=length, batch_size=1, layout=SimpleNamespace(slots=slots))
        self.number = 5
        self.turn = asyncio.Lock()
        services = SimpleNamespace(neighbours=None, scheduler=self, engine=self, counters=Counters())
        self.replicator = Replicator(services, self.session, pb.NextHop())

    async def call(self, function):
        await asyncio.sleep(0.001)
        return function()

    def stored(self, _session: object, start: int, end: int) -> Stored:
        return Stored(end - start, (end - start,), torch.zeros(end - start))

    async def copy(self) -> None:
        await self.replicator.copy_all(self.turn, lambda: self.number)

    async def step(self, num_tokens: int = 1, changes: tuple[pb.Change, ...] = (), start: int | None = None) -> None:
        async with self.turn:
            start = self.session.length if start is None else start
            self.number, self.session.length = self.number + 1, start + num_tokens
            await self.replicator.follow(pb.Step(number=self.number, start_position=start, changes=changes))


@pytest.fixture(autouse=True)
def other_server(monkeypatch) -> None:
    TAKEN.clear()
    monkeypatch.setattr(replicator, "Pusher", FakePusher)


def taken() -> list[tuple[int, int, int]]:
    """Number, first position and positions of each step that the other server has got."""
    return [(step.number, step.start_position, step.stored.num_tokens) for step in TAKEN]


async def test_the_last_piece_has_the_number_of_the_last_step() -> None:
    source = Source(150)
    await source.copy()
    assert taken() == [(1, 0, 64), (2, 64, 64), (5, 128, 22)]
    await source.step()
    await source.step(3)
    await source.copy()
    assert taken()[3:] == [(6, 150, 1), (7, 151, 3)]
    await source.replicator.close()


async def test_states_are_copied_at_the_last_position_only() -> None:
    source = Source(150, slots=(1,))
    await source.copy()
    assert taken() == [(5, 0, 150)]
    await source.replicator.close()


async def test_a_step_that_changes_what_was_copied_starts_it_again() -> None:
    source = Source(100)
    copying = asyncio.ensure_future(source.copy())
    await asyncio.sleep(0)  # it has its first turn
    await source.step(start=10)
    await copying
    *_, again = TAKEN
    assert [change.WhichOneof("kind") for change in again.changes] == ["crop", "reorder"]
    assert (again.number, again.start_position, again.stored.num_tokens) == (6, 0, 11)
    await source.replicator.close()


async def test_a_server_that_cannot_be_reached_gets_no_copy(monkeypatch) -> None:
    monkeypatch.setattr(FakePusher, "is_there", False)
    source = Source(1000)
    with pytest.raises(PeerUnavailable):
        await source.copy()
    await source.step()
    assert taken() == []
    await source.replicator.close()


async def test_a_copy_that_is_closed_while_it_waits_for_its_turn_reads_nothing() -> None:
    source = Source(80)
    async with source.turn:
        copying = asyncio.ensure_future(source.copy())
        await asyncio.sleep(0)
        await source.replicator.close()
        del source.session.length  # as of a session that has ended
    with pytest.raises(PeerUnavailable):
        await copying
    assert taken() == []


async def test_the_copy_gets_the_rows_that_the_session_has_when_copying_begins() -> None:
    """The other session was opened before: a batch that has grown since would not fit its rows."""
    source = Source(80)
    source.session.batch_size = 3
    await source.copy()
    first, second = TAKEN
    assert [change.WhichOneof("kind") for change in first.changes] == ["crop", "reorder"]
    assert list(first.changes[1].reorder.indices) == [0, 0, 0] and not second.changes
    await source.replicator.close()
