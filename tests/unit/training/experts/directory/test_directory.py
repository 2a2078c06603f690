"""What a client remembers of experts, and what it believes of records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.dht.stored_records import subkey_of
from swarm_protocol.errors import PeerUnavailable
from swarm_training.experts.directory import directory
from swarm_training.experts.directory.board import DhtExpertRegistry
from swarm_training.experts.directory.directory import ExpertCache
from swarm_training.experts.directory.records import read_record, record_of
from swarm_training.experts.pb import experts_pb2 as pb
from tests.worlds.experts import MemoryBoard, holder
from tests.worlds.identities import identity


class Scene:
    """A directory with its own clock; refreshes every 10 s, bans for 3 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.board = MemoryBoard()
        self.board.records = {(0,): {holder("a"): {1, 2}, holder("b"): {2}}}
        self.directory = ExpertCache(self.board, refresh_s=10.0, ban_s=3.0, clock=lambda: self.now)

    async def following(self, *prefixes: tuple[int, ...]) -> dict[tuple[int, ...], set[int]]:
        return await self.directory.following(prefixes)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.directory.close()


async def test_what_was_read_a_short_while_ago_is_not_read_again(scene: Scene) -> None:
    assert await scene.following((0,), (1,)) == {(0,): {1, 2}, (1,): set()}
    scene.now = 9.0
    await scene.following((0,), (1,))
    assert sorted(scene.board.reads) == [(0,), (1,)]


async def test_what_is_older_is_used_while_it_is_read_again(scene: Scene) -> None:
    await scene.following((0,))
    scene.board.records[(0,)] = {holder("a"): {3}}
    scene.now = 11.0
    assert await scene.following((0,)) == {(0,): {1, 2}}
    await asyncio.sleep(0)  # the refresh has its turn
    assert await scene.following((0,)) == {(0,): {3}}


async def test_what_is_very_old_is_waited_for(scene: Scene) -> None:
    await scene.following((0,))
    scene.board.records[(0,)] = {holder("a"): {3}}
    scene.now = 61.0
    assert await scene.following((0,)) == {(0,): {3}}
    scene.board.is_down = True
    scene.now = 200.0
    with pytest.raises(PeerUnavailable):
        await scene.following((0,))


async def test_what_is_forgotten_is_read_again_before_it_is_used(scene: Scene) -> None:
    await scene.following((0,))
    scene.board.records[(0,)] = {holder("a"): {3}}
    scene.directory.forget()
    assert scene.directory.holder((0, 1)) is None
    assert await scene.following((0,)) == {(0,): {3}}
    assert scene.directory.holder((0, 3)) == holder("a")


async def test_a_refresh_that_fails_does_no_harm(scene: Scene) -> None:
    await scene.following((0,))
    scene.board.is_down = True
    scene.now = 11.0
    assert await scene.following((0,)) == {(0,): {1, 2}}
    await asyncio.sleep(0)
    assert await scene.following((0,)) == {(0,): {1, 2}}


async def test_servers_that_failed_are_left_out_longer_each_time_until_they_answer(scene: Scene) -> None:
    await scene.following((0,))
    a, b = holder("a"), holder("b")
    assert scene.directory.holder((0, 2)) == a
    for _ in range(2):  # calls that fail together
        scene.directory.failed(a)
    assert await scene.following((0,)) == {(0,): {2}}
    assert scene.directory.holder((0, 2)) == b and scene.directory.holder((0, 1)) is None
    scene.now = 3.0
    assert scene.directory.holder((0, 1)) == a
    scene.directory.failed(a)
    scene.now = 8.0
    assert scene.directory.holder((0, 1)) is None
    scene.now = 9.0
    scene.directory.answered(a, (0, 1))
    scene.directory.failed(a)
    scene.now = 12.0
    assert scene.directory.holder((0, 1)) == a


async def test_so_many_failures_are_remembered_and_the_oldest_forgotten(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that restarts has another peer id."""
    monkeypatch.setattr(directory, "_MAX_BANS", 3)
    scene.board.records[(0,)] = {holder(name): {number} for number, name in enumerate("abcd")}
    await scene.following((0,))
    for name in "abc":
        scene.directory.failed(holder(name))
    scene.now = 4.0
    for name in "abcd":
        scene.directory.failed(holder(name))
    assert len(scene.directory._bans) == 3
    assert await scene.following((0,)) == {(0,): {0}}
    scene.now = 8.0
    assert await scene.following((0,)) == {(0,): {0, 3}}  # the bans of the others are their second ones


async def test_one_expert_can_be_left_out_without_the_others_of_its_server(scene: Scene) -> None:
    await scene.following((0,))
    scene.directory.failed(holder("a"), (0, 1))
    assert await scene.following((0,)) == {(0,): {2}}
    assert scene.directory.holder((0, 2)) == holder("a")


def test_records_are_read_as_they_were_written() -> None:
    assert read_record("a", record_of(holder("a"), 8, [3, 1]), 8, 4) == (holder("a"), frozenset({1, 3}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": 9}, "for rows of 9: expected 2 and 8"),
        ({"wire_version": 7}, "of version 7"),
        ({"address": "x" * 300}, "too long"),
        ({"address": "a\n:1"}, "not printable"),
        ({"tls_fingerprint": b"short"}, "not that of a certificate"),
        ({"next": [4]}, "outside the grid, which has 4 there"),
    ],
)
def test_records_of_strangers_that_do_not_fit_are_refused(changed: dict[str, object], message: str) -> None:
    record = pb.ExpertsRecord.FromString(record_of(holder("a"), 8, [1]))
    for name, value in changed.items():
        record.ClearField(name)
        record.MergeFrom(pb.ExpertsRecord(**{name: value}))
    with pytest.raises(ValueError, match=message):
        read_record("a", record.SerializeToString(), 8, 4)
    with pytest.raises(ValueError, match="no record of experts"):
        read_record("a", b"\xff\xff", 8, 4)


async def test_in_a_private_swarm_servers_that_are_no_members_are_not_believed() -> None:
    organiser, member, stranger = OrganiserKey.generate(), identity(0), identity(1)
    grant = Grant.new(organiser.public, Role.SERVER, "ada", member.peer_id, 0.0, 1e12)
    written = record_of(holder("a"), 8, [1], grant.signed(organiser))
    private = SwarmAccess(member, control=AccessControl(organiser.public))
    registry = DhtExpertRegistry(SimpleNamespace(node=None, access=private), "demo", (4,), 8)  # type: ignore[arg-type]
    records = [(subkey_of(owner), SimpleNamespace(value=written)) for owner in (member, stranger)]
    assert [owner.peer_id for owner, _ in registry._valid(records, 4)] == [member.peer_id]


async def test_who_failed_in_a_pass_is_not_asked_again_in_it_though_its_ban_is_over(scene: Scene) -> None:
    await scene.following((0,))
    first = scene.directory.holder((0, 2))
    assert first is not None
    scene.directory.failed(first)
    scene.now = 4.0
    assert scene.directory.holder((0, 2)) == first
    failures = {(first.peer_id, ())}
    other = scene.directory.holder((0, 2), failures)
    assert other is not None and other != first
    failures.add((other.peer_id, (0, 2)))
    assert scene.directory.holder((0, 2), failures) is None
    found = await scene.directory.following([(0,)], failures)
    assert 2 not in found[(0,)] and (1 in found[(0,)]) == (first.peer_id == holder("b").peer_id)
