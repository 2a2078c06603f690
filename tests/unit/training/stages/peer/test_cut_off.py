"""Networks that are cut: between mates of a stage, and around one of two. The run goes on, as one process trains."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import combinations

import pytest

from swarm_training.core.record import JOINING, Progress
from swarm_training.progress.cut_off import must_stand_aside
from swarm_training.progress.policy import LocalView
from swarm_training.stages.commands.building import PRESUME_GONE_S
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.stages.peer.test_simulated_stages import require_equal_to_single, start
from tests.worlds.stages import CONFIG, SimulatedStagePeer, StageWorld, ToyTrainer

pytestmark = IN_VIRTUAL_TIME

STAGES, MICRO_BATCHES = 2, 4
AS_IN_RUNS = replace(CONFIG, presume_gone_s=PRESUME_GONE_S)


async def until(peers: list[SimulatedStagePeer], step: int) -> None:
    async with asyncio.timeout(300.0):  # of the world's own clock
        while any(peer.peer.own.step < step for peer in peers):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", [0, 1], ids=["the first one", "the other one"])
async def test_of_two_peers_of_a_stage_either_goes_on_without_the_other(number: int) -> None:
    world = StageWorld(STAGES, MICRO_BATCHES, AS_IN_RUNS)
    peers = await start(world)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(1)
    silent = sorted(world.alive(1), key=lambda peer: peer.peer_id)[number]
    world.isolate(silent.peer_id)
    left_at = silent.peer.own.step
    await until([peer for peer in peers if peer is not silent], left_at + 3)
    assert silent.peer.own.step <= left_at + 1
    world.cut.clear()
    await world.reach(left_at + 5)
    training.cancel()
    require_equal_to_single(world, left_at + 5)
    assert {peer.state.moment.rollbacks for peer in peers} == {0}  # nothing was lost


@pytest.mark.parametrize(
    ("mates", "parts"),
    [(3, [[0], [1]]), (3, [[0], [1, 2]]), (4, [[0, 1], [2, 3]])],
    ids=["two of three", "one from two", "halves"],
)
async def test_mates_that_cannot_call_each_other_go_on_without_some_of_them(mates: int, parts: list[list[int]]) -> None:
    """Whoever else there is can call them all. ``parts``: of the stage's peers, by their ids, that cannot."""
    world = StageWorld(STAGES, MICRO_BATCHES, AS_IN_RUNS)
    peers = [world.join(0), *(world.join(1) for _ in range(mates))]
    while any(not peer.peer.own.state_digest for peer in peers):
        await asyncio.sleep(0.1)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(1)
    stage = sorted(world.alive(1), key=lambda peer: peer.peer_id)
    near, far = ([stage[number] for number in part] for part in parts)
    world.cut |= {frozenset((a.peer_id, b.peer_id)) for a in near for b in far}
    step = peers[0].peer.own.step
    await until(peers[:1], step + 4)
    async with asyncio.timeout(300.0):  # the rest may have gone on before those behind know that they are cut off
        while any(frozenset((a.peer_id, b.peer_id)) in world.cut for a, b in combinations(taking_part(stage), 2)):
            await asyncio.sleep(0.1)
    assert taking_part(stage)
    world.cut.clear()
    await until(peers, step + 6)
    training.cancel()
    assert not any(peer.peer.own.state == JOINING for peer in peers)
    require_equal_to_single(world, step + 6)
    assert {peer.state.moment.rollbacks for peer in peers} == {0}


def taking_part(stage: list[SimulatedStagePeer]) -> list[SimulatedStagePeer]:
    return [peer for peer in stage if peer.peer.own.state != JOINING]


def peer(name: str, step: int = 5) -> Progress:
    return Progress("toy/0", name, step=step, address="sim:0")


@pytest.mark.parametrize(
    ("own", "others", "failing_s", "expected"),
    [
        ("b", "a", {"a": 9.0}, True),
        ("b", "a", {"a": 7.0}, False),  # not for long
        ("a", "b", {"b": 9.0}, False),  # the other one does
        ("a", "bc", {"b": 9.0, "c": 9.0}, True),  # alone
        ("b", "ac", {"a": 9.0}, False),  # perhaps that one is alone
        ("b", "ac", {"a": 17.0}, True),  # it is not
        ("c", "abd", {"a": 9.0, "b": 9.0}, True),  # of halves, the second
        ("b", "acd", {"c": 9.0, "d": 9.0}, False),
        ("b", "ac", {"x": 99.0}, False),
    ],
)
def test_who_stands_aside_follows_from_who_cannot_be_called(
    own: str, others: str, failing_s: dict[str, float], expected: bool
) -> None:
    view = LocalView(peer(own), tuple(map(peer, others)))
    assert must_stand_aside(view, failing_s, 8.0) is expected


def test_the_newest_state_stays_and_who_is_behind_stands_aside() -> None:
    ahead, behind = LocalView(peer("b", 6), (peer("a", 5),)), LocalView(peer("a", 5), (peer("b", 6),))
    assert not must_stand_aside(ahead, {"a": 99.0}, 8.0) and must_stand_aside(behind, {"b": 9.0}, 8.0)
