"""Averaging while the next batch is computed: real peers in virtual time, beside delayed SGD in plain torch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_training.compression.power_sgd import PowerSGD
from swarm_training.core.config import TrainingConfig
from swarm_training.run.share import DelayedShare
from swarm_training.run.state import TrainedState
from swarm_training.run.training_run import TrainingRun
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.runs import (
    CONFIG,
    SimulatedPeer,
    UnluckyPeer,
    World,
    all_done,
    drive,
    enter_all,
    gradient_at,
    require_equal_steps,
)

pytestmark = IN_VIRTUAL_TIME

DELAYED = replace(CONFIG, delay=True)
STEPS = 8
LR = 0.1


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def delayed_descent(start: torch.Tensor, weights: dict[int, int], steps: int) -> list[torch.Tensor]:
    """P[t+1] = P[t] - lr * g(P[t-1]), P[1] = P[0] - lr * g(P[0]); g is the mean over all samples."""
    history = [start]
    total = sum(weights.values())
    for step in range(steps):
        at = history[max(step - 1, 0)]
        mean = sum(weight * gradient_at(at, number) for number, weight in weights.items()) / total
        history.append(history[-1] - LR * mean)
    return history


@pytest.mark.parametrize(("latency_s", "call_s"), [(0.01, 0.5), (0.2, 0.05)], ids=["fast line", "slow line"])
async def test_it_is_delayed_sgd(latency_s: float, call_s: float) -> None:
    """Each call completes a batch, so that every gradient is one step old."""
    weights = {0: 7, 1: 1, 2: 30}
    peers = await enter_all(World(latency_s), 3, target=1, config=DELAYED, optimizer=sgd)
    while any(len(peer.peer.view().all) < len(peers) for peer in peers):
        await asyncio.sleep(0.1)  # who is not known of is not waited for
    expected = delayed_descent(peers[0].parameter.detach().clone(), weights, STEPS)
    for step in range(STEPS + 1):
        gradients = [gradient_at(peer.parameter, peer.number) for peer in peers]
        await all_done(
            [
                peer.spawn(peer.step(gradient, weights[peer.number]))
                for peer, gradient in zip(peers, gradients, strict=True)
            ]
        )
        assert {peer.state.step for peer in peers} == {step}
        await asyncio.sleep(call_s)
    for peer in peers:
        assert set(peer.groups.values()) == {3}
        for step in range(1, STEPS + 1):
            torch.testing.assert_close(peer.history[step], expected[step], rtol=1e-5, atol=1e-5)
    require_equal_steps(peers, STEPS)


async def test_a_step_does_not_wait_for_others() -> None:
    peers = await enter_all(World(latency_s=0.5), 2, target=20, config=DELAYED)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await peers[0].step(torch.ones(37), 20)
    assert loop.time() == began_s
    before = peers[0].parameter.detach().clone()
    await peers[0].step(torch.ones(37), 1)  # the other has not come
    assert loop.time() == began_s and torch.equal(peers[0].parameter, before)
    await peers[1].step(torch.ones(37), 5)
    while not await peers[0].peer.has_averaged():
        await asyncio.sleep(0.1)
    assert torch.equal(peers[0].parameter, before)  # nothing changes while the caller computes
    averaged_s = loop.time()
    await peers[0].step(torch.ones(37), 1)
    assert loop.time() == averaged_s and not torch.equal(peers[0].parameter, before)
    assert peers[0].state.step == 1 and peers[0].peer.own.samples == 2


async def test_peers_with_and_without_it_stay_equal_while_others_come_and_fail() -> None:
    world = World(latency_s=0.05)
    peers = [SimulatedPeer.make(world, 0, target=80, config=DELAYED)]
    await peers[0].enter()
    for number, config in enumerate([CONFIG, DELAYED, DELAYED], 1):
        peers.append(SimulatedPeer.make(world, number, target=80, config=config))
        await peers[-1].enter()
    tasks = [peer.spawn(peer.train(0.2 + 0.1 * peer.number, 5, STEPS)) for peer in peers]
    while peers[0].state.step < 4:
        await asyncio.sleep(0.05)
    joiner = SimulatedPeer.make(world, 4, target=80, config=DELAYED)
    await joiner.enter()
    tasks.append(joiner.spawn(joiner.train(0.3, 5, STEPS)))
    while 5 not in joiner.groups.values() or joiner.share._given is None:
        await asyncio.sleep(0.01)
    world.kill(peers[3].peer_id)
    await all_done([task for task in tasks if task is not tasks[3]])
    require_equal_steps([*peers, joiner], STEPS)


class DecliningPeer(UnluckyPeer):
    """Says that the batch is complete, and at the first averaging that it is not after all."""

    async def is_due(self) -> bool:
        return self.reported[-1] in (5, 12)

    async def has_averaged(self) -> bool:
        return True


def test_gradients_of_an_averaging_that_comes_to_nothing_are_kept() -> None:
    """Somebody has left before the meeting."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    peer: Any = DecliningPeer()
    share = DelayedShare(peer, TrainedState([parameter], torch.optim.SGD([parameter], lr=LR)))

    for gradient, samples in ((1.0, 5), (2.0, 4), (3.0, 3)):
        parameter.grad = torch.full((3,), gradient)
        share.add(samples)
        drive(share.report())
    assert peer.reported == [5, 9, 12]
    torch.testing.assert_close(peer.given[0], torch.full((3,), 1.0))
    torch.testing.assert_close(peer.given[1], torch.full((3,), (5.0 + 8.0 + 9.0) / 12))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TrainingConfig(delay=True), "delay is on, and PowerSGD has a state: expected a compressor without one"),
        (TrainingConfig(aggregation="centered_clip"), "PowerSGD has a state: expected one without"),
    ],
)
def test_a_compressor_with_state_is_refused(config: TrainingConfig, reason: str) -> None:
    layer = torch.nn.Linear(64, 64)
    optimizer, compressor = torch.optim.SGD(layer.parameters(), lr=0.1), PowerSGD([(64, 64), (64,)], rank=2)
    with pytest.raises(ValueError, match=reason):
        TrainingRun("toy", layer.parameters(), optimizer, target_batch_size=1, config=config, compressor=compressor)
