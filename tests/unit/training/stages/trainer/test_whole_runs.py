"""Three stages of a model, two peers each, and a trainer: every tensor of every step is that of one process."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from math import inf, isfinite

import pytest
import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.net.tls import ClientCredentials
from swarm_training.core.moment import Moment
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.rpc.client import MicroBatch, StagesClient, WireForms
from swarm_training.stages.trainer.trainer import StepReport
from tests.marks import SLOW
from tests.worlds.identities import identity
from tests.worlds.whole_runs import CONFIG, RUN, Data, WholeRun, one_process

LIMIT_S = 300.0


def require_equal(run: WholeRun, reports: list[StepReport], steps: int) -> None:
    truth, losses = one_process(steps, run.config.max_norm)
    names = {
        step: {name for moment, found in run.history.items() if moment.step == step for name, _ in found}
        for step in range(1, steps + 1)
    }
    assert all(found == truth[0].keys() for found in names.values())
    for moment, found in run.history.items():
        for name, tensor in found:
            assert moment.step > steps or torch.equal(tensor, truth[moment.step][name]), (moment, name)
    for report in reports:
        if report.num_micro_batches == 6:
            assert report.loss == pytest.approx(losses[report.moment.step], rel=1e-9)


@pytest.mark.parametrize(("steps", "kills"), [(3, 0), pytest.param(10, 8, marks=SLOW)])
async def test_every_tensor_is_that_of_one_process(steps: int, kills: int) -> None:
    config = replace(CONFIG, max_norm=0.1)
    async with asyncio.timeout(LIMIT_S), WholeRun.running(3, 2, config=config) as run:
        reports: list[StepReport] = []
        await run.until(lambda: all(peer.moment is not None for peer in run.peers))
        training = asyncio.ensure_future(run.train(steps, reports))
        churning = asyncio.ensure_future(run.churn(random.Random(kills), kills))
        await run.until(training.done)
        training.result()
        churning.cancel()
        assert kills == 0 or run._number >= 6 + kills // 2
        require_equal(run, reports, steps)
        announced = [[peer.life.peer.own.samples_per_s for peer in run.of_stage(index)] for index in range(3)]
        assert all(any(speed > 0 for speed in stage) for stage in announced)


@pytest.mark.parametrize(("steps", "kills"), [(4, 2), pytest.param(10, 8, marks=SLOW)])
async def test_replicas_with_local_steps_have_the_same_weights_after_each_round(steps: int, kills: int) -> None:
    """Real stages, threads and lines: what a micro-batch finds on its way follows from chance."""
    config = replace(CONFIG, codec="int8")
    async with asyncio.timeout(LIMIT_S), WholeRun.running(2, 2, config=config, local=2) as run:
        await run.until(lambda: all(peer.moment is not None for peer in run.peers))
        reports: list[StepReport] = []
        training = asyncio.ensure_future(run.train(steps, reports))
        churning = asyncio.ensure_future(run.churn(random.Random(kills), kills))
        drifted = False

        def is_over() -> bool:
            nonlocal drifted
            drifted |= any(bool(peer.life._state.drift().any()) for peer in run.peers)
            return training.done()

        await run.until(is_over)
        training.result()
        churning.cancel()
        assert drifted and {moment.step for moment in run.history} >= set(range(1, steps + 1))
        num_compared = 0
        for moment, found in run.history.items():
            first = dict(reversed(found))
            assert all(torch.equal(tensor, first[name]) for name, tensor in found), moment
            num_compared += len(found) - len(first)  # 0 at a step that only one peer of each stage has lived to take
        assert num_compared
        assert all(isfinite(report.loss) for report in reports if report.loss is not None)


async def test_who_joins_at_a_checkpoint_says_that_it_keeps_it() -> None:
    """Others copy it from there if the older peers die."""
    async with asyncio.timeout(LIMIT_S), WholeRun.running(2, 1) as run:
        await run.until(lambda: all(peer.moment is not None for peer in run.peers))
        training = asyncio.ensure_future(run.train(2, []))
        await run.until(lambda: training.done() and all(peer.life.step == 2 for peer in run.peers))
        late = await run.join(0)
        await run.until(lambda: late.life.peer.own.kept is not None)
        assert late.life.peer.own.kept == run.of_stage(0)[0].life.peer.own.kept


async def test_a_real_run_does_not_go_back_for_a_sentence() -> None:
    async with asyncio.timeout(LIMIT_S), WholeRun.running(2, 1) as run:
        await run.until(lambda: all(peer.moment is not None for peer in run.peers))
        (first,), (last,) = run.of_stage(0), run.of_stage(1)
        await run.until(lambda: last.life.watch.view().moment is not None)
        ids = Data().at(0, 0).ids
        network = GrpcNetwork(ClientCredentials(identity(95)))
        client, which = StagesClient(network, RUN, WireForms("fp64", "fp64")), MicroBatch(1, Moment(0, 0), 0)
        try:
            with pytest.raises(RequestRejected, match="all answers for micro-batch 0 are finite"):
                await client.note_not_finite(last.life.peer.own, which, ids, ids, LIMIT_S)
            assert last.life.peer.own.loss != inf
            with torch.no_grad():
                first.stage.parameters[0].fill_(torch.nan)
            assert await client.note_not_finite(last.life.peer.own, which, ids, ids, LIMIT_S)
            await run.until(lambda: last.life.peer.own.skipped_batches == 1)  # the run goes back at once
        finally:
            await network.close()
