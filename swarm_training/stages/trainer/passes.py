"""The passes of one micro-batch forward and backward through the stages, and its commits where it is lacking."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from swarm_protocol.errors import PeerBusy, PeerMoved, SwarmError
from swarm_protocol.failures import awaited_on_error
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.stages.routing.coverage import Claims
from swarm_training.stages.rpc.answers import StageAnswer
from swarm_training.stages.rpc.client import MicroBatch, StageRequest, StagesClient
from swarm_training.stages.trainer.auditor import Auditor
from swarm_training.stages.trainer.micro_batches import Trace, backwards_needed
from swarm_training.stages.trainer.peer_caller import PeerCaller

_COMMIT_TRIES, _COMMIT_RETRY_S = 3, 0.2  # attempts to commit a gradient, and the pause between them
_COMMIT_S = 5.0  # the time limit of one attempt
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Passes:
    """The passes of micro-batches in one step. ``forward_only``: whether no backward pass follows."""

    moment: Moment
    num_stages: int
    loss_scale: float
    asking: PeerCaller
    client: StagesClient
    claims: Claims
    auditor: Auditor | None = None
    forward_only: bool = False

    async def run(self, number: int, trace: Trace, lacking: frozenset[int]) -> None:
        """Compute what these stages lack; put what becomes known on the way into the trace, also after a failure.

        When it returns, ``claims`` has what was committed, or may have been. Raises as ``PeerCaller.ask``.
        """
        commits: list[asyncio.Task[None]] = []
        # Commits that have begun must be in ``claims`` before any error goes on.
        async with awaited_on_error(lambda: asyncio.gather(*commits, return_exceptions=True)):
            try:
                for stage in backwards_needed(lacking, frozenset(trace.grads), self.num_stages):
                    answer, peer = await self._backward(stage, number, trace, stage in lacking)
                    if answer.tensor is not None:
                        trace.grads[stage - 1] = answer.tensor
                    if stage == self.num_stages - 1:
                        trace.loss.set(answer.loss_sum, answer.num_tokens)
                    if stage in lacking:  # the earlier stages need not wait for the commit
                        commits.append(asyncio.create_task(self._commit(peer, MicroBatch(stage, self.moment, number))))
                await asyncio.gather(*commits)
            except asyncio.CancelledError:
                for commit in commits:
                    commit.cancel()
                raise

    async def compute_backward(self, stages: Iterable[int], number: int, trace: Trace) -> None:
        """Compute these stages, the last of them first, and have nothing counted. The trace has the gradient of the
        last one's output. Raises as ``PeerCaller.ask``."""
        for stage in sorted(stages, reverse=True):
            answer, _ = await self._backward(stage, number, trace, accumulates=False)
            if answer.tensor is not None:
                trace.grads[stage - 1] = answer.tensor

    async def note_not_finite(self, number: int, trace: Trace) -> bool:
        """Report the micro-batch to the last stage, which has the losses. The last stage checks the report, and decides
        about a rollback. Return False if there is no checkpoint to go back to."""
        which = MicroBatch(self.num_stages - 1, self.moment, number)
        return await self.asking.note_not_finite(which, trace.content.ids, trace.content.labels)

    async def inputs(self, stage: int, number: int, trace: Trace) -> Tensor:
        """Return the inputs of a stage, computed from the nearest stage before it with known inputs."""
        if stage == 0:
            return trace.content.ids
        if stage not in trace.inputs:
            before = await self.inputs(stage - 1, number, trace)
            which = MicroBatch(stage - 1, self.moment, number)
            answer, peer = await self._ask(StageRequest(which, before, forward_only=self.forward_only))
            assert answer.tensor is not None  # ``StagesClient.ask`` has checked it
            trace.inputs[stage], trace.kept_by[stage - 1] = answer.tensor, peer.peer_id
        return trace.inputs[stage]

    async def _backward(self, stage: int, number: int, trace: Trace, accumulates: bool) -> tuple[StageAnswer, Progress]:
        inputs = await self.inputs(stage, number, trace)
        asked = StageRequest(
            MicroBatch(stage, self.moment, number),
            inputs,
            labels=trace.content.labels if stage == self.num_stages - 1 else None,
            grad=trace.grads.get(stage),
            loss_scale=self.loss_scale,
            accumulates=accumulates,
            wants_grad=stage > 0 and stage - 1 not in trace.grads,
            is_backward=True,
        )
        return await self._ask(asked, trace.kept_by.pop(stage, None))

    async def _ask(self, asked: StageRequest, kept_by: str | None = None) -> tuple[StageAnswer, Progress]:
        return await (self.auditor or self.asking).ask(asked, kept_by)

    async def _commit(self, peer: Progress, which: MicroBatch) -> None:
        """Commit a gradient and claim it, unless the peer says that it does not count. The claim stays after a lost
        answer, since the commit may have been carried out. A wrong claim costs time until a record shows it."""
        clock = asyncio.get_running_loop().time
        for _ in range(_COMMIT_TRIES):
            self.claims.add(which.stage, which.number, peer.peer_id, clock())
            try:
                if not await self.client.commit(peer, which, _COMMIT_S):
                    self.claims.drop(which.stage, which.number)
                return
            except PeerMoved:
                self.claims.drop(which.stage, which.number)
                return
            except PeerBusy:  # the stage of the peer is averaging, which may come to nothing
                self.claims.drop(which.stage, which.number)
            except SwarmError as error:
                _logger.debug("stage %d: the commit of %d is in doubt: %s", which.stage, which.number, error)
            await asyncio.sleep(_COMMIT_RETRY_S)
