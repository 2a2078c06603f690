"""Bans: whom a moderator has banned takes part no more, whether it obeys or not, and the others go on as before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.errors import AccessDenied
from swarm_training.core.moment import Moment
from swarm_training.core.record import LEFT
from swarm_training.ledger import moderation
from swarm_training.ledger.moderation import Moderation
from swarm_training.ledger.orders import Ban, ModeratorOrder, Orders
from swarm_training.progress import board
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.progress.policy import has_quorum
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.ledger.members import EVE, MODERATOR, NOW, ORGANISER, Member
from tests.unit.training.test_records import record, signed, table
from tests.worlds.identities import identity
from tests.worlds.runs import SimulatedPeer, World, all_done, enter_all

pytestmark = IN_VIRTUAL_TIME

STEPS = 10
BANNED = 2


def obeying(_number: int = 0) -> Orders:
    return Orders("toy", AccessControl(ORGANISER.public, clock=lambda: NOW), lambda: NOW)


def ban(number: int, by: Member = MODERATOR) -> bytes:
    order = ModeratorOrder.new("toy", Ban(identity(number).peer_id, "sends noise"), NOW, 3600.0)
    return order.signed(by.identity, by.token)


@pytest.mark.parametrize("obeys", [True, False])
async def test_the_others_go_on_without_who_is_banned(obeys: bool) -> None:
    world = World()
    options = {"target": 15, "orders": lambda number: obeying() if obeys or number != BANNED else None}
    peers = await enter_all(world, 3, **options)
    tasks = [peer.spawn(peer.train(3.0, 5, STEPS)) for peer in peers]
    while peers[0].state.step < 1:
        await asyncio.sleep(0.5)
    assert peers[0].groups[1] == 3
    world.orders.append(ban(BANNED))
    await all_done(tasks[:BANNED])
    honest = peers[:BANNED]
    assert peers[0].groups[STEPS] == 2 and peers[BANNED].state.step < STEPS
    assert all(torch.equal(honest[0].history[step], honest[1].history[step]) for step in range(1, STEPS + 1))
    assert peers[BANNED].peer_id not in peers[0].peer._standing.roster
    if obeys:
        with pytest.raises(AccessDenied, match="sends noise"):
            await tasks[BANNED]
    world.orders.clear()  # what is on the DHT does not last: members hand it on
    late = SimulatedPeer.make(world, 3, **options)
    await late.enter()
    await asyncio.sleep(5.0)
    assert late.peer._moderation.banned() == {peers[BANNED].peer_id}


async def test_who_is_banned_does_not_get_in() -> None:
    world = World()
    await enter_all(world, 1, target=15, orders=obeying)
    world.orders.append(ban(1))
    with pytest.raises(AccessDenied, match="a moderator has banned"):
        await SimulatedPeer.make(world, 1, target=15, orders=obeying).enter()


def test_only_moderators_ban_and_only_where_there_are_some() -> None:
    known, lawless = Moderation(obeying()), Moderation(None)
    before = known.digest()
    known.take([ban(1, by=EVE), b"noise"])
    assert known.banned() == frozenset() and known.digest() == before
    known.take([ban(1)])
    assert known.banned() == {identity(1).peer_id} and known.digest() != before
    assert known.signed_unless(known.digest()) == [] and len(known.signed_unless(before)) == 1
    lawless.take([ban(1)])
    assert lawless.banned() == frozenset() and lawless.digest() == b"" and known.signed_unless(b"") == []


def test_orders_that_do_not_fit_into_one_reply_come_with_later_ones(monkeypatch) -> None:
    known, late = Moderation(obeying()), Moderation(obeying())
    known.take([ban(number) for number in range(1, 5)])
    monkeypatch.setattr(moderation, "_MAX_REPLY_BYTES", 2 * max(map(len, known.signed_unless(b"other"))))
    assert len(known.signed_unless(late.digest())) == 2
    for _ in range(200):  # the chance that one is never among the two is below 1e-59
        late.take(known.signed_unless(late.digest()))
    assert late.banned() == known.banned() and len(late.banned()) == 4


def test_a_moderators_next_order_joins_the_last_though_the_clock_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[str, SimpleNamespace] = {}
    times = iter((100.0, 100.0, 70.0))

    async def store_item(_node: object, _key: str, subkey: str, data: bytes, expires_at: float) -> bool:
        is_newer = subkey not in stored or expires_at > stored[subkey].expiration_time
        stored[subkey] = SimpleNamespace(value=data, expiration_time=expires_at)
        return is_newer

    async def scenario() -> None:
        known = SimpleNamespace(uid_to_peer_id={"id": "peer"})
        node: Any = SimpleNamespace(protocol=SimpleNamespace(routing_table=known))
        registry = DhtPeerRegistry(node, "toy", identity(0))
        for order in (b"first", b"second", b"third"):
            await registry.publish_order(order)
        assert await registry.read_orders() == [b"first", b"second", b"third"]

    monkeypatch.setattr(board, "store_item", store_item)
    monkeypatch.setattr(board, "read_items", lambda *_: asyncio.sleep(0.0, stored))
    monkeypatch.setattr(board, "get_dht_time", lambda: next(times))
    asyncio.run(scenario())


def test_a_ban_is_found_when_it_comes_and_gone_when_it_expires() -> None:
    now_s = [NOW]
    clock = lambda: now_s[0]  # noqa: E731
    known = Moderation(Orders("toy", AccessControl(ORGANISER.public, clock=clock), clock), clock)
    assert known.banned() == frozenset()
    known.take([ban(1)])
    assert known.banned()
    now_s[0] += 3602.0
    assert known.banned() == frozenset()


def test_who_is_banned_is_neither_there_nor_gone_until_it_leaves_or_all_have_heard() -> None:
    """It still counts in the roster: who has not heard of the ban may vote together with it."""
    known, own, peer_id = table(), record(0), identity(1).peer_id
    known.add(signed(version=5, state_digest=b"theirs", step=1), 0.0)
    known.ban({peer_id}, {peer_id}, 0.0)
    known.ban({peer_id}, {peer_id}, 4.0)
    view = known.view(own, 4.0)
    assert (view.others, view.silent, view.gone) == ((), (), frozenset())
    assert known.since(0, "nobody") == [] and known.majority_digest(Moment(0, 1)) is None
    assert known.view(own, 4.1).gone == {peer_id}
    known.add(signed(version=6, state=LEFT), 4.0)
    assert known.view(own, 4.0).gone == {peer_id}
    known.ban((), (), 4.0)
    assert known.majority_digest(Moment(0, 1)) == b"theirs"


async def test_whom_one_excludes_by_itself_keeps_its_vote() -> None:
    """Or a peer whose own hardware is at fault could exclude all others, and go on alone."""
    world = World()
    peers = await enter_all(world, 3, target=15)
    standing = peers[0].peer._standing
    for other in peers[1:]:
        standing.exclude(other.peer_id)
    standing.view()
    await asyncio.sleep(30.0)
    view = standing.view()
    assert view.others == () and view.gone == frozenset()
    roster = [peer.peer_id for peer in peers]
    assert not has_quorum([peers[0].peer_id], roster, view.gone)
