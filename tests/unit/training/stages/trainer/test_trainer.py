"""Trainers and toy stages over real gRPC: sums and losses are those of one process, bit for bit, whatever is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarm_protocol.errors import RequestRejected, TrainingDiverged
from swarm_training.core.moment import Moment
from swarm_training.stages.routing.router import RouterBackoff
from swarm_training.stages.rpc.client import WireForms
from swarm_training.stages.rpc.room import StageLimits
from swarm_training.stages.trainer.micro_batches import Content
from tests.worlds.identities import identity
from tests.worlds.toy_stages import ToyStage, in_one_process, tokens
from tests.worlds.trainer_swarm import CONFIG, LOSS_SCALE, MICRO_BATCHES, LossyService, Member, Swarm, ToyData, training


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


def one_process(step: int, num_stages: int) -> tuple[float, list[Tensor]]:
    stages = [ToyStage(index, num_stages) for index in range(num_stages)]
    return in_one_process(stages, step, MICRO_BATCHES, LOSS_SCALE)


def require_equal(swarm: Swarm, steps: int) -> None:
    for step in range(steps):
        for own, expected in zip(swarm.history[step], one_process(step, len(swarm.stages))[1], strict=True):
            assert torch.equal(own, expected), step


@pytest.mark.parametrize("form", ["fp32", "fp64"])
async def test_steps_are_those_of_one_process_and_nothing_is_computed_twice(form: str) -> None:
    async with Swarm.running(2, 1, 2) as swarm:
        config = replace(CONFIG, forms=WireForms(form, form))
        async with training(swarm, end=3, config=config) as (task, reports):
            await task
        require_equal(swarm, 3)
        for step, report in enumerate(reports):
            assert report.loss == pytest.approx(one_process(step, 3)[0] / (10 * MICRO_BATCHES), rel=1e-12)
            assert (report.num_micro_batches, report.num_tokens) == (MICRO_BATCHES, 10 * MICRO_BATCHES)
            assert (report.num_replays, report.num_retries) == (0, 0)
        computed = [sum(member.host.num_computed for member in stage) for stage in swarm.stages]
        assert computed == [3 * 2 * MICRO_BATCHES, 3 * 2 * MICRO_BATCHES, 3 * MICRO_BATCHES]
        assert all(member.host.num_computed for member in swarm.members())


@pytest.mark.parametrize(("form", "most"), [("bf16", 0.02), ("int8", 0.05)])
async def test_fewer_bytes_cost_little_precision(form: str, most: float) -> None:
    async with Swarm.running(1, 1, 1) as swarm:
        async with training(swarm, end=1, config=replace(CONFIG, forms=WireForms(form, form))) as (task, _):
            await task
        for own, expected in zip(swarm.history[0], one_process(0, 3)[1], strict=True):
            assert 0 < float((own - expected).norm()) <= most * float(expected.norm())


@pytest.mark.parametrize("seed", range(2))
async def test_requests_and_answers_that_are_lost_change_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossyService, "dice", random.Random(seed))
    config = replace(CONFIG, settle_s=0.5, backoff=replace(CONFIG.backoff, first_s=0.01, most_s=0.05))
    async with Swarm.running(2, 2, 2) as swarm, training(swarm, end=3, config=config) as (task, reports):
        await task
        require_equal(swarm, 3)
        assert sum(report.num_retries for report in reports) > 0


@pytest.mark.parametrize("kept_bytes", [1 << 30, 0])
async def test_what_died_with_a_peer_is_replayed_where_it_lacks(kept_bytes: int) -> None:
    async with Swarm.running(1, 2, 1) as swarm:
        victim, other = swarm.stages[1]
        swarm.stages[0][0].holds = True  # stage 0 seems to have all, so that nobody steps, but it is asked
        other.host.adding = lambda number: None
        async with training(swarm, config=replace(CONFIG, kept_bytes=kept_bytes)) as (_, reports):
            everything = lambda: victim.host.sums.done | other.host.sums.done == set(range(MICRO_BATCHES))  # noqa: E731
            await until(lambda: everything() and len(swarm.stages[2][0].host.sums.done) == MICRO_BATCHES)
            lost, before = len(victim.host.sums.done), swarm.stages[2][0].host.num_computed
            assert 0 < lost < MICRO_BATCHES
            await swarm.kill(victim)
            await until(lambda: len(other.host.sums.done) == MICRO_BATCHES)
            again = swarm.stages[2][0].host.num_computed - before
            assert again == (0 if kept_bytes else lost)
            swarm.stages[0][0].holds = False
            await until(lambda: reports)
            require_equal(swarm, 1)
            assert reports[0].num_replays >= lost


async def test_a_stage_without_anybody_is_waited_for() -> None:
    async with Swarm.running(1, 0, 1) as swarm, training(swarm, end=1) as (task, _):
        await asyncio.sleep(0.1)
        assert not task.done() and not any(member.host.num_computed for member in swarm.members())
        await swarm.join(1)
        await task
        require_equal(swarm, 1)


async def test_a_peer_that_stands_still_is_left_as_soon_as_nothing_is_heard_of_it() -> None:
    async with Swarm.running(1, 2) as swarm:
        frozen = swarm.stages[1][0]
        frozen.host.gate = asyncio.Event()
        async with training(swarm, end=1) as (task, _):
            await until(lambda: frozen.service.room.requests.used)
            frozen.is_alive = False
            await task
            require_equal(swarm, 1)
        frozen.host.gate.set()


async def test_peers_without_room_are_passed_over_and_all_comes_to_its_end() -> None:
    limits = StageLimits(max_requests=1)
    async with Swarm.running(1, 2, limits=limits) as swarm:
        for member in swarm.members():
            member.host.max_pending = 1
        async with training(swarm, end=2, config=replace(CONFIG, per_peer=8.0)) as (task, reports):
            await task
            require_equal(swarm, 2)
            assert sum(report.num_retries for report in reports) > 0


async def test_trainers_share_a_step_and_one_takes_over_what_the_other_leaves() -> None:
    both = {identity(number).peer_id: 0 for number in (90, 91)}
    async with (
        Swarm.running(1, 1) as swarm,
        training(swarm, trainers=both, config=replace(CONFIG, steal_s=60.0)) as (_, first),
    ):
        async with training(swarm, number=91, trainers=both, end=2) as (task, second):
            await task
        await until(lambda: len(first) >= 2)
        require_equal(swarm, 2)
        assert [report.num_micro_batches for report in (*first[:2], *second[:2])] == [MICRO_BATCHES // 2] * 4
        assert all(report.num_replays == 0 for report in (*first, *second))
        sums = sum(report.loss or 0.0 for report in (first[0], second[0]))
        assert sums / 2 == pytest.approx(one_process(0, 2)[0] / (10 * MICRO_BATCHES))
    config = replace(CONFIG, steal_s=0.3)
    async with (
        Swarm.running(1, 1) as swarm,
        training(swarm, trainers=both, config=config, end=1) as (task, reports),
    ):
        await task
        require_equal(swarm, 1)
        assert reports[0].num_micro_batches == MICRO_BATCHES


async def test_a_newcomer_takes_part_from_its_step_on() -> None:
    trainers = {identity(90).peer_id: 0, identity(91).peer_id: 1}
    async with Swarm.running(1, 1) as swarm, training(swarm, trainers=trainers) as (_, first):
        async with training(swarm, number=91, trainers=trainers, end=2) as (task, second):
            await task
        await until(lambda: len(first) >= 2)
        assert [report.num_micro_batches for report in first[:2]] == [MICRO_BATCHES, MICRO_BATCHES // 2]
        assert [report.loss for report in second[:1]] == [None]


class Nonsense(ToyData):
    def at(self, step: int, number: int) -> Content:
        ids = tokens(step, number, rows=2, positions=600)
        return Content(ids, ids)


async def test_data_that_no_peer_takes_are_the_users_mistake() -> None:
    limits = StageLimits(max_tokens=1000)
    async with Swarm.running(2, 1, limits=limits) as swarm, training(swarm, data=Nonsense()) as (task, _):
        with pytest.raises(RequestRejected, match="2 × 600 positions: expected at most"):
            await task


@contextmanager
def not_finite(members: list[Member]) -> Iterator[None]:
    """Their weights are not finite as long as this lasts."""
    parameters = [member.host.stage.parameters[0] for member in members]
    finite = [each.detach().clone() for each in parameters]
    for each in parameters:
        each.data.fill_(torch.nan)
    yield
    for each, before in zip(parameters, finite, strict=True):
        each.data.copy_(before)


@pytest.mark.parametrize(("spoiled", "is_everybody"), [(1, False), (2, True)])
async def test_answers_that_are_not_finite_are_a_peers_fault_unless_all_agree(spoiled: int, is_everybody: bool) -> None:
    async with Swarm.running(1, 2) as swarm:
        with not_finite(swarm.stages[1][:spoiled]):
            async with training(swarm, end=1) as (task, _):
                if is_everybody:
                    with pytest.raises(TrainingDiverged, match="is not finite"):
                        await task
                else:
                    await task
                    require_equal(swarm, 1)


async def test_a_trainer_that_is_not_believed_goes_on() -> None:
    """The last stage finds finite answers where the trainer has found none: nothing has been decided."""
    config = replace(CONFIG, settle_s=0.2, backoff=RouterBackoff(first_s=0.01, most_s=0.05))
    async with Swarm.running(1, 2) as swarm:
        last, told = swarm.stages[1], list[Moment]()

        async def is_finite(moment: Moment, *_: object) -> bool:
            told.append(moment)
            return True

        for member in last:
            member.host.has_checkpoint, member.service._is_finite = True, is_finite
        async with training(swarm, config=config, end=1) as (task, _):
            with not_finite(last):
                await until(lambda: told or task.done())
            await task
            require_equal(swarm, 1)
            assert not any(member.host.not_finite for member in last)


async def test_what_is_not_finite_is_told_to_the_last_stage_if_it_can_go_back_and_its_batch_is_skipped() -> None:
    async with Swarm.running(1, 2) as swarm:
        last = swarm.stages[1]
        for member in last:
            member.host.has_checkpoint = True
        seen: list[int] = []

        class Data(ToyData):
            def at(self, step: int, number: int) -> Content:
                seen.append(step)
                return super().at(step, number)

        async with training(swarm, data=Data()) as (task, reports):
            with not_finite(last):
                await until(lambda: all(member.host.not_finite for member in last) or task.done())
            assert {step for member in last for step in member.host.not_finite} == {0} == set(seen)
            for member in swarm.members():  # as after a rollback
                member.skipped_batches = 3
                member.host.clear(Moment(1, 0))
            await until(lambda: len(reports) >= 2 or task.done())
            assert reports[0].moment == Moment(0, 0) and reports[1].moment == Moment(1, 0)
            assert {0, 3} <= set(seen) and not {1, 2} & set(seen)
