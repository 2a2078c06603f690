"""Three real peers at a stage, one of which computes wrongly: it is excluded, and what is trained is as without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from swarm_protocol.codecs.bitmap import from_bits
from swarm_training.stages.engine.stage import Stage, StageGradients, StageOutput
from swarm_training.stages.trainer.trainer import StepReport
from tests.unit.training.stages.trainer.test_whole_runs import require_equal
from tests.worlds.whole_runs import MICRO_BATCHES, RunningPeer, WholeRun

LIMIT_S = 300.0
Lie = Callable[[StageGradients], StageGradients]


def negated(gradients: StageGradients) -> StageGradients:
    inputs = None if gradients.inputs is None else -gradients.inputs
    return replace(gradients, inputs=inputs, parameters=[-each for each in gradients.parameters])


class LyingStage:
    """Attributes:
    lies: whether it does at present.
    """

    def __init__(self, stage: Stage, backward: Lie = lambda found: found, forward: float = 1.0):
        self._stage, self._backward, self._forward = stage, backward, forward
        self.lies: Callable[[], bool] = lambda: True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, inputs: Tensor, labels: Tensor | None = None, keeps: bool = True) -> StageOutput:
        found = self._stage.forward(inputs, labels, keeps)
        return replace(found, hidden=self._forward * found.hidden) if self.lies() and not self.is_last else found

    def backward(self, *arguments: Any, **named: Any) -> StageGradients:
        found = self._stage.backward(*arguments, **named)
        return self._backward(found) if self.lies() else found


@asynccontextmanager
async def trained(
    per_stage: list[int], liar_at: int, *, later: bool = False, founds: bool = False, **lie: Any
) -> AsyncIterator[tuple[WholeRun, RunningPeer, list[StepReport]]]:
    """A run of so many peers per stage, one of them a liar, and its trainer, who audits all answers. ``later``: it lies
    while there are micro-batches in its sums, and not before. ``founds``: it is the founder of its stage, who alone
    decides about the first step."""
    async with asyncio.timeout(LIMIT_S), WholeRun.running(len(per_stage), 0) as run:
        for index, count in enumerate(per_stage):
            for number in range(count):
                if (index, number) != (liar_at, 0 if founds else 1):
                    await run.join(index)
                else:
                    made: list[LyingStage] = []
                    liar = await run.join(
                        index, lambda stage, made=made: made.append(LyingStage(stage, **lie)) or made[0]
                    )
                    if later:
                        made[0].lies = lambda counting=liar.life.counting: bool(counting.done)
                if not number:
                    await run.until(lambda: run.peers[-1].moment is not None)
        await run.until(lambda: all(peer.moment is not None for peer in run.peers))
        reports: list[StepReport] = []
        training = asyncio.ensure_future(run.train(None, reports, audit_share=1.0))
        try:
            yield run, liar, reports
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)


@pytest.mark.parametrize(
    ("stage", "lie"),
    [
        (0, {"backward": negated, "later": True}),
        (0, {"forward": -1.0}),
        (1, {"backward": lambda found: replace(found, loss_sum=0.5 * found.loss_sum)}),
    ],
    ids=["signs", "outputs", "the loss"],
)
async def test_a_liar_is_excluded_and_leaves_no_trace(stage: int, lie: dict[str, Any]) -> None:
    per_stage = [1, 1]
    per_stage[stage] = 3
    async with trained(per_stage, stage, **lie) as (run, liar, reports):
        await run.until(lambda: liar in run.expelled)
        num_steps = len(reports) + 2
        await run.until(lambda: len(reports) >= num_steps)
        assert run.expelled == [liar]
        assert all(peer.life.peer.own.excludes == (liar.life.peer.own.peer_id,) for peer in run.of_stage(stage))
        require_equal(run, reports, num_steps)


async def test_a_liar_that_does_not_leave_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trained([1, 3], 1, founds=True, backward=negated) as (run, liar, reports):
        monkeypatch.setattr(liar.life.peer._standing, "require_admitted", lambda peer_id: None)
        own, mates = liar.life.peer.own, [peer for peer in run.of_stage(1) if peer is not liar]
        await run.until(lambda: all(peer.life.peer.own.excludes == (own.peer_id,) for peer in mates))
        num_steps = len(reports) + 2
        await run.until(lambda: len(reports) >= num_steps)
        assert run.expelled == [] and liar.life.step < num_steps
        late = await run.join(1)
        await run.until(lambda: late.moment is not None)
        await run.until(lambda: late.life.peer.view() and late.life.peer.own.excludes == (own.peer_id,))
        require_equal(run, reports, num_steps)


async def test_of_two_peers_nobody_is_excluded_and_a_third_one_decides(caplog: pytest.LogCaptureFixture) -> None:
    async with trained([1, 2], 1, backward=negated) as (run, liar, reports):
        await run.until(lambda: "no other peer can say which is wrong" in caplog.text)
        assert run.expelled == [] and not reports
        assert not from_bits(liar.life.peer.own.micro_batches, MICRO_BATCHES)
        await run.join(1)
        await run.until(lambda: run.expelled and len(reports) > 2)
        assert run.expelled == [liar]
        require_equal(run, reports, 2)
