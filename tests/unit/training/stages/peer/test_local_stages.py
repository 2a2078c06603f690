"""Local steps between the replicas of each stage: real peers in virtual time, beside plain loops of torch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm_training.compression.codecs import Codec, codec_of
from swarm_training.compression.error_feedback import ChunkPlace, ErrorFeedback
from swarm_training.core.bitmap import from_bits
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.optim.weight_average import average_of
from swarm_training.stages.trainer.config import TrainerConfig
from tests.marks import IN_VIRTUAL_TIME, SLOW
from tests.unit.training.stages.peer.test_simulated_stages import Churn, start, train
from tests.worlds.runs import simulate
from tests.worlds.stages import CONFIG, SimulatedStagePeer, StageWorld, ToyStage, ToySums, ToyTrainer, micro_batch
from tests.worlds.toy_stages import ToyGradients

pytestmark = IN_VIRTUAL_TIME

LR = 2.0**-4


def descent(batch_size: int, stage: ToyStage, lr: float = LR) -> LocalSteps:
    return LocalSteps(torch.optim.SGD(stage.parameters, lr), batch_size)


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


# ---------------------------------------------------------------- one replica per stage


async def test_with_one_peer_at_each_stage_it_is_one_process_that_takes_the_local_steps() -> None:
    """Two steps of SGD in a round; the round's end only writes the same weights as θ − (θ − θ′)."""
    num_stages, num_micro_batches, rounds = 3, 4, 4
    world = local_world(num_stages, num_micro_batches, partial(descent, 2))
    await start(world, per_stage=1)
    await train(world, rounds, ToyTrainer(world, at_a_time=1))

    stages = [ToyStage(index, num_stages) for index in range(num_stages)]
    plain = [torch.optim.SGD(stage.parameters, LR) for stage in stages]
    for step in range(rounds):
        before = [[each.detach().clone() for each in stage.parameters] for stage in stages]
        for first in range(0, num_micro_batches, 2):
            computed = [dict(passes(stages, stages, step, m)) for m in (first, first + 1)]
            for index, (stage, optimizer) in enumerate(zip(stages, plain, strict=True)):
                for parameter, one, other in zip(stage.parameters, *(each[index] for each in computed), strict=True):
                    parameter.grad = ((_grid(one) + _grid(other)) / 2).float()
                optimizer.step()
        for peer in world.alive():
            index = peer.stage_peer.index
            for own, theta, stepped in zip(
                peer.history[Moment(0, step + 1)], before[index], stages[index].parameters, strict=True
            ):
                assert torch.equal(own, theta - (theta - stepped.detach()))
                torch.testing.assert_close(own, stepped.detach(), rtol=0, atol=1e-7)
                with torch.no_grad():
                    stepped.copy_(own)


def _grid(gradient: Tensor) -> Tensor:
    return (gradient.double() * 2.0**40).round() / 2.0**40


# ---------------------------------------------------------------- two replicas per stage


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


@pytest.mark.parametrize("outer", ["mean", pytest.param("nesterov", marks=SLOW)])
async def test_replicas_become_the_weighted_mean_of_what_each_has_trained(outer: str) -> None:
    """7 micro-batches: of the first stage's two replicas one has 3 and the other 4, with two in a step. Passes go back
    through other replicas than they came, as after a failure: the gradient is that of the weights there."""
    num_stages, num_micro_batches, rounds, batch_size = 2, 7, 3, 2
    world = local_world(num_stages, num_micro_batches, partial(adamw, batch_size))
    if outer == "nesterov":
        world.outer = nesterov
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
                moved = 0.7 * (mean + 0.9 * velocity[index][at]) if outer == "nesterov" else mean
                theta[index][at] = shared - moved
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


# ---------------------------------------------------------------- failures


class NotedSums(ToySums):
    """Attributes:
    rounds: by step, the gradients in the sums of each local step of that round, as they are now.
    """

    def __init__(self, stage: ToyStage) -> None:
        self.rounds: dict[int, list[list[Tensor]]] = {}
        super().__init__(stage)

    def commit(self, step: int, m: int, trainer: str) -> bool:
        gradient = self._pending.get((m, trainer))
        is_done = super().commit(step, m, trainer)
        if is_done and gradient is not None:
            self.rounds[step][-1].append(gradient)
        return is_done

    def take(self) -> tuple[Tensor, int]:
        self.rounds[self.step].append([])
        return super().take()

    def discard(self) -> None:
        self.rounds[self.step] = [[]]
        super().discard()


async def test_a_round_ends_without_a_replica_that_dies_in_it_and_each_micro_batch_is_in_it_once() -> None:
    num_stages, num_micro_batches = 2, 12
    noted: dict[ToyStage, NotedSums] = {}

    def sums_of(stage: ToyStage) -> NotedSums:
        return noted.setdefault(stage, NotedSums(stage))

    world = local_world(num_stages, num_micro_batches, partial(descent, 2), sums=sums_of)
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
    known = require_agreement(world, step + 1)
    for index in range(num_stages):
        theta = known[index, Moment(0, step)]
        expected = [torch.zeros_like(each) for each in theta]
        for peer in world.alive(index):
            batches = [each for each in noted[peer.stage].rounds[step] if each]
            if not batches:
                continue
            share = sum(map(len, batches)) / num_micro_batches
            moved = LR * torch.stack([torch.stack(each).mean(0) for each in batches]).sum(0)
            for part, total in zip(_parts(moved, theta), expected, strict=True):
                total += share * part
        for own, before, moved_by in zip(known[index, Moment(0, step + 1)], theta, expected, strict=True):
            torch.testing.assert_close(own, before - moved_by, rtol=1e-5, atol=1e-6)


def _parts(vector: Tensor, shapes: Sequence[Tensor]) -> list[Tensor]:
    sizes = [each.numel() for each in shapes]
    return [part.view(each.shape).float() for part, each in zip(vector.split(sizes), shapes, strict=True)]


async def test_of_two_replicas_that_have_the_same_micro_batch_one_takes_its_steps_back() -> None:
    world = local_world(1, 6, partial(descent, 1))
    lower, higher = sorted(await start(world), key=lambda peer: peer.peer_id)
    for peer, numbers in ((lower, [0, 1]), (higher, [1, 2])):
        for m in numbers:
            peer.backward(0, m, "one", micro_batch(0, m), None)
            assert await peer.stage_peer.counting.commit(0, m, "one")
    await asyncio.sleep(1.0)
    assert from_bits(lower.peer.own.micro_batches, 6) == {0, 1} and bool(lower.state.drift().any())
    assert from_bits(higher.peer.own.micro_batches, 6) == set() and not higher.state.drift().any()
    await train(world, 3, ToyTrainer(world, "one", 1), ToyTrainer(world, "two", 2))
    require_agreement(world, 3)


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


async def busy_peer(batch_size: int, lr: float = LR) -> tuple[SimulatedStagePeer, SlowThread]:
    """The only peer of a run, whose jobs take longer than trainers wait for its record to show a commit."""
    thread = SlowThread()
    world = local_world(1, 8, lambda stage: descent(batch_size, stage, lr), compute=lambda: thread)
    (peer,) = await start(world, per_stage=1)
    thread.job_s = 2 * TrainerConfig().settle_s
    return peer, thread


async def test_commits_are_shown_while_requests_are_queued_and_the_next_one_begins_with_the_local_step() -> None:
    peer, _ = await busy_peer(2)
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


async def test_no_request_is_computed_with_weights_that_are_not_finite() -> None:
    peer, _ = await busy_peer(1, lr=1e38)

    def has_finite_weights() -> bool:
        return all(bool(each.isfinite().all()) for each in peer.state.parameters)

    first = asyncio.ensure_future(peer.stage_peer.compute(has_finite_weights, 1.0))
    await asyncio.sleep(0.5)
    for number in range(2):
        large = [torch.full_like(each, 100.0) for each in peer.stage.parameters]
        peer.stage_peer.counting.add(0, number, "one", ToyGradients(None, large))
        assert await peer.stage_peer.counting.commit(0, number, "one")
    await asyncio.sleep(0.5)
    later = [asyncio.ensure_future(peer.stage_peer.compute(has_finite_weights, 1.0)) for _ in range(3)]
    assert all(await asyncio.gather(first, *later))
    assert not peer.stage_peer.counting.done and not from_bits(peer.peer.own.micro_batches, 8)


async def test_who_was_cut_off_in_a_round_takes_over_what_the_others_have() -> None:
    world = local_world(2, 8, partial(adamw, 1))
    peers = await start(world)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    odd = max(world.alive(1), key=lambda peer: peer.peer_id)  # the other one decides a draw
    while odd.state.step < 1 or not odd.state.drift().any():
        await asyncio.sleep(0.001)
    left_at = odd.state.step
    world.isolate(odd.peer_id)
    while any(peer.state.step < left_at + 2 for peer in peers if peer is not odd):
        await asyncio.sleep(0.1)
    assert odd.state.step == left_at
    world.cut.clear()
    await world.reach(left_at + 5)
    training.cancel()
    require_agreement(world, left_at + 5)


async def test_who_joins_in_a_round_begins_with_the_shared_weights() -> None:
    world = local_world(2, 8, partial(adamw, 1))
    await start(world, per_stage=1)
    training = asyncio.ensure_future(ToyTrainer(world, at_a_time=1).run())
    first = world.alive(0)[0]
    while first.state.step < 1 or not first.state.drift().any():
        await asyncio.sleep(0.001)
    newcomer = world.join(0)
    await world.reach(4)
    training.cancel()
    assert min(newcomer.history) < Moment(0, 4)
    require_agreement(world, 4)


async def test_a_stage_that_loses_all_of_its_peers_goes_on_from_a_checkpoint_of_shared_weights() -> None:
    world = local_world(2, 6, partial(adamw, 2), outer=nesterov)
    await start(world)
    training = asyncio.ensure_future(ToyTrainer(world).run())
    await world.reach(5)
    for peer in world.alive(1):
        world.kill(peer.peer_id)
    replacements = [world.join(1), world.join(1)]
    await world.reach(8)
    training.cancel()
    assert {peer.state.moment.rollbacks for peer in world.alive()} == {1}
    known = require_agreement(world, 8)
    began = min(min(peer.history) for peer in replacements)
    assert all(map(torch.equal, known[1, began], known[1, Moment(0, began.step)]))
    assert all(map(torch.equal, known[0, began], known[0, Moment(0, began.step)]))


async def test_the_moving_average_is_that_of_the_shared_weights() -> None:
    world = local_world(2, 4, partial(adamw, 1), replace(CONFIG, average_decay=0.9))
    await start(world)
    await train(world, 4, ToyTrainer(world))
    known = require_agreement(world, 4)
    for peer in world.alive():
        newest = peer.state.step
        for at, parameter in enumerate(peer.state.parameters):
            shared = [known[peer.stage_peer.index, Moment(0, step)][at] for step in range(1, newest + 1)]
            expected = shared[0]
            for each in shared[1:]:
                expected = 0.9 * expected + 0.1 * each
            found = average_of(peer.state._optimizer, parameter)
            assert found is not None
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_run_goes_on_from_its_disks(tmp_path: Path) -> None:
    async def live(until: int) -> dict[tuple[int, Moment], list[Tensor]]:
        world = local_world(2, 6, partial(adamw, 2), outer=nesterov)
        for index in (0, 1):
            for number in (0, 1):
                world.join(index, tmp_path / f"{index}-{number}")
        training = asyncio.ensure_future(ToyTrainer(world).run())
        await world.reach(until)
        training.cancel()
        await asyncio.sleep(1.0)
        for peer in world.alive():
            world.kill(peer.peer_id)
        return require_agreement(world, until)

    first = simulate(partial(live, 5))
    second = simulate(partial(live, 7))
    for index in (0, 1):
        began = min(moment for stage, moment in second if stage == index)
        assert began.rollbacks == 1 and began.step >= 4
        assert all(map(torch.equal, second[index, began], first[index, Moment(0, began.step)]))


async def live_under_kills(seed: int, config: TrainingConfig, **attributes: Any) -> Churn:
    world = local_world(2, 8, partial(adamw, 2), config, **attributes)
    await start(world, per_stage=3)
    churn = Churn(world, seed, 3.0)
    tasks = [asyncio.ensure_future(each.run()) for each in (ToyTrainer(world, seed=seed), churn)]
    await world.reach(10, 1000.0)
    for task in tasks:
        task.cancel()
    require_agreement(world, 10)
    return churn


def error_feedback(codec: str) -> ErrorFeedback:
    return ErrorFeedback(codec_of(codec))


@pytest.mark.parametrize(
    ("codec", "has_encoder"),
    [("2bit", True), *(pytest.param(*each, marks=SLOW) for each in (("fp32", False), ("int8", False), ("int8", True)))],
)
def test_replicas_agree_under_kills_with_any_codec(codec: str, has_encoder: bool) -> None:
    encoder: Any = partial(error_feedback, codec) if has_encoder else lambda: None
    config = replace(CONFIG, codec=codec)
    churn = simulate(lambda: live_under_kills(5, config, encoder=encoder), 2000.0)
    assert churn.killed >= 2


class NotedFeedback(ErrorFeedback):
    """Attributes:
    given: the sum of all parts that were counted, as they were before errors were added: [n] float64.
    """

    def __init__(self, codec: Codec, length: int) -> None:
        super().__init__(codec)
        self.given = torch.zeros(length, dtype=torch.float64)
        self._parts: dict[ChunkPlace, Tensor] = {}

    def _corrected(self, place: ChunkPlace, chunk: Tensor) -> Tensor:
        if place.what.startswith("part"):
            self._parts[place] = chunk.double().clone()
        return super()._corrected(place, chunk)

    def commit(self, counted: Collection[ChunkPlace]) -> None:
        for place, part in self._parts.items():
            if place in counted:
                self.given[place.start : place.start + len(part)] += part
        self._parts = {}
        super().commit(counted)

    def kept(self, kind: str) -> Tensor:
        found = torch.zeros_like(self.given)
        for what, errors in self._errors.items():
            if what.startswith(kind):
                found += errors
        return found


async def test_what_the_codec_loses_of_drifts_and_of_their_means_is_kept_for_later_rounds() -> None:
    """Of each element: what all have applied, and what is kept, is together what the replicas have drifted."""
    num_micro_batches, length = 6, sum(each.numel() for each in ToyStage(0, 1).parameters)
    encoders: list[NotedFeedback] = []

    def encoder() -> NotedFeedback:
        encoders.append(NotedFeedback(codec_of("2bit"), length))
        return encoders[-1]

    config = replace(CONFIG, codec="2bit")
    world = local_world(1, num_micro_batches, partial(descent, 1), config, encoder=encoder)
    peers = await start(world)
    await train(world, 6, ToyTrainer(world, at_a_time=2))
    await asyncio.sleep(5.0)  # virtual: both have taken a step that was complete
    known = require_agreement(world, 6)
    last = peers[0].state.moment
    assert {peer.state.moment for peer in peers} == {last} and not last.rollbacks
    first, now = (torch.cat([each.reshape(-1) for each in known[0, at]]).double() for at in (Moment(0, 0), last))
    drifted = sum((each.given for each in encoders), torch.zeros_like(first)) / num_micro_batches
    of_parts = sum((each.kept("part") for each in encoders), torch.zeros_like(first)) / num_micro_batches
    of_means = sum((each.kept("mean") for each in encoders), torch.zeros_like(first))
    torch.testing.assert_close(first - now + of_parts + of_means, drifted, rtol=0, atol=1e-5)
    assert min(float(each.abs().max()) for each in (of_parts, of_means)) > 1e-3
