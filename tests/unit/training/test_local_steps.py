"""Local steps between averages: real peers in virtual time, beside plain loops and the run that averages every step."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_training import LocalSteps, TrainingConfig, TrainingRun
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.compression.power_sgd import PowerSGD
from swarm_training.core.config import RollbackPolicy
from swarm_training.core.moment import Moment
from swarm_training.optim.local_steps import InnerSteps
from swarm_training.run.meetings import NO_LOSS
from swarm_training.run.share import DelayedLocalShare, LocalShare
from swarm_training.run.state import TrainedState
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.runs import (
    CONFIG,
    SimulatedPeer,
    UnluckyPeer,
    World,
    all_done,
    drive,
    gradient_at,
    require_equal,
)

pytestmark = IN_VIRTUAL_TIME

LR = 0.05
Optimizer = torch.optim.Optimizer


def mean_outer(parameters: Any, lr: float) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def nesterov_outer(parameters: Any, lr: float) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def adamw(parameter: torch.nn.Parameter, batch_size: int = 1) -> LocalSteps:
    return LocalSteps(torch.optim.AdamW([parameter], lr=LR, weight_decay=0.1), batch_size)


def descent(rate: float, parameter: torch.nn.Parameter) -> LocalSteps:
    return LocalSteps(torch.optim.SGD([parameter], lr=rate))


DELAYED = replace(CONFIG, delay=True)
LOCAL: dict[str, Any] = {"optimizer": mean_outer, "local": adamw}


async def enter(
    count: int, world: World | None = None, encoder: Callable[[], Any] = lambda: None, **options: Any
) -> list[SimulatedPeer]:
    """All of them know of each other: who is not known of is not waited for."""
    world, peers = world or World(), list[SimulatedPeer]()
    for number in range(count):
        peers.append(SimulatedPeer.make(world, number, encoder=encoder(), **{**LOCAL, **options}))
        await peers[-1].enter()
    while any(len(peer.peer.view().all) < count for peer in peers):
        await asyncio.sleep(0.1)
    return peers


def encoder_of(codec: str) -> ErrorFeedback | None:
    return None if codec == "fp32" else ErrorFeedback(codec_of(codec))


async def call(peer: SimulatedPeer, samples: int) -> None:
    await peer.step(gradient_at(peer.parameter, peer.number), samples)


def plain_loop(calls: list[int], samples: list[int], rounds: int) -> list[Tensor]:
    """DiLoCo in one process: the parameters after each round."""
    theta, history, velocity = torch.zeros(37), [], torch.zeros(37)
    own = [torch.nn.Parameter(theta.clone()) for _ in calls]
    inner = [adamw(parameter).inner for parameter in own]
    for _ in range(rounds):
        total = torch.zeros(37)
        for number, (parameter, optimizer) in enumerate(zip(own, inner, strict=True)):
            with torch.no_grad():
                parameter.copy_(theta)
            for _ in range(calls[number]):
                parameter.grad = gradient_at(parameter, number)
                optimizer.step()
            total += calls[number] * samples[number] * (theta - parameter.detach())
        mean = total / sum(count * each for count, each in zip(calls, samples, strict=True))
        velocity = 0.9 * velocity + mean
        theta = theta - 0.7 * (mean + 0.9 * velocity)
        history.append(theta)
    return history


@pytest.mark.parametrize(("codec", "tolerance"), [("fp32", 1e-5), ("int8", 2e-2)])
async def test_it_is_diloco_with_peers_of_different_speeds(codec: str, tolerance: float) -> None:
    calls, samples, rounds = [4, 2, 3], [5, 2, 7], 3
    early = sum((count - 1) * each for count, each in zip(calls, samples, strict=True))
    options = {"optimizer": nesterov_outer, "config": replace(CONFIG, codec=codec)}
    peers = await enter(3, None, partial(encoder_of, codec), target=early + 1, **options)
    expected = plain_loop(calls, samples, rounds)
    for number in range(rounds):
        for peer in peers:
            for _ in range(calls[peer.number] - 1):
                await call(peer, samples[peer.number])
        await asyncio.sleep(2.0)  # all hear of it
        before = [peer.parameter.detach().clone() for peer in peers]
        assert not torch.equal(before[0], before[1]) and not torch.equal(before[0], peers[0].history[number])
        await all_done([peer.spawn(call(peer, samples[peer.number])) for peer in peers])
        for peer in peers:
            assert peer.state.step == number + 1 and torch.equal(peer.parameter, peers[0].parameter)
            assert peer.share.last_batch_size == sum(c * each for c, each in zip(calls, samples, strict=True))
            torch.testing.assert_close(peer.parameter.detach(), expected[number], rtol=tolerance, atol=tolerance)
    assert len({peer.state.digest() for peer in peers}) == 1


def late_loop(samples: list[int], steps: int) -> list[Tensor]:
    """Local steps in one process, one between two averages, and each average applied one step late: the shared
    parameters after each average."""
    theta, history, given = torch.zeros(37), [], list[Tensor]()
    own = [torch.nn.Parameter(theta.clone()) for _ in samples]
    inner = [adamw(parameter).inner for parameter in own]
    for _ in range(steps):
        for number, (parameter, optimizer) in enumerate(zip(own, inner, strict=True)):
            parameter.grad = gradient_at(parameter, number)
            optimizer.step()
        if given:
            mean = sum(count * each for count, each in zip(samples, given, strict=True)) / sum(samples)
            theta = theta - mean
            history.append(theta)
            with torch.no_grad():
                for parameter, part in zip(own, given, strict=True):
                    parameter += part - mean
        given = [theta - parameter.detach() for parameter in own]
    return history


async def test_steps_that_are_taken_while_earlier_ones_are_averaged_are_kept_for_the_next_average() -> None:
    samples, steps = [5, 2, 7], 5
    peers = await enter(3, World(latency_s=0.2), target=1, config=DELAYED)
    for step in range(steps):
        await all_done([peer.spawn(call(peer, samples[peer.number])) for peer in peers])
        assert {peer.state.step for peer in peers} == {step}
    for step, expected in enumerate(late_loop(samples, steps), 1):
        for peer in peers:
            torch.testing.assert_close(peer.history[step], expected, rtol=1e-5, atol=1e-5)
    require_equal(peers)


async def test_a_step_has_all_samples_of_its_batch_and_only_these_are_averaged() -> None:
    peers = await enter(2, target=8, local=partial(adamw, batch_size=4))
    gradients = [torch.randn(37, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    expected = torch.nn.Parameter(peers[0].parameter.detach().clone())
    await peers[0].step(gradients[0], 3)
    assert torch.equal(peers[0].parameter, expected) and peers[0].peer.own.samples == 0
    await peers[0].step(gradients[1], 2)
    expected.grad = (3 * gradients[0] + 2 * gradients[1]) / 5
    adamw(expected).inner.step()
    torch.testing.assert_close(peers[0].parameter.detach(), expected.detach())
    await peers[0].step(gradients[2], 1)
    assert peers[0].peer.own.samples == 5
    moved = peers[0].parameter.detach().clone()
    await peers[1].step(gradients[2], 2)
    await asyncio.sleep(2.0)
    last = [peers[1].spawn(peers[1].step(gradients[2], 2))]
    await asyncio.sleep(0.5)
    last.append(peers[0].spawn(peers[0].step(gradients[2] * nan, 1)))
    await all_done(last)
    own = torch.nn.Parameter(torch.zeros(37))
    own.grad = gradients[2]
    adamw(own).inner.step()
    assert peers[0].share.last_batch_size == 9
    torch.testing.assert_close(peers[0].parameter.detach(), (5 * moved + 4 * own.detach()) / 9)
    await peers[0].step(gradients[2], 3)  # with the one from before the average
    assert peers[0].peer.own.samples == 4


async def test_steps_are_clipped_and_not_their_sum() -> None:
    gradients = [torch.randn(37, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    config = replace(CONFIG, max_norm=0.5)
    (peer,) = await enter(1, target=3, config=config, local=partial(descent, 1.0))
    for gradient in gradients:
        await peer.step(gradient, 1)
    expected = -sum(0.5 * gradient / (gradient.norm() + 1e-6) for gradient in gradients)
    assert peer.state.step == 1 and expected.norm() > 0.5  # type: ignore[union-attr]
    torch.testing.assert_close(peer.parameter.detach(), expected)


def test_gradients_that_are_missing_are_zero() -> None:
    pair = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    inner = InnerSteps(LocalSteps(torch.optim.SGD(pair, lr=1.0), 4), pair)
    pair[0].grad = torch.full((2,), 8.0)
    assert inner.take(1) and not inner.step()
    pair[1].grad = torch.full((2,), 4.0)
    assert inner.take(3) and inner.step() == 4
    assert pair[0].tolist() == [-1.0, -1.0] and pair[1].tolist() == [-2.0, -2.0]
    assert pair[0].grad is None


def unlucky_share(kind: type[LocalShare]) -> tuple[torch.nn.Parameter, UnluckyPeer, TrainedState, LocalShare]:
    parameter, peer = torch.nn.Parameter(torch.zeros(3)), UnluckyPeer()
    state = TrainedState([parameter], mean_outer([parameter], 1.0), drifts=True)
    return parameter, peer, state, kind(peer, state, descent(0.5, parameter))  # type: ignore[arg-type]


def step_alone(share: LocalShare, parameter: torch.nn.Parameter, gradient: float) -> None:
    parameter.grad = torch.full((3,), gradient)
    share.add(2)
    drive(share.report())


@pytest.mark.parametrize("kind", [LocalShare, DelayedLocalShare])
def test_a_round_that_fails_changes_nothing(kind: type[LocalShare]) -> None:
    parameter, peer, state, share = unlucky_share(kind)
    digest = state.digest()
    step_alone(share, parameter, 1.0)
    assert state.digest() == digest and state.step == 0
    assert parameter.tolist() == [-0.5] * 3
    peer.may_meet = True
    step_alone(share, parameter, 4.0)
    assert [each.tolist() for each in peer.given] == [[0.5] * 3, [2.5] * 3] and peer.reported == [2, 4]


def test_a_step_that_is_not_finite_takes_nothing_back_that_is_being_averaged() -> None:
    parameter, _peer, _state, share = unlucky_share(DelayedLocalShare)
    step_alone(share, parameter, 1.0)
    for _ in range(3):
        parameter.grad = torch.full((3,), 3e38)
        share.add(2)
    assert parameter.tolist() == [-0.5] * 3 and share.samples == 0


@pytest.mark.parametrize("config", [CONFIG, DELAYED], ids=["waiting", "delayed"])
async def test_peers_are_equal_after_every_average_while_others_come_and_fail(config: TrainingConfig) -> None:
    world = World(latency_s=0.05)
    options = {**LOCAL, "target": 80, "config": config, "optimizer": nesterov_outer}
    peers = await enter(4, world, **options)

    async def train(peer: SimulatedPeer) -> None:
        while peer.state.step < 6:
            await asyncio.sleep(0.2 + 0.1 * peer.number)
            await call(peer, 5)

    tasks = [peer.spawn(train(peer)) for peer in peers]
    while peers[0].state.step < 3:
        await asyncio.sleep(0.05)
    joiner = SimulatedPeer.make(world, 4, **options)
    await joiner.enter()
    tasks.append(joiner.spawn(train(joiner)))
    while joiner.state.step < 4:
        await asyncio.sleep(0.01)
    world.kill(peers[3].peer_id)
    await all_done([task for task in tasks if task is not tasks[3]])
    assert {len(peer.history) for peer in peers[:3]} == {7}
    require_equal([*peers, joiner])


LATE = replace(CONFIG, max_meeting_s=2.0)


async def left_behind(rounds: int) -> list[SimulatedPeer]:
    """Three peers, of which the last has taken a step when the others go on without it."""
    peers = await enter(3, target=8, config=LATE, local=partial(descent, 0.5))
    await call(peers[2], 4)
    for _ in range(rounds):
        await asyncio.sleep(1.0)
        await all_done([peer.spawn(call(peer, 8)) for peer in peers[:2]])
    assert [peer.state.step for peer in peers] == [rounds, rounds, 0]
    await asyncio.sleep(1.0)
    return peers


async def test_who_is_late_by_one_average_brings_its_steps_into_the_next() -> None:
    peers = await left_behind(1)
    late, shared = peers[2], peers[0].history[1]
    gradient = gradient_at(late.parameter, 2)
    drift = peers[0].history[0] - (late.parameter.detach() - 0.5 * gradient)
    await late.step(gradient, 2)
    assert late.state.step == 1 and torch.equal(late.state.shared_parameters[0], shared)
    assert late.peer.own.samples == 6 and late.share.samples == 6
    torch.testing.assert_close(late.parameter.detach(), shared - drift)
    await asyncio.sleep(1.0)
    steps = [0.5 * gradient_at(shared, 0), 0.5 * gradient_at(shared, 1)]
    steps.append(drift + 0.5 * gradient_at(late.parameter, 2))
    await all_done([peer.spawn(call(peer, 2)) for peer in peers])
    assert late.share.last_batch_size == 12
    expected = shared - (2 * steps[0] + 2 * steps[1] + 8 * steps[2]) / 12
    torch.testing.assert_close(late.parameter.detach(), expected)
    require_equal(peers)


async def test_steps_that_are_older_are_dropped() -> None:
    peers = await left_behind(2)
    await call(peers[2], 2)
    assert peers[2].state.step == 2 and torch.equal(peers[2].parameter, peers[0].history[2])
    assert peers[2].peer.own.samples == 0


async def test_steps_that_the_others_may_have_counted_are_not_given_again() -> None:
    """A peer hears nothing more once it has sent its part."""
    world = World()
    peers = await enter(3, world, target=8, config=LATE)
    late = peers[2].peer_id

    def cut_off(source: str, _target: str, message: Any) -> None:
        if source == late and "report" in str(message)[:40]:
            world.on_message = lambda *_: None
            world.isolate(late)

    world.on_message = cut_off
    tasks = [peer.spawn(call(peer, 8)) for peer in peers]
    while any(peer.state.step < 1 for peer in peers[:2]):
        await asyncio.sleep(0.1)
    assert peers[2].state.step == 0 and world.cut
    world.cut.clear()
    await all_done(tasks)
    assert peers[2].state.step == 1 and peers[2].peer.own.samples == 0
    assert torch.equal(peers[2].parameter, peers[0].history[1])
    require_equal(peers)


async def test_all_go_back_to_what_they_shared_and_forget_the_steps_since() -> None:
    policy = RollbackPolicy(margin=0.5, patience=3, window=8, warmup=4)
    config = replace(CONFIG, checkpoint_every=1, checkpoints_kept=4, rollback=policy)
    peers = await enter(3, target=40, config=config)

    async def train(peer: SimulatedPeer) -> None:
        while peer.state.moment < Moment(1, 4):
            await asyncio.sleep(0.3 + 0.2 * peer.number)
            is_broken = peer.state.step >= 3 and not peer.state.moment.rollbacks and peer.share.samples >= 5
            gradient = gradient_at(peer.parameter, peer.number)
            await peer.step(gradient * nan if is_broken else gradient, 5, nan if is_broken else 2.0)
            if peer.state.moment == Moment(1, 2) and peer.share.samples == 0:
                went_back.append(peer.number)
                assert torch.equal(peer.parameter, peer.moments[Moment(0, 2)])
                assert not peer.share._inner._local.inner.state  # type: ignore[attr-defined]

    went_back: list[int] = []
    await all_done([peer.spawn(train(peer)) for peer in peers])
    assert sorted(went_back) == [0, 1, 2]
    require_equal(peers)
    assert all(torch.equal(peer.moments[Moment(1, 2)], peer.moments[Moment(0, 2)]) for peer in peers)


def drifting() -> tuple[TrainedState, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.linspace(0.1, 0.7, 37))
    state = TrainedState([parameter], nesterov_outer([parameter], 1.0), drifts=True)
    state.apply(torch.ones(37))
    with torch.no_grad():
        parameter += 0.3 * torch.randn(37, generator=torch.Generator().manual_seed(0))
    return state, parameter


def test_what_is_saved_sent_and_compared_is_what_all_share() -> None:
    state, parameter = drifting()
    plain = torch.nn.Parameter(torch.linspace(0.1, 0.7, 37))
    reference = TrainedState([plain], nesterov_outer([plain], 1.0))
    reference.apply(torch.ones(37))
    (moment, file), (expected, other_file) = state.snapshot(), reference.snapshot()
    assert state.digest() == reference.digest()
    assert moment == expected and b"".join(file.parts()) == b"".join(other_file.parts())
    drifted = parameter.detach().clone()
    assert torch.equal(state.drift(), plain.detach() - drifted)
    with state.restored():
        assert torch.equal(parameter, plain)
    assert torch.equal(parameter, drifted) and not torch.equal(drifted, plain)
    state.go_to(Moment(1, 1), None)
    assert torch.equal(parameter, plain) and state.moment == Moment(1, 1)
    other, there = drifting()
    reference.apply(torch.ones(37))
    other.load(*reference.snapshot())
    assert torch.equal(there, plain) and other.digest() == reference.digest() and not other.drift().any()


def test_bfloat16_steps_are_not_lost_between_its_numbers() -> None:
    parameter = torch.nn.Parameter(torch.full((2,), 1.0, dtype=torch.bfloat16))
    state = TrainedState([parameter], mean_outer([parameter], 1.0), drifts=True)
    with torch.no_grad():
        parameter += 2.0**-7
    assert state.drift().tolist() == [-(2.0**-7)] * 2
    with state.restored():
        assert parameter.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("loss", "left"), [(2.0, NO_LOSS), (inf, (inf, 3))])
def test_parameters_that_are_not_finite_are_not_given(
    loss: float, left: tuple[float, int], caplog: pytest.LogCaptureFixture
) -> None:
    parameter, peer = torch.nn.Parameter(torch.ones(3)), UnluckyPeer(may_meet=False)
    state = TrainedState([parameter], mean_outer([parameter], 1.0), drifts=True)
    share = LocalShare(peer, state, descent(1e30, parameter))  # type: ignore[arg-type]
    parameter.grad = torch.ones(3)
    share.add(1, 1.0)
    assert share.samples == 1
    parameter.grad = torch.full((3,), 1e30)
    share.add(3, loss)
    assert share.samples == 0 and parameter.tolist() == [1.0] * 3 and not state.drift().any()
    assert caplog.messages == ["a local step led to parameters that are not finite: 4 samples are left out"]
    assert (share._losses, share._loss_samples) == left  # a loss that is not finite may cause a rollback


def run(**options: Any) -> TrainingRun:
    layer = torch.nn.Linear(64, 64)
    local = LocalSteps(torch.optim.AdamW(layer.parameters()), 4)
    return TrainingRun("toy", layer.parameters(), **{"target_batch_size": 8, "local": local, **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"config": TrainingConfig(counting="exact")}, "counting is 'exact', and there are local steps: expected"),
        ({"config": TrainingConfig(codec="2bit")}, "codec is '2bit': expected an encoder with it"),
        ({"compressor": PowerSGD([(64, 64), (64,)], 2)}, "PowerSGD has a state: expected a compressor without one"),
        (
            {"target_batch_size": 3},
            "batch_size of local steps is 4: expected at most the target_batch_size, which is 3",
        ),
        ({"local": None}, "optimizer is missing: expected one, since there are no local steps"),
        (
            {"local": LocalSteps(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))},
            "parameter 0 is not in the optimizer",
        ),
    ],
)
def test_what_does_not_go_with_them_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        run(**options)


async def test_peers_with_other_local_steps_are_told_so() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    assert adamw(parameter, 4).common != adamw(parameter, 5).common != descent(1.0, parameter).common
    with pytest.raises(ValueError, match="batch_size of local steps is 0: expected at least 1"):
        adamw(parameter, 0)
    world = World()
    await enter(1, world, target=8, local=partial(adamw, batch_size=4))
    joiner = SimulatedPeer.make(world, 1, target=8, **LOCAL)
    with pytest.raises(ValueError, match="batch_size of local steps is 1 here and 4 in the run: expected the same"):
        await joiner.enter()
