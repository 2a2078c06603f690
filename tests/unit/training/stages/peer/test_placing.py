"""Who joins takes the stage that limits the run, and peers move there when one is lost, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from math import inf

import torch

from swarm_training.core.record import JOINING, Progress
from swarm_training.stages.peer.placing import PlacementTimes, margin_of, stage_view
from swarm_training.stages.placement.stage_choice import PlacedPeer, PlacementView, own_move
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.stages.peer.test_simulated_stages import require_equal_to_single
from tests.worlds.stages import HIDDEN, ROWS, StageWorld, ToyTrainer, micro_batch

pytestmark = IN_VIRTUAL_TIME

PACE = PlacementTimes(look_s=2.0, check_s=(1.0, 2.0), cooldown_s=5.0, step_s=5.0)


def record(peer_id: str, version: int = 1, **fields: object) -> Progress:
    return Progress("toy/0", peer_id, version, **fields)  # type: ignore[arg-type]


def test_a_view_of_stages_is_made_of_the_newest_records() -> None:
    first = [record("a", samples_per_s=4.0, may_move=True, next_stage=1), record("b", 3, next_stage=7)]
    second = [record("b", 2, samples_per_s=9.0), record("c", samples_per_s=1.0, state=JOINING)]
    assert stage_view([first, second], [1.0, 2.0]).peers == (
        PlacedPeer("a", 0, 4.0, next_stage=1),
        PlacedPeer("b", 0, 3.0, may_move=False),  # not measured: as the others; and there is no stage 7
        PlacedPeer("c", 1, 2.0, is_working=False, may_move=False),
    )
    assert stage_view([[record("a")], []], [1.0, 1.0]).peers[0].speed == 1.0


def test_noise_of_measured_speeds_moves_nobody() -> None:
    peers = [PlacedPeer(name, stage, speed) for name, stage, speed in (("a", 0, 10.0), ("b", 0, 1.0), ("c", 1, 9.8))]
    few = PlacementView((1.0,) * 2, tuple(peers))
    assert own_move(few, "b") == 1 and own_move(few, "b", margin_of(few)) is None
    assert margin_of(PlacementView((1.0,) * 2, ())) == 0.4
    assert margin_of(PlacementView((1.0,) * 2, tuple(PlacedPeer(str(number), 0, 1.0) for number in range(80)))) == 0.01


def places(world: StageWorld) -> Counter[int]:
    return Counter(peer.stage_peer.index for peer in world.alive() if peer.peer.own.state_digest)


async def until_placed(world: StageWorld, **expected: int) -> None:
    async with asyncio.timeout(600.0):
        while places(world) != Counter({int(stage[1:]): number for stage, number in expected.items()}):
            await asyncio.sleep(0.1)


async def test_those_who_join_take_the_emptier_stages_and_do_not_choose_the_same() -> None:
    world = StageWorld(3, 4)
    for index in (0, 0, 1, 2):
        world.join(index)
    await until_placed(world, s0=2, s1=1, s2=1)
    for _ in range(2):
        world.join_where_it_helps(replace(PACE, cooldown_s=1e6))  # to move would mend what was chosen wrongly
    await asyncio.gather(*world.choosing)
    await until_placed(world, s0=2, s1=2, s2=2)


async def test_a_peer_moves_to_a_stage_that_was_lost_and_the_run_is_that_of_one_process() -> None:
    world = StageWorld(2, 4, tied=True)
    for _ in range(3):
        world.join_where_it_helps(PACE, 0)
    lonely = world.join(1)
    await until_placed(world, s0=3, s1=1)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(3)
    world.kill(lonely.peer_id)
    await until_placed(world, s0=2, s1=1)
    await world.reach(max(peer.state.step for peer in world.alive()) + 4)
    assert len(world.former) == 1 and not training.done()
    training.cancel()
    require_equal_to_single(world, 6)


async def test_a_peer_that_may_wait_for_the_end_of_a_long_round_moves_no_earlier() -> None:
    world = StageWorld(2, 8)
    for _ in range(4):
        world.join_where_it_helps(replace(PACE, step_s=inf), 0)
    world.join(1)
    await until_placed(world, s0=4, s1=1)
    for m, peer in enumerate(world.alive(0)):
        peer.backward(0, m, "one", micro_batch(0, m), torch.ones(ROWS, HIDDEN))
        assert await peer.stage_peer.counting.commit(0, m, "one")
    await asyncio.sleep(5 * PACE.step_s)  # virtual
    assert places(world) == {0: 4, 1: 1} and any(peer.peer.own.next_stage == 1 for peer in world.alive(0))
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await until_placed(world, s0=3, s1=2)
    training.cancel()
