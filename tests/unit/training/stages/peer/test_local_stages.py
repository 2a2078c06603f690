"""Local steps between the replicas of each stage: real peers in virtual time, beside plain loops of torch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm_protocol.codecs.bitmap import from_bits
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.stages.trainer.config import TrainerConfig
from tests.marks import IN_VIRTUAL_TIME, SLOW
from tests.unit.training.stages.peer.test_simulated_stages import Churn, start
from tests.worlds.stages import CONFIG, SimulatedStagePeer, StageWorld, ToyStage, ToyTrainer, micro_batch

pytestmark = IN_VIRTUAL_TIME

LR = 2.0**-4


def descent(batch_size: int, stage: ToyStage) -> LocalSteps:
    return LocalSteps(torch.optim.SGD(stage.parameters, LR), batch_size)


def adamw(batch_size: int, stage: ToyStage) -> LocalSteps:
    return LocalSteps(torch.optim.AdamW(stage.parameters, LR, weight_decay=0.1), batch_size)


def nesterov(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.7, momentum=0.9, nesterov=True)


def local_world(
    num_stages: int,
    num_micro_batches: int,
    local: Callable[[ToyStage], LocalSteps],
    config: TrainingConfig = CONFIG,
    **attributes: Any,
) -> StageWorld:
    world = StageWorld(num_stages, num_micro_batches, config)
    world.local = local
    for name, value in attributes.items():
        setattr(world, name, value)
    return world


def require_agreement(world: StageWorld, steps: int) -> dict[tuple[int, Moment], list[Tensor]]:
    """The shared weights by stage and moment, which are the same bits at all peers that have had them."""
    known: dict[tuple[int, Moment], list[Tensor]] = {}
    compared = 0
    for peer in world.everybody.values():
        for moment, parameters in peer.history.items():
            first = known.setdefault((peer.stage_peer.index, moment), parameters)
            compared += first is not parameters
            assert all(map(torch.equal, first, parameters)), (peer.number, moment)
    assert compared and steps in {moment.step for _, moment in known}
    return known


def mean_of(gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]


def passes(
    stages: Sequence[ToyStage], backwards: Sequence[ToyStage], step: int, m: int
) -> list[tuple[int, Sequence[Tensor]]]:
    """The gradients of a micro-batch by stage, the last first: forward through some replicas, back through others."""
    inputs, grad, found = [micro_batch(step, m)], None, []
    for stage in stages[:-1]:
        inputs.append(stage.forward(inputs[-1]))
    for index in reversed(range(len(stages))):
        gradients = backwards[index].backward(inputs[index], grad)
        grad = gradients.inputs
        found.append((index, gradients.parameters))
    return found


class PlainReplica:
    """A replica of a stage in plain torch: it steps once it has H gradients, and with the rest at the round's end."""

    def __init__(self, index: int, num_stages: int, batch_size: int) -> None:
        self.stage, self._batch_size = ToyStage(index, num_stages), batch_size
        self._inner = adamw(batch_size, self.stage).inner
        self._waiting: list[Sequence[Tensor]] = []
        self.num_done = 0

    def take(self, gradients: Sequence[Tensor]) -> None:
        self._waiting.append(gradients)
        self.num_done += 1
        if len(self._waiting) == self._batch_size:
            self.step()

    def step(self) -> None:
        if self._waiting:
            for parameter, gradient in zip(self.stage.parameters, mean_of(self._waiting), strict=True):
                parameter.grad = gradient
            self._inner.step()
            self._waiting = []

    def begin_round(self, theta: Sequence[Tensor]) -> None:
        self.num_done = 0
        with torch.no_grad():
            for parameter, shared in zip(self.stage.parameters, theta, strict=True):
                parameter.copy_(shared)


async def test_replicas_take_the_outer_step_of_the_weighted_mean_of_what_each_has_trained() -> None:
    """7 micro-batches: of the first stage's two replicas one has 3 and the other 4, with two in a step. Passes go back
    through other replicas than they came, as after a failure: the gradient is that of the weights there."""
    num_stages, num_micro_batches, rounds, batch_size = 2, 7, 3, 2
    world = local_world(num_stages, num_micro_batches, partial(adamw, batch_size), outer=nesterov)
    await start(world)
    peers = [sorted(world.alive(index), key=lambda peer: peer.number) for index in range(num_stages)]
    replicas = [[PlainReplica(index, num_stages, batch_size) for _ in range(2)] for index in range(num_stages)]
    theta = [[each.detach().clone() for each in pair[0].stage.parameters] for pair in replicas]
    velocity = [[torch.zeros_like(each) for each in stage] for stage in theta]

    def going(m: int) -> list[int]:
        return [m % 2, (m // 2) % 2]  # by stage, the replica of the forward pass

    def coming(m: int) -> list[int]:
        return [m % 2 if m != 2 else 1, (m // 3) % 2]

    for step in range(rounds):
        for m in range(num_micro_batches):
            there = [peers[index][number] for index, number in enumerate(going(m))]
            back = [peers[index][number] for index, number in enumerate(coming(m))]
            await take_through(there, back, step, m)
            plain = [replicas[index][number].stage for index, number in enumerate(going(m))]
            plain_back = [replicas[index][number] for index, number in enumerate(coming(m))]
            for index, gradients in passes(plain, [each.stage for each in plain_back], step, m):
                plain_back[index].take(gradients)
        await world.reach(step + 1)
        for index, pair in enumerate(replicas):
            for replica in pair:
                replica.step()
            assert sorted(replica.num_done for replica in pair) == [3, 4]
            for at, shared in enumerate(theta[index]):
                drifts = [replica.num_done * (shared - replica.stage.parameters[at].detach()) for replica in pair]
                mean = (drifts[0] + drifts[1]) / num_micro_batches
                velocity[index][at] = 0.9 * velocity[index][at] + mean
                theta[index][at] = shared - 0.7 * (mean + 0.9 * velocity[index][at])
            for replica in pair:
                replica.begin_round(theta[index])
            first, second = (peer.state.shared_parameters for peer in peers[index])
            assert all(map(torch.equal, first, second))
            for own, expected in zip(first, theta[index], strict=True):
                torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
            assert peers[index][0].state.digest() == peers[index][1].state.digest()
    require_agreement(world, rounds)


async def take_through(
    there: Sequence[SimulatedStagePeer], back: Sequence[SimulatedStagePeer], step: int, m: int
) -> None:
    inputs, grad = [micro_batch(step, m)], None
    for peer in there[:-1]:
        inputs.append(await peer.call(partial(peer.forward, step, inputs[-1]), 0.01))
    for index in reversed(range(len(back))):
        peer = back[index]
        grad = await peer.call(partial(peer.backward, step, m, "one", inputs[index], grad), 0.01)
        assert await peer.call(partial(peer.stage_peer.counting.commit, step, m, "one"), 0.0)
    await asyncio.sleep(0.1)  # virtual: all have taken the local step that follows


async def test_a_round_ends_without_a_replica_that_dies_in_it_and_each_micro_batch_is_in_it_once() -> None:
    num_stages, num_micro_batches = 2, 12
    world = local_world(num_stages, num_micro_batches, partial(descent, 2))
    await start(world, per_stage=3)
    training = asyncio.ensure_future(ToyTrainer(world, at_a_time=2).run())
    victim = world.alive(1)[0]
    while victim.state.step < 1 or len(victim.stage_peer.counting.done) < 3:
        await asyncio.sleep(0.001)
    step, lost = victim.state.step, victim.stage_peer.counting.done
    assert bool(victim.state.drift().any())
    world.kill(victim.peer_id)
    counted: dict[str, frozenset[int]] = {}
    while there := [peer for peer in world.alive(1) if peer.state.step == step]:
        counted |= {peer.peer_id: peer.stage_peer.counting.done for peer in there}
        await asyncio.sleep(0.001)
    await world.reach(step + 1)
    training.cancel()
    await asyncio.sleep(0.02)  # virtual: the world has noted what all have
    assert lost and Counter(m for each in counted.values() for m in each) == Counter(range(num_micro_batches))
    require_agreement(world, step + 1)


class SlowThread:
    """Computes one job after the other, and then waits for so much virtual time."""

    def __init__(self) -> None:
        self.job_s = 0.0
        self._lock = asyncio.Lock()

    async def __call__(self, function: Callable[[], Any]) -> Any:
        async with self._lock:
            result = function()
            await asyncio.sleep(self.job_s)
            return result


async def test_commits_are_shown_while_requests_are_queued_and_the_next_one_begins_with_the_local_step() -> None:
    """Jobs take longer than trainers wait for the peer's record to show a commit."""
    thread = SlowThread()
    world = local_world(1, 8, partial(descent, 2), compute=lambda: thread)
    (peer,) = await start(world, per_stage=1)
    thread.job_s = 2 * TrainerConfig().settle_s
    jobs = [
        asyncio.ensure_future(peer.stage_peer.compute(lambda: bool(peer.state.drift().any()), 1.0)) for _ in range(3)
    ]
    await asyncio.sleep(0.5)  # the first one has begun
    for m in range(5):
        peer.backward(0, m, "one", micro_batch(0, m), None)
        assert await peer.stage_peer.counting.commit(0, m, "one")
        await asyncio.sleep(0.5)
        assert from_bits(peer.peer.own.micro_batches, 8) == set(range(m + 1))
    assert not jobs[0].done()
    assert await asyncio.gather(*jobs) == [False, True, True]


async def test_a_stage_that_loses_all_of_its_peers_goes_on_from_a_checkpoint_of_shared_weights() -> None:
    world = local_world(2, 6, partial(adamw, 2), outer=nesterov)
    await start(world)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(3)
    for peer in world.alive(1):
        world.kill(peer.peer_id)
    replacements = [world.join(1), world.join(1)]
    await world.reach(5)
    training.cancel()
    assert {peer.state.moment.rollbacks for peer in world.alive()} == {1}
    known = require_agreement(world, 5)
    began = min(min(peer.history) for peer in replacements)
    assert all(map(torch.equal, known[1, began], known[1, Moment(0, began.step)]))
    assert all(map(torch.equal, known[0, began], known[0, Moment(0, began.step)]))


@pytest.mark.parametrize(("codec", "has_encoder"), [("2bit", True), pytest.param("int8", False, marks=SLOW)])
async def test_replicas_agree_under_kills_with_any_codec(codec: str, has_encoder: bool) -> None:
    encoder: Any = lambda: ErrorFeedback(codec_of(codec)) if has_encoder else None  # noqa: E731
    world = local_world(2, 8, partial(adamw, 2), replace(CONFIG, codec=codec), encoder=encoder)
    await start(world, per_stage=3)
    churn = Churn(world, seed=5, most_s=3.0)
    tasks = [asyncio.ensure_future(each.run()) for each in (ToyTrainer(world, seed=5), churn)]
    await world.reach(8)
    for task in tasks:
        task.cancel()
    require_agreement(world, 8)
    assert churn.killed >= 2
