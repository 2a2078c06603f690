"""Runs that go back to a checkpoint: the real code of many peers in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch

from swarm_training.core.config import RollbackPolicy
from swarm_training.core.moment import Moment
from swarm_training.ledger.orders import GoBack, ModeratorOrder
from swarm_training.pb import training_pb2 as pb
from tests.marks import IN_VIRTUAL_TIME, SLOW
from tests.unit.training.ledger.members import MODERATOR, NOW
from tests.unit.training.test_moderation import obeying
from tests.worlds.runs import CONFIG, SimulatedPeer, World, all_done, enter_all, require_equal, simulate

pytestmark = IN_VIRTUAL_TIME

POLICY = RollbackPolicy(margin=0.5, patience=3, window=8, warmup=4)
CHECKPOINTS = replace(CONFIG, checkpoint_every=3, rollback=POLICY)
SAMPLES = 5
LossOf = Callable[[SimulatedPeer], float | None]


def usual(_peer: SimulatedPeer) -> float:
    return 2.0


def broken(at_step: int, loss: float = nan) -> LossOf:
    """As if the parameters of that step were wrong, until the run has gone back."""
    return lambda peer: loss if peer.state.moment >= Moment(0, at_step) and not peer.state.moment.rollbacks else 2.0


async def train(peer: SimulatedPeer, loss_of: LossOf, until: Moment) -> None:
    """Gradients are not finite if the loss is not."""
    generator = torch.Generator().manual_seed(peer.number)
    while peer.state.moment < until:
        await asyncio.sleep(0.3 + 0.2 * (peer.number % 4))
        loss = loss_of(peer)
        gradient = torch.randn(peer.parameter.shape, generator=generator)
        await peer.step(gradient if loss is None or abs(loss) < inf else gradient * nan, SAMPLES, loss)


def start(peers: list[SimulatedPeer], loss_of: LossOf, until: Moment) -> list[asyncio.Task[Any]]:
    return [peer.spawn(train(peer, loss_of, until)) for peer in peers]


def require_gone_back(peers: list[SimulatedPeer], to: Moment, before: Moment) -> None:
    require_equal(peers)
    earlier = [moment for peer in peers for moment in peer.moments if moment.rollbacks < to.rollbacks]
    assert max(earlier) == before  # one that is a step behind goes back with the others
    for peer in peers:
        assert torch.equal(peer.moments[to], peer.moments[replace(to, rollbacks=to.rollbacks - 1)])
        assert peer.peer.rollbacks.went_back_to == to.step


@pytest.mark.parametrize(("loss", "delay"), [(nan, False), (inf, True)])
async def test_all_go_back_to_the_same_checkpoint_when_the_loss_is_not_finite(loss: float, delay: bool) -> None:
    """At step 7; the states of steps 0, 3 and 6 are kept. One of them cannot be called."""
    world, config = World(), replace(CHECKPOINTS, delay=delay)
    peers = await enter_all(world, 3, target=40, config=config)
    peers.append(SimulatedPeer.make(world, 3, target=40, config=replace(config, client_mode=True)))
    await peers[3].enter()
    await all_done(start(peers, broken(7, loss), Moment(1, 9)))
    require_gone_back(peers, Moment(1, 6), Moment(0, 7))
    assert len({peer.peer.rollbacks.history for peer in peers}) == 1


async def test_a_loss_that_stays_above_its_median_is_undone() -> None:
    """High from step 7 on, which is known after 3 steps; the state of step 6 is the last that was not part of it."""
    peers = await enter_all(World(), 4, target=40, config=CHECKPOINTS)
    await all_done(start(peers, broken(7, 2.6), Moment(1, 9)))
    require_gone_back(peers, Moment(1, 6), Moment(0, 9))


async def test_a_state_that_is_not_finite_is_not_gone_back_to() -> None:
    """A step makes the parameters infinite, at a step whose state would be kept."""
    peers = await enter_all(World(), 2, target=20, config=CHECKPOINTS)
    for peer in peers:
        apply = peer.state.apply

        def breaking(gradient: torch.Tensor, state: Any = peer.state, apply: Any = apply) -> None:
            apply(gradient * (inf if state.moment == Moment(0, 5) else 1))

        peer.state.apply = breaking
    is_broken: LossOf = lambda peer: nan if not peer.parameter.isfinite().all() else 2.0  # noqa: E731
    await all_done(start(peers, is_broken, Moment(1, 8)))
    assert all(peer.moments[Moment(0, 6)].isnan().any() for peer in peers)
    assert all(torch.equal(peer.moments[Moment(1, 3)], peer.moments[Moment(0, 3)]) for peer in peers)


@pytest.mark.parametrize("away", ["asleep", "client"])
async def test_who_was_away_takes_over_where_the_others_have_gone_back_to(away: str) -> None:
    """It is at step 7 of the run's first life, and ahead of them in steps."""
    world = World()
    peers = [SimulatedPeer.make(world, 0, target=40, config=CHECKPOINTS)]
    await peers[0].enter()
    for number in (1, 2, 3):
        config = replace(CHECKPOINTS, client_mode=away == "client" and number == 3)
        peers.append(SimulatedPeer.make(world, number, target=40, config=config))
        await peers[-1].enter()
    *awake, sleeper = peers
    tasks = start(awake, broken(7), Moment(1, 6))
    sleeping = start([sleeper], broken(7), Moment(0, 7))
    await all_done(sleeping)
    world.isolate(sleeper.peer_id)
    await all_done(tasks)
    assert sleeper.state.moment == Moment(0, 7) and awake[0].state.moment == Moment(1, 6)
    world.cut.clear()
    await all_done(start(peers, usual, Moment(1, 9)))
    require_equal(peers)
    assert sleeper.peer.rollbacks.went_back_to == 6


async def test_who_joins_later_judges_as_the_others_do_and_is_given_the_checkpoint() -> None:
    """It has neither seen the usual losses nor the state that all go back to; and it joins after another rollback."""
    world = World()
    options = {"target": 30, "config": replace(CHECKPOINTS, checkpoint_every=30)}
    peers = await enter_all(world, 2, **options)

    def loss_of(peer: SimulatedPeer) -> float:
        first = peer.state.moment >= Moment(0, 2) and not peer.state.moment.rollbacks
        second = Moment(1, 15) <= peer.state.moment < Moment(2, 0)
        return nan if first else 9.0 if second else 2.0

    tasks = start(peers, loss_of, Moment(2, 4))
    while peers[0].state.moment < Moment(1, 6):
        await asyncio.sleep(0.1)
    joiners = [SimulatedPeer.make(world, number, **options) for number in (2, 3, 4)]
    await asyncio.gather(*(joiner.enter() for joiner in joiners))
    assert all(joiner.peer.rollbacks.history.usual for joiner in joiners)
    assert not any(joiner.peer.rollbacks.kept.digests() for joiner in joiners)
    await all_done(tasks + start(joiners, loss_of, Moment(2, 4)))
    require_equal([*peers, *joiners])
    assert all(torch.equal(joiner.moments[Moment(2, 0)], peers[0].moments[Moment(0, 0)]) for joiner in joiners)
    assert all(0 in joiner.peer.rollbacks.kept.digests() for joiner in joiners)
    assert len({peer.peer.rollbacks.history for peer in (*peers, *joiners)}) == 1


STRIKES = [("leader", "report", 1), ("leader", "commit", 1), ("leader", "commit", 3), ("member", "report", 3)]
RARE_STRIKES = [("leader", "group", 2), ("member", "group", 1), ("member", "commit", 2)]


@pytest.mark.parametrize(
    ("victim", "kind", "count"), [*STRIKES, *(pytest.param(*each, marks=SLOW) for each in RARE_STRIKES)]
)
async def test_one_dies_while_it_is_decided(victim: str, kind: str, count: int) -> None:
    """At the ``count``-th message of that kind from or to the leader: whatever was decided, the others agree on it."""
    world = World()
    peers = await enter_all(world, 5, target=50, config=CHECKPOINTS)
    by_id = {peer.peer_id: peer for peer in peers}
    left = [count]
    killed: list[SimulatedPeer] = []
    leaders: set[str] = set()

    def strike(source: str, target: str, message: Any) -> None:
        what = message.WhichOneof("kind") if isinstance(message, pb.MeetReply | pb.MeetRequest) else ""
        if what == "group" and message.group.HasField("go_back"):
            leaders.add(source)
        leader, member = (target, source) if what == "report" else (source, target)
        if killed or leader not in leaders or what != kind:
            return
        left[0] -= 1
        if left[0] == 0:
            killed.append(by_id[leader if victim == "leader" else member])
            asyncio.get_running_loop().call_soon(world.kill, killed[0].peer_id)

    world.on_message = strike
    tasks = dict(zip(peers, start(peers, broken(7), Moment(1, 9)), strict=True))
    while not killed:
        await asyncio.sleep(0.1)
    await all_done([task for peer, task in tasks.items() if peer is not killed[0]])
    survivors = [peer for peer in peers if peer is not killed[0]]
    require_gone_back(survivors, Moment(1, 6), Moment(0, 7))


def go_back(step: int, rollbacks: int) -> bytes:
    return ModeratorOrder.new("toy", GoBack(step, rollbacks), NOW, 3600.0).signed(MODERATOR.identity, MODERATOR.token)


async def test_a_run_goes_back_once_when_a_moderator_orders_it() -> None:
    """To the newest checkpoint that is not later than the order says; a later one is for what comes then."""
    world = World()
    config = replace(CHECKPOINTS, checkpoints_kept=20)
    options = {"target": 20, "config": config, "orders": obeying}
    peers = await enter_all(world, 3, **options)
    await all_done(start(peers, usual, Moment(0, 8)))
    world.orders.append(go_back(5, 0))
    await all_done(start(peers, usual, Moment(1, 6)))
    reached = max(moment for moment in peers[0].moments if not moment.rollbacks)
    assert reached >= Moment(0, 8)
    require_gone_back(peers, Moment(1, 3), reached)
    late = SimulatedPeer.make(world, 3, **options)
    await late.enter()
    await all_done(start([*peers, late], usual, Moment(1, 14)))
    assert {peer.state.moment for peer in (*peers, late)} == {Moment(1, 14)}
    world.orders.append(go_back(11, 1))
    await all_done(start([*peers, late], usual, Moment(2, 10)))
    require_equal([*peers, late])
    assert torch.equal(late.moments[Moment(2, 9)], peers[0].moments[Moment(1, 9)])


async def test_of_two_orders_at_the_same_moment_the_run_carries_out_one() -> None:
    """Each of two peers has heard of another order, and all gradients are lost too."""
    world = World()
    config = replace(CHECKPOINTS, checkpoints_kept=20)
    peers = await enter_all(world, 4, target=40, config=config, orders=obeying)
    await all_done(start(peers, usual, Moment(0, 8)))
    for peer, step in zip(peers[:2], (3, 6), strict=True):
        peer.peer._moderation.take([go_back(step, 0)])
    await all_done(start(peers, broken(8), Moment(1, 9)))
    assert {peer.state.moment for peer in peers} == {Moment(1, 9)}
    (to,) = {peer.peer.rollbacks.went_back_to for peer in peers}
    assert to in (3, 6)
    require_gone_back(peers, Moment(1, to), max(moment for moment in peers[0].moments if not moment.rollbacks))


async def test_an_order_does_not_wait_for_a_batch_that_never_is_complete() -> None:
    world = World()
    options = {"target": 20, "config": CHECKPOINTS, "orders": obeying}
    peers = await enter_all(world, 3, **options)
    await all_done(start(peers, usual, Moment(0, 4)))
    for peer in peers:
        peer.share.add = without_loss(peer.share.add)  # type: ignore[method-assign]
    tasks = start(peers, broken(4), Moment(1, 5))
    await asyncio.sleep(60.0)
    assert {peer.state.moment for peer in peers} == {Moment(0, 4)}
    world.orders.append(go_back(3, 0))
    await all_done(tasks)
    require_gone_back(peers, Moment(1, 3), Moment(0, 4))


def without_loss(add: Callable[..., None]) -> Callable[..., None]:
    return lambda samples, loss=None: add(samples, None)


def test_what_cannot_be_undone_is_said_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """No checkpoint is as old as the order says, or there are none at all."""

    async def scenario() -> None:
        world = World()
        peers = await enter_all(world, 2, target=20, config=CHECKPOINTS, orders=obeying)
        await all_done(start(peers, usual, Moment(0, 10)))
        world.orders.append(go_back(5, 0))  # the states of steps 6 and 9 are kept
        await all_done(start(peers, usual, Moment(0, 16)))
        assert all(set(peer.groups.values()) == {2} for peer in peers)

    with caplog.at_level(logging.WARNING):
        simulate(scenario)
    said = [record.getMessage() for record in caplog.records if "ordered" in record.getMessage()]
    assert len(said) == 2 and said[0].startswith("a moderator has ordered to go back to step 5: the run goes on")
