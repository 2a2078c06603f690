"""A stage peer: it counts micro-batches, averages with its mates once they have all of a batch, and steps with all
stages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from swarm_protocol.codecs.bitmap import contains
from swarm_protocol.errors import PeerMoved
from swarm_protocol.process.routine import end_tasks
from swarm_training.compression.codecs import codec_of
from swarm_training.core.callbacks import InThread
from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING
from swarm_training.meeting.attending import Averaged, WentBack
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.progress import policy
from swarm_training.progress.table import ProgressTable
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.standing import now
from swarm_training.run.state import TrainedState
from swarm_training.stages.peer.counting import Counting, StageDrift
from swarm_training.stages.peer.held_out import StageEvaluation
from swarm_training.stages.peer.replicas import Replicas
from swarm_training.stages.peer.resuming import ResumedState, Resuming
from swarm_training.stages.peer.shared import SharedGradients
from swarm_training.stages.peer.watch import RunWatch
from swarm_training.stages.routing import barrier
from swarm_training.stages.routing.speed import ComputeSpeed

if TYPE_CHECKING:
    from swarm_training.stages.engine.accumulator import Accumulator

T = TypeVar("T")
LOOK_S = 5.0  # the time for which a joining peer looks for mates before it founds the stage
_STRANDED_S = 5.0  # the time for which a stage is stranded before it goes back to a checkpoint
_TICK_S = 0.25  # the longest wait without news: other peers may have become silent, for instance
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnStage:
    """The stage that a peer trains: its number, its trained state, and the sums of its gradients. ``local``: the steps
    that the peer takes between two averages, whose samples are micro-batches; None: there are none. The state drifts
    with them."""

    index: int
    state: TrainedState
    sums: Accumulator
    local: LocalSteps | None = None


class StagePeer:
    """A peer of a stage. Its methods are for one event loop.

    A stage may lose all of its peers, or all that hold the average with which other stages have stepped. The peers that
    are left, or come next, then begin at the newest checkpoint after one more rollback. The other stages go back to
    their checkpoints of that step.

    With local steps, peers of a stage have weights of their own between two averages. They are again the same, bit for
    bit, at each step of the run. A lost peer's local steps are lost with it, as sums of gradients are.

    ``peer`` is the part that this peer has in the run of its stage, and ``num_counted`` the number of micro-batches of
    the last step in its sums.
    """

    def __init__(
        self,
        stage: OwnStage,
        peer: TrainingPeer,
        watch: RunWatch,
        replicas: Replicas,
        codec: str,
        compute: InThread,
        in_thread: InThread,
        shared: SharedGradients | None = None,
    ) -> None:
        """Set up the peer. ``codec``: the codec of the averaging. ``compute``: calls a function in the compute thread;
        no other thread computes with the weights. ``in_thread``: calls a function that takes long in any other thread.
        ``shared``: given if another stage has some of the parameters too; not with local steps."""
        self.index = stage.index
        self.peer = peer
        self.watch = watch
        self.evaluation = StageEvaluation(stage.index, peer, watch)
        self._replicas = replicas
        self._resuming = Resuming(stage.index, peer, watch, replicas.download, in_thread)
        self._shared = shared
        self._first_batch = 0  # the run has diverged before this batch of the data: earlier ones are not seen again
        self._stranded_s: float | None = None  # the time since which the stage is stranded
        self._state = stage.state
        self._news = asyncio.Event()
        local = stage.local
        # A local step has the gradient of its own stage alone, and replaces the weights that an evaluation needs.
        assert local is None or not (shared or stage.state.max_norm or peer.evaluator.policy.every)
        drift = None if local is None else StageDrift(stage.sums, stage.state, local)
        self.counting = Counting(stage.sums, in_thread, self._counts_at_mates, self._news.set, drift, compute)
        self._dtype = codec_of(codec).dtype
        self._compute = compute
        self._in_thread = in_thread
        self._reported: frozenset[int] = frozenset()  # the micro-batches in this peer's record
        self._speed = ComputeSpeed()
        self._has_warned = False
        self._warned_of: Moment | None = None
        self._is_averaging = False
        self._num_computing = 0  # requests
        self.num_counted = 0

    # ------------------------------------------------------------ what the service of micro-batches asks

    @property
    def step(self) -> int:
        """Return the step of the weights."""
        return self._state.step

    @property
    def moment(self) -> Moment:
        """Return the moment of the weights."""
        return self._state.moment

    async def compute(self, function: Callable[[], T], share: float) -> T:
        """Call a function in the compute thread, before the optimizer's step or after it. A local step that is due is
        taken first.

        ``share``: the share of a micro-batch's work. This peer's announced speed follows from the function's
        duration."""

        def timed() -> T:
            self.counting.catch_up()
            began_s = time.perf_counter()
            result = function()
            self._speed.note(share, time.perf_counter() - began_s)
            return result

        self._num_computing += 1
        try:
            result: T = await self._compute(timed)
            return result
        finally:
            self._num_computing -= 1

    def note_not_finite(self, step: int) -> bool:
        """Record a trainer's report that some answer of this step is not finite, whichever peer computes it. Return
        False if there is no checkpoint to go back to. Otherwise the stage decides, as it does if the loss is too high.
        Raise PeerMoved if the peer is at another step."""
        if step != self.step:
            raise PeerMoved(f"this peer is at step {self.step}")
        if not any(peer.kept for peer in self.peer.view().all):
            return False
        self.counting.note_not_finite()
        return True

    def _counts_at_mates(self, m: int) -> bool:
        view = self.peer.view()
        return any(contains(mate.micro_batches, m) for mate in view.at(view.own.moment) if mate is not view.own)

    @property
    def may_leave(self) -> bool:
        """Return whether the run loses nothing with this peer but what trainers can replay: it is not averaging, or a
        mate holds the same average. Its local steps since the last average are lost, as its sums are."""
        own = self.peer.own
        if own.decided:
            mates = self.peer.view().others
            return any(mate.moment == own.moment and mate.decided == own.decided for mate in mates)
        return not self._is_averaging and not own.accepted

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Run until cancelled; the peer must have joined its stage, or founded it.

        Raises:
            AccessDenied: a moderator has banned this peer, or most of its mates exclude it.
            UnreadableState: see ``TrainedState.load``.
        """
        relays = [self._relay(table) for table in (self.peer.table, *self.watch.tables)]
        relaying = asyncio.gather(self._replicas.run(), *relays)
        try:
            while True:
                await self._advance()
                await self._wait()
        finally:
            await end_tasks([relaying])

    async def join(self, look_s: float = LOOK_S) -> None:
        """Take over the state of the stage from a mate. If none is found for ``look_s``, the first joining peer by id
        founds the stage. It begins with what it has if no stage has taken a step, else from a checkpoint. Before, it
        waits up to a minute for a silent mate that has not evidently ended. If peers have checkpoints of an earlier
        life of the run on their disks, it goes on from those, see ``Resuming``.

        Raises:
            ValueError: the others train another model, or a checkpoint is of another model.
            AccessDenied: a moderator has banned this peer.
            UnreadableState: see ``TrainedState.load``.
        """
        self.peer.start()
        await self._resuming.look()
        offering = asyncio.ensure_future(self._resuming.offer())
        try:
            await self._join(look_s)
            self._resuming.note_joined(self.step)
        finally:
            await end_tasks([offering])

    async def _join(self, look_s: float) -> None:
        deadline_s = now() + look_s
        while not self.peer.own.state_digest:
            if self.peer.view().others:
                self.peer.require_same_batch()
                await self.load()
                continue
            await self.peer.look()
            seen = self.peer.view()
            may_found = now() > deadline_s and not seen.others and not seen.silent and self._is_first()
            if not may_found or not await self._found():
                await asyncio.sleep(_TICK_S)

    def _is_first(self) -> bool:
        joining = self.peer.table.heard(now(), {JOINING})
        return all(self.peer.own.peer_id < peer.peer_id for peer in joining)

    async def _found(self) -> bool:
        """Begin the stage's run, or go on from a checkpoint if all its peers are gone; return False if there is none
        yet. Raise ValueError if the checkpoint is of another model."""
        moments = [peer.moment for stage in self.watch.view().stages for peer in stage]
        newest = max(moments, default=Moment(0, 0))
        found = await self._resuming.find(newest)
        if found is None and newest == Moment(0, 0):
            if self._resuming.is_awaited():
                return False
            await self.peer.found(await self._compute(self._state.digest))
            return True
        found = found or await self._replicated(newest)
        if found is None:
            return False
        step = found.kept.step
        _logger.warning("nobody is left of stage %d: it goes on from its checkpoint of step %d", self.index, step)
        try:
            digest = await self._take_over(partial(self._state.load, found.moment, found.data))
        except ValueError:
            raise ValueError(
                f"the checkpoint of step {step} is not of stage {self.index} of this run file: expected the model and "
                "the optimizer that it was written with, or another directory as `checkpoints` under [run]"
            ) from None
        self.peer.skip_batches(max(found.skipped_batches, self.peer.own.skipped_batches))
        earlier = await self._in_thread(partial(self.evaluation.resume, step))
        await self._in_thread(partial(self.peer.rollbacks.kept.adopt, step, digest))
        await self.peer.found(digest, found.moment, found.kept.lineage.born, earlier)
        return True

    async def _replicated(self, newest: Moment) -> ResumedState | None:
        """Return the state that peers of the next stage keep; None if there is none so far."""
        fetched = await self._replicas.fetch()
        if fetched is None:
            if not self._has_warned:
                _logger.warning(
                    "nobody is left of stage %d, and no peer of the next one has a checkpoint of it so far; runs keep "
                    "some if checkpoint_every is above 0",
                    self.index,
                )
            self._has_warned = True
            return None
        kept, data = fetched
        return ResumedState(Moment(newest.rollbacks, kept.step), kept, data)

    async def load(self) -> bool:
        """Take over the state of the stage; return False if no peer gives it. Gradients of an older state are dropped.
        Raise ValueError if the others train another model than this peer, which has not joined yet, and UnreadableState
        as ``TrainedState.load`` does."""
        downloaded = await self.peer.downloads.newest()
        if downloaded is None:
            return False
        moment = downloaded.arrival.moment
        try:
            digest = await self._take_over(partial(self._state.load, moment, downloaded.data))
        except ValueError as error:
            await self.peer.downloads.refuse(downloaded, error)
            return False
        is_right = await self.peer.loaded(downloaded, digest)
        if is_right:
            # At once, before others read this peer's record: newcomers must not outvote the mates that know it.
            mates = [mate for mate in self.peer.view().others if mate.moment.rollbacks == moment.rollbacks]
            self._skip(barrier.skipped_batches([mates]))
            await self._in_thread(partial(self.evaluation.resume, moment.step, self.peer.rollbacks.went_back_to))
            await self._compute(partial(self.peer.checkpoints.keep, digest, self.peer.checkpoints.born(digest)))
            await self.peer.checkpoints.copy_newest()
        return is_right

    async def _relay(self, table: ProgressTable) -> None:
        while True:
            counter = table.counter
            self._news.set()
            await table.changed_since(counter, inf)

    async def _wait(self) -> None:
        """Wait for news, or for ``_TICK_S`` if there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await self._news.wait()
        self._news.clear()

    async def _advance(self) -> None:
        """Take the next step that follows from the records of all peers: what makes this peer's state or sums useless
        comes before what uses them."""
        self.peer.require_admitted()
        if self.peer.is_aside:
            await self._try_to_take_part()
            return
        if self.peer.is_cut_off:
            await self._stand_aside()
            return
        self._note_skipped()
        if (moment := self._elsewhere()) is not None and await self._go_back(moment):
            return
        if await self.peer.is_lost():
            await self.load()
        elif policy.must_discard(self.peer.view()):
            await self._discard()
        elif self._is_stranded():
            await self._restore()
        else:
            self.counting.drop_moot()
            await self._report()
            await self._follow_local_steps()
            await self._follow_evaluations()
            if not self.evaluation.is_awaited and await self.peer.is_due():
                self._is_averaging = True
                try:
                    await self._average()
                finally:
                    self._is_averaging = False

    async def _follow_local_steps(self) -> None:
        """Take a due local step if nothing else is computed. Otherwise the next request begins with the step. Nothing
        here waits for queued requests, since mates and trainers must hear of commits meanwhile."""
        if self.counting.is_behind and not self._num_computing:
            await self._compute(self.counting.catch_up)
        await self.counting.discard_failed()

    async def _follow_evaluations(self) -> None:
        if self.evaluation.follow():
            await self._compute(partial(self.evaluation.spare, self._state.step))
        if self.evaluation.is_unwritten:
            await self._in_thread(self.evaluation.write)

    async def _stand_aside(self) -> None:
        """Let the others go on without this peer, which they know, but cannot average with: some cannot be called."""
        _logger.warning("other peers of stage %d cannot be called: this peer waits until they can", self.index)
        self.peer.stand_aside()
        await self.counting.discard()

    async def _try_to_take_part(self) -> None:
        """Take part again, unless peers that are still heard of cannot be called."""
        if self.peer.calls_all and not (await self.peer.is_lost() and await self.load()):
            self.peer.take_part()  # a peer that has loaded a state takes part already

    def _note_skipped(self) -> None:
        """Take over the number of batches that at least half of a stage have skipped by rollbacks."""
        rollbacks = self.moment.rollbacks
        stages = self.watch.view().stages
        known = ([peer for peer in stage if peer.moment.rollbacks <= rollbacks] for stage in stages)
        self._skip(barrier.skipped_batches(known))

    def _skip(self, skipped: int) -> None:
        if skipped > self.peer.own.skipped_batches:
            self.peer.skip_batches(skipped)

    def _elsewhere(self) -> Moment | None:
        """Return the moment to which another stage has gone back; None if there is none."""
        return barrier.went_back_to(self.watch.view(), self._state.moment)

    async def _report(self) -> None:
        done, losses = self.counting.done, self.counting.loss()
        if done == self._reported and (losses[0] != inf or self.peer.own.loss == inf):
            return  # nothing is new: no micro-batch, and no infinite loss
        await self.peer.measure(len(done - self._reported), self._speed.per_s)
        self._reported = done
        await self.peer.report_micro_batches(done, *losses)

    async def _discard(self) -> None:
        """Discard the sums: the batch is decided without them, or a part of them counts at another peer too."""
        _logger.debug("%d micro-batches are given up, as another peer has some of them", len(self.counting.done))
        await self.counting.discard()
        await self._report()

    async def _average(self) -> None:
        """Average with all of the stage, and step when all stages may."""
        with self.counting.closed():
            vector = await self.counting.vector(self._dtype)
            await self._report()  # once more, as a last local step may have failed
            losses = self.counting.loss()
            decided = await self._decision(vector)
            del vector  # its memory is for the optimizer's gradient
            if isinstance(decided, WentBack):
                await self._accept_rollback(decided)
            elif decided is not None:
                await self._hold(decided)
                if await self._may_step() and (gradient := await self._completed(decided)) is not None:
                    norm = await self._global_squared_norm(gradient)
                    if norm is not None or not self._state.max_norm:
                        await self._step(decided, gradient, norm, *losses)

    async def _decision(self, vector: Tensor) -> Averaged | WentBack | None:
        """Return what the stage decides; None if it decides nothing. None also if another stage goes back meanwhile, or
        this peer is cut off: mates that it would wait for may never come."""
        averaging = asyncio.ensure_future(self.peer.average(vector))
        try:
            while not averaging.done():
                if self._elsewhere() is not None or self.peer.is_cut_off:
                    return None
                waiting = asyncio.ensure_future(self._wait())
                try:
                    await asyncio.wait([averaging, waiting], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()  # the next wait sees its news: it clears them only at its end
            return averaging.result()
        finally:
            await end_tasks([averaging])

    async def _hold(self, averaged: Averaged) -> None:
        """Publish that this peer holds its stage's average. If another stage has a part of it, the norm follows once
        that part is here."""
        if self._shared is not None:
            self.peer.hold(averaged, await self._shared.offer(averaged))
        else:
            self.peer.hold(averaged, squared_norm=await self._squared_norm(averaged.gradient))

    async def _squared_norm(self, gradient: Tensor) -> tuple[float, ...]:
        """Return the squared norm of this stage's gradient, empty if the run does not clip. If two stages share
        parameters, only the first stage counts them."""
        if not self._state.max_norm:
            return ()
        counted_elsewhere = () if self._shared is None or self.index < self._shared.other else self._shared.spans
        norm: tuple[float, ...] = await self._in_thread(partial(self._state.squared_norm, gradient, counted_elsewhere))
        return norm

    async def _global_squared_norm(self, gradient: Tensor) -> float | None:
        """Wait for the squared norm of all stages' gradients. Return None if the run does not clip, goes back, or goes
        on without this peer. ``gradient``: that of this stage, with the part of another one."""
        if not self._state.max_norm:
            return None
        if self._shared is not None:
            self.peer.show_norm(await self._squared_norm(gradient))
        while (norm := barrier.global_squared_norm(self.watch.view(), self._state.moment)) is None:
            if self._elsewhere() is not None or await self.peer.is_lost():
                return None
            await self._wait()
        return norm

    async def _may_step(self) -> bool:
        """Wait for the other stages; return False if the run goes back instead."""
        while not barrier.may_step(self.watch.view(), self._state.moment):
            if self._elsewhere() is not None:
                return False
            await self._wait()
        return True

    async def _completed(self, averaged: Averaged) -> Tensor | None:
        """Return the average with another stage's part; None if the run goes on without this peer, or goes back."""
        if self._shared is None:
            return averaged.gradient
        while (gradient := await self._shared.completed(averaged)) is None:
            if self._elsewhere() is not None or await self.peer.is_lost():
                return None
            await self._wait()
        return gradient

    async def _step(
        self, averaged: Averaged, gradient: Tensor, squared_norm: float | None, loss: float, loss_samples: int
    ) -> None:
        num_counted = len(self.counting.done)
        digest = await self._take_over(partial(self._state.apply, gradient, squared_norm), is_next=True)
        self.num_counted = num_counted
        await self._compute(partial(self.peer.checkpoints.keep, digest))
        await self.peer.stepped(averaged, digest, loss, loss_samples, squared_norm)
        self.peer.withdraw_offers()

    async def _accept_rollback(self, back: WentBack) -> None:
        """Go back as this stage has decided. The batches since that checkpoint are skipped, up to that of this step."""
        group = back.group
        skipped = self.peer.own.skipped_batches + group.step + 1 - group.next_moment.step
        self._first_batch = group.next_moment.step + skipped
        digest = await self._take_over(partial(self._state.go_to, back.group.next_moment, back.state))
        await self._compute(partial(self.peer.checkpoints.keep, digest))
        await self.peer.went_back(back, digest, skipped)

    def _is_stranded(self) -> bool:
        """Return whether the stage has been stranded for ``_STRANDED_S``: news of peers that hold the average may be on
        the way until then."""
        if not barrier.is_stranded(self.watch.view(), self.index, self._state.moment):
            self._stranded_s = None
            return False
        if self._stranded_s is None:
            self._stranded_s = now()
        return now() - self._stranded_s > _STRANDED_S

    async def _restore(self) -> None:
        """Go back to a checkpoint, so that the other stages go back too."""
        self._stranded_s = None
        own = max(self.peer.rollbacks.kept.digests(), default=-1)
        step = max(own, max((peer.replica.step for peer in self._replicas.holders() if peer.replica), default=-1))
        if step < 0:
            _logger.warning("stage %d cannot go on, and there is no checkpoint of it", self.index)
            return
        await self._go_back(Moment(self._state.moment.rollbacks + 1, step))

    async def _go_back(self, moment: Moment) -> bool:
        """Go back to the checkpoint of that step; return False if this peer must load a mate's state, or wait.

        If the run has diverged before, and now goes back further, more batches are skipped: those with which it
        diverged must not come again.
        """
        kept = self.peer.rollbacks.kept
        known = kept.digests().get(moment.step)
        data = None if known is None else await self._in_thread(partial(kept.read, known))
        born = None
        has_mates = any(peer.moment.rollbacks >= moment.rollbacks for peer in self.peer.view().others)
        if data is None and not has_mates:
            found = await self._replicas.fetch(moment.step)
            data, born = (None, None) if found is None else (found[1], found[0].lineage.born)
        if data is None:
            if not has_mates and self._warned_of != moment:
                self._warned_of = moment
                _logger.warning(
                    "the run has gone back to step %d, and nobody is known to have stage %d's checkpoint of it: "
                    "the stage waits until somebody has",
                    moment.step,
                    self.index,
                )
            return False
        digest = await self._take_over(partial(self._state.load, moment, data))
        _logger.warning("the run goes back to step %d, because a stage was lost or has decided it", moment.step)
        skipped = max(self.peer.own.skipped_batches, self._first_batch - moment.step)
        await self.peer.go_back(moment, digest, skipped)
        await self._compute(partial(self.peer.checkpoints.keep, digest, born))
        self.peer.checkpoints.show()
        return True

    async def _take_over(self, change: Callable[[], None], is_next: bool = False) -> bytes:
        """Change the state in the compute thread, and return its digest. The sums of the older state are dropped.
        ``is_next``: see ``Counting.clear``."""

        def changed() -> bytes:
            change()
            self.counting.clear(self._state.step, is_next)
            return self._state.digest()

        async with self.counting.changing:  # no commit may come between the new state and the empty sums
            digest: bytes = await self._compute(changed)
            self.counting.forget()
            self._reported = frozenset()
            self.num_counted = 0
        return digest
