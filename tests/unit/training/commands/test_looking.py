"""What is seen of a run from outside follows from its peers' signed records, and from nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf

import pytest
import torch

from swarm_training.commands.looking import peers_of, view_of
from swarm_training.contract.views import HeldOutView, RunView
from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING, LEFT, MEETING, HeldOutLoss, Progress
from swarm_training.core.signing import sign
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.identities import identity
from tests.worlds.runs import World, all_done, enter_all

pytestmark = IN_VIRTUAL_TIME

RECORD = Progress("toy", "", version=1, step=3, target_batch_size=9, model=b"m")


def signed(number: int, **changes: object) -> object:
    own = identity(number)
    return sign(replace(RECORD, peer_id=own.peer_id, **changes), own)


async def test_losses_bytes_and_samples_are_those_of_the_batch() -> None:
    """37 elements of 4 bytes; each of the n peers' parts and means travel (n − 1) times in all."""
    world = World()
    peers = await enter_all(world, 3, target=9)
    await peers[0].step(torch.ones(37), 2, loss=1.0)
    await peers[0].step(torch.ones(37), 2, loss=2.0)
    await peers[1].step(torch.ones(37), 3, loss=4.0)
    await asyncio.sleep(2.0)  # virtual: progress spreads
    last = [peers[2].spawn(peers[2].step(torch.ones(37), 2))]
    await asyncio.sleep(0.5)
    last += [peer.spawn(peer.drive(peer.share.report())) for peer in peers[:2]]
    await all_done(last)
    await asyncio.sleep(20.0)  # all are on the DHT
    view = view_of("toy", 9, peers_of("toy", world.records.values()))
    assert (view.step, view.samples, view.target_batch_size) == (1, 0, 9)
    assert view.loss == pytest.approx((2 * 1.0 + 2 * 2.0 + 3 * 4.0) / 7)
    assert view.bytes_sent == view.bytes_received == 2 * (3 - 1) * 37 * 4
    assert {peer.peer_id for peer in view.peers} == {peer.peer_id for peer in peers}
    await peers[1].step(torch.ones(37), 4)
    await asyncio.sleep(20.0)
    view = view_of("toy", 9, peers_of("toy", world.records.values()))
    speed = sum(peer.samples_per_s for peer in view.peers)
    assert view.samples == 4 and speed > 0 and view.next_step_s == pytest.approx((9 - 4) / speed)


def test_who_has_left_lies_or_trains_something_else_is_not_there() -> None:
    forged = signed(1)
    forged.signature = b"x"
    records = [
        *(signed(1, version=2, state=MEETING), signed(1), signed(2, step=2), forged),
        *(signed(3, state=LEFT), signed(4, state=JOINING), signed(5, run="other"), signed(6, model=b"other")),
    ]
    peers = peers_of("toy", records)
    assert {peer.peer_id: peer.version for peer in peers} == {identity(1).peer_id: 2, identity(2).peer_id: 1}


def test_losses_on_held_out_data_are_the_newest_and_the_lowest_of_the_present_history() -> None:
    def loss(step: int, value: float, rollbacks: int = 1) -> HeldOutLoss:
        return HeldOutLoss(Moment(rollbacks, step), value, 5)

    records = [
        signed(1, rollbacks=1, step=50, newest_held_out=loss(40, 2.0), best_held_out=loss(20, 1.5, rollbacks=0)),
        signed(2, rollbacks=1, step=49, held_out=loss(50, inf)),
        signed(3, rollbacks=1, step=50, held_out=loss(45, 0.1, rollbacks=0)),  # of a step that was undone
        signed(4, rollbacks=0, step=60, newest_held_out=loss(60, 0.2, 0), best_held_out=loss(60, 0.2, 0)),
        signed(5, rollbacks=1, step=50, held_out=HeldOutLoss(Moment(1, 50), 0.0, 0)),  # it could not
    ]
    view = view_of("toy", 9, peers_of("toy", records))
    assert view.held_out == HeldOutView(50, None) and view.best_held_out == HeldOutView(20, 1.5)
    assert not view.has_ended
    ended = view_of("toy", 9, peers_of("toy", [*records, signed(6, rollbacks=1, step=50, has_ended=True)]))
    assert ended.has_ended


def test_samples_of_earlier_steps_do_not_count_for_the_next() -> None:
    records = [
        signed(1, samples=2, samples_per_s=2.0, loss=1.0, loss_samples=3),
        signed(2, samples=7, samples_per_s=9.0, loss=5.0, loss_samples=1, step=2),
    ]
    view = view_of("toy", 10, peers_of("toy", records))
    assert (view.step, view.loss, view.samples, view.target_batch_size) == (3, 2.0, 2, 9)
    assert view.next_step_s == pytest.approx(7 / 11)
    assert [peer.samples for peer in sorted(view.peers, key=lambda peer: peer.samples_per_s)] == [2, 0]
    limited = view_of("toy", 10, peers_of("toy", records), max_samples=1)
    assert (limited.loss, limited.samples, max(peer.samples for peer in limited.peers)) == (3.0, 1, 1)


def test_a_run_is_where_it_has_gone_back_to() -> None:
    """Who has not heard of the rollback yet is at a later step, and behind."""
    records = [signed(1, step=9, samples=5), signed(2, step=6, rollbacks=1, samples=4, loss=inf, loss_samples=2)]
    view = view_of("toy", 10, peers_of("toy", records))
    assert (view.rollbacks, view.step, view.samples, view.loss) == (1, 6, 4, inf)


def test_nobody_there() -> None:
    assert view_of("toy", 9, ()) == RunView("toy", 0, None, 0, 9, None, 0, 0)
