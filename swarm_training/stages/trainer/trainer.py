"""The trainer, which takes the micro-batches of each step through the stages, and owns nothing but data."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from swarm_protocol.errors import TrainingDiverged
from swarm_protocol.process.routine import end_tasks
from swarm_training.core.moment import Moment
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.audit.client import AuditClient
from swarm_training.stages.routing.barrier import skipped_batches
from swarm_training.stages.routing.coverage import Claims, lacking
from swarm_training.stages.routing.router import Router
from swarm_training.stages.routing.run_stages import Stages, moment_of
from swarm_training.stages.routing.turns import next_ones, turn_of, window
from swarm_training.stages.rpc.client import StagesClient
from swarm_training.stages.trainer.auditor import Auditor
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.micro_batches import BlockMicroBatches, Loss, Trace, Traces
from swarm_training.stages.trainer.passes import Passes
from swarm_training.stages.trainer.peer_caller import Look, PeerCaller, StepOver

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """The report of what this trainer has done for one step."""

    moment: Moment
    # The mean over the tokens of its micro-batches that went through the last stage; None: there were none.
    loss: float | None
    num_tokens: int
    num_micro_batches: int  # the number of these micro-batches
    num_replays: int  # the passes of a micro-batch after a complete one, because some peer's sums were lost
    num_retries: int  # the number of requests that had to be made again
    seconds: float


class _Step:
    """The known state of the step that the run is at."""

    def __init__(self, moment: Moment, skipped_batches: int, config: TrainerConfig, began_s: float) -> None:
        self.moment = moment
        self.batch = moment.step + skipped_batches  # the number of the batch in the data
        self.claims = Claims(config.settle_s)
        self.traces = Traces(config.kept_bytes)
        self.losses: dict[int, Loss] = {}  # the losses of what this trainer has begun
        self.under_way: dict[int, asyncio.Task[None]] = {}
        self.began_s = self.progress_s = began_s
        self.num_lacking = -1  # not known yet
        self.completed: set[int] = set()
        self.num_replays = 0
        self.not_before_s = began_s  # later if no peer is at this moment any more: a look is due, not another pass

    def pause(self, seconds: float) -> None:
        """Begin no pass for a while."""
        self.not_before_s = asyncio.get_running_loop().time() + seconds

    def complete(self, number: int) -> None:
        self.num_replays += number in self.completed
        self.completed.add(number)

    def note(self, num_lacking: int, now: float) -> None:
        """Record how many gradients are lacking; a change of the number is progress."""
        if num_lacking != self.num_lacking:
            self.num_lacking, self.progress_s = num_lacking, now


@dataclass(frozen=True)
class RunSource:
    """The source from which a trainer knows about its run."""

    run: str  # the name of the run
    look: Look  # returns the living peers of each stage, as they are known now
    # Returns the step from which on each trainer takes part, this one too, by peer id.
    trainers: Callable[[], Mapping[str, int]]


class Trainer:
    """A trainer on one event loop. A micro-batch that a peer lost is replayed at the stage that lacks it alone."""

    def __init__(
        self,
        own_id: str,
        watch: RunSource,
        network: GrpcNetwork,
        data: BlockMicroBatches,
        config: TrainerConfig,
        on_step: Callable[[StepReport], object] = lambda report: None,
        rng: random.Random | None = None,
    ) -> None:
        """Set up the trainer. ``on_step``: called when the run has gone on from a step."""
        self._own_id, self._data, self._config = own_id, data, config
        self._look, self._trainers = watch.look, watch.trainers
        self._on_step = on_step
        self._router = Router((rng or random.Random()).random, config.backoff)
        self._client = StagesClient(network, watch.run, config.forms)
        self._stages: Stages = ()
        self._asking = self._asker(lambda: self._stages)
        self._auditor: Auditor | None = None
        if config.audit_share:
            audits = AuditClient(network, self._client)
            self._auditor = Auditor(config, lambda: self._stages, self._asker, audits)
        self._happened = asyncio.Event()
        self._step: _Step | None = None
        self._retries_before = 0

    def look_soon(self) -> None:
        """Look at the peers soon, because there is news of them."""
        self._happened.set()

    def _asker(self, look: Look) -> PeerCaller:
        return PeerCaller(look, self._router, self._config, self._client)

    async def train(self, end: int | None = None) -> None:
        """Train until the run has taken ``end`` steps; None: until cancelled.

        Raises:
            RequestRejected: the peers refuse the data. AccessDenied: they refuse this trainer.
            TrainingDiverged: what they compute is not finite, and there is no checkpoint to go back to.
        """
        try:
            while end is None or self._step is None or self._step.moment.step < end:
                self._begin_more()
                await self._until_something_happens()
                self._follow_the_run()
        finally:
            await end_tasks([] if self._step is None else list(self._step.under_way.values()))

    def _follow_the_run(self) -> None:
        self._stages = self._look()
        moment, now = moment_of(self._stages), asyncio.get_running_loop().time()
        if moment is None:  # a stage has no peers at present
            return
        if self._step is None or moment != self._step.moment:
            self._end_step(now)
            here = [[peer for peer in stage if peer.moment == moment] for stage in self._stages]
            # A stage that another one has sent back may not know yet how many batches the run has skipped by then.
            self._step = _Step(moment, skipped_batches(here), self._config, now)

    def _begin_more(self) -> None:
        step, stages, now = self._step, self._stages, asyncio.get_running_loop().time()
        if step is None or now < step.not_before_s:
            return
        step.claims.settle(stages, step.moment, now)
        claimed = {stage: step.claims.of(stage) for stage in range(len(stages))}
        found = lacking(stages, step.moment, self._data.count, claimed)
        step.note(sum(map(len, found.values())), now)
        trainers = self._trainers()
        turn = turn_of(self._own_id, trainers, step.moment.step)
        is_stalled = now - step.progress_s > self._config.steal_s
        peers = {peer.peer_id: peer.samples_per_s for stage in stages for peer in stage}
        self._router.keep(peers)
        self._router.hear(peers, max(1, len(trainers)))
        most = window(len(peers), max(1, len(trainers)), self._config.per_peer, self._config.max_under_way)
        for number in next_ones(found, step.under_way, turn, is_stalled)[: max(0, most - len(step.under_way))]:
            task = asyncio.create_task(self._take_through(step, number, found[number], len(stages)))
            step.under_way[number] = task
            task.add_done_callback(lambda _: self._happened.set())

    async def _take_through(self, step: _Step, number: int, stages: frozenset[int], num_stages: int) -> None:
        trace = step.traces.get(number)
        if trace is None:
            trace = Trace(await asyncio.to_thread(partial(self._data.at, step.batch, number)))
        step.losses[number] = trace.loss  # before the pass, which is cancelled if the step ends
        passes = Passes(
            step.moment, num_stages, self._data.loss_scale, self._asking, self._client, step.claims, self._auditor
        )
        try:
            await passes.run(number, trace, stages)
            step.complete(number)
        except StepOver:
            step.pause(self._config.poll_s)
        except TrainingDiverged as error:
            if not await passes.note_not_finite(number, trace):
                raise
            _logger.warning("step %d: %s; the last stage has been informed", step.moment.step, error)
            step.pause(self._config.settle_s)  # the last stage decides first, and its records show the rollback
        finally:
            step.traces.keep(number, trace)

    async def _until_something_happens(self) -> None:
        """Wait until a pass has ended, or it is time to look at the peers. Raises what a pass has raised."""
        try:
            async with asyncio.timeout(self._config.poll_s):
                await self._happened.wait()
        except TimeoutError:
            pass
        self._happened.clear()
        under_way = {} if self._step is None else self._step.under_way
        for number in [number for number, task in under_way.items() if task.done()]:
            under_way.pop(number).result()

    def _end_step(self, now: float) -> None:
        step = self._step
        if step is None:
            return
        for task in step.under_way.values():  # their results are not needed any more
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            task.cancel()
        losses = [loss for loss in step.losses.values() if loss.num_tokens]
        num_tokens = sum(loss.num_tokens for loss in losses)
        report = StepReport(
            step.moment,
            sum(loss.loss_sum for loss in losses) / num_tokens if losses else None,
            num_tokens,
            len(losses),
            step.num_replays,
            self._asking.num_retries - self._retries_before,
            now - step.began_s,
        )
        self._retries_before = self._asking.num_retries
        self._on_step(report)
