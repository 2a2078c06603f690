"""The observation of a run in stages from the signed records of its peers: its view, its reports, its loss curve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.failures import first_line, logged_errors
from swarm_protocol.process import network_loop
from swarm_training.checkpoints.checkpoint import read_losses, write_losses
from swarm_training.commands.looking import shown_loss
from swarm_training.contract.backend import Joining
from swarm_training.contract.views import PeerView, RunView, StagePeerView, StageView
from swarm_training.core.callbacks import Say
from swarm_training.core.moment import Moment
from swarm_training.core.record import TRAINING, Progress
from swarm_training.evaluation.known_losses import KnownLosses
from swarm_training.evaluation.policy import EvaluationHistory, shown_losses
from swarm_training.losses.curve import LossCurve
from swarm_training.progress.policy import mean_loss
from swarm_training.reports.observing import RunObserver
from swarm_training.reports.stepping import StepReports
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands.building import require_stages, training_config
from swarm_training.stages.peer.presence import WatchPresence
from swarm_training.stages.peer.stage_peer import StagePeer
from swarm_training.stages.peer.watch import RunWatch
from swarm_training.stages.routing.coverage import members
from swarm_training.stages.routing.run_stages import RunStages

_FOLLOW_S = 0.2
_AFTER_ERROR_S = 60.0  # an error that stays must not fill the log
_FIRST_S = 5.0  # the longest wait of the first look until every stage has a peer
_logger = logging.getLogger(__name__)


@contextmanager
def look(file: RunFile, who: Joining) -> Iterator[Callable[[], RunView]]:
    """Yield a function that returns the current view of the run. The process only watches, and no peer waits for it.
    Raise ValueError if the run is not trained in stages, or NoSwarm if no initial peer answers."""
    size = require_stages(file)
    config, count = training_config(file), file.stages.count
    presence = network_loop.run(WatchPresence.enter(file.run.name, count, who.membership(), config))

    async def until_known() -> None:
        with suppress(PeerUnavailable):
            await presence.watch.until_complete(_FIRST_S)

    async def see() -> RunView:
        return view_of(file.run.name, size, presence.watch.all_records())

    try:
        network_loop.run(until_known())
        yield lambda: network_loop.run(see())
    finally:
        network_loop.run(presence.leave())


def view_of(run: str, num_micro_batches: int, records: Sequence[Sequence[Progress]]) -> RunView:
    """Return the view of a run. ``records``: those of each stage's peers. The least complete stage sets ``samples``."""
    found = RunStages.of(records)
    size = found.num_micro_batches or num_micro_batches
    moments = [max(peer.moment for peer in peers) for peers in found.stages if peers]
    moment = min(moments, default=Moment(0, 0))
    stages = tuple(_stage_view(index, peers, size) for index, peers in enumerate(found.stages))
    done = min((_samples_of(stage, moment, size) for stage in stages), default=0)
    speed = min((stage.micro_batches_per_s for stage in stages), default=0.0)
    everybody = list(chain.from_iterable(records))
    held_out = shown_losses(moment, records[-1])
    return RunView(
        run,
        moment.step,
        mean_loss(records[-1], size),
        done,
        size,
        (size - done) / speed if speed else None,
        sum(record.bytes_sent for record in everybody),
        sum(record.bytes_received for record in everybody),
        tuple(map(_peer_view, chain.from_iterable(stage.peers for stage in stages))),
        rollbacks=moment.rollbacks,
        stages=stages,
        held_out=shown_loss(held_out.newest),
        best_held_out=shown_loss(held_out.best),
        has_ended=found.has_ended,
    )


def _stage_view(index: int, peers: Sequence[Progress], size: int) -> StageView:
    moment = max((peer.moment for peer in peers), default=Moment(0, 0))
    here = [peer for peer in peers if peer.moment == moment]
    # A stranger, or a peer with another run file, may have a bitmap of another length.
    done = frozenset[int]().union(*(members(peer.micro_batches) for peer in here)).intersection(range(size))
    return StageView(
        index,
        moment.step,
        moment.rollbacks,
        len(done),
        any(peer.holds for peer in here),
        sum(peer.samples_per_s for peer in peers),
        tuple(
            StagePeerView(
                peer.peer_id,
                peer.moment.step,
                peer.moment.rollbacks,
                peer.samples,
                peer.holds,
                peer.samples_per_s,
                peer.next_stage,
            )
            for peer in peers
        ),
    )


def _peer_view(peer: StagePeerView) -> PeerView:
    return PeerView(peer.peer_id, "", peer.micro_batches, peer.micro_batches_per_s)


def _samples_of(stage: StageView, moment: Moment, size: int) -> int:
    is_past = stage.holds or (bool(stage.peers) and Moment(stage.rollbacks, stage.step) > moment)
    return size if is_past else stage.micro_batches


class StagesFollower:
    """The follower of one run in stages, which learns the loss of each step from the records of the last stage's peers.

    The records come one after the other. The loss of a step is exact once they cover all its micro-batches.
    """

    def __init__(self, file: RunFile, reports: StepReports | None, say: Say) -> None:
        self._file, self._reports = file, reports
        self._size = file.stages.num_micro_batches(file.run.target_batch_size)
        self._observer = RunObserver(file.optimizer.rate, file.run.checkpoint_every)
        self.moment = Moment(0, 0)  # the moment of the run that was seen last
        self._loss: float | None = None
        self.is_known = False  # whether the loss of its step is known exactly
        self.losses = KnownLosses(say)

    def see(self, records: Sequence[Sequence[Progress]], held_out: EvaluationHistory) -> None:
        """Take the records of each stage's peers, as they are known now, and the losses on held-out data."""
        view = view_of(self._file.run.name, self._size, records)
        self._note_moment(Moment(view.rollbacks, view.step))
        self._note_loss(records[-1])
        self.losses.evaluated(held_out)
        if self._reports is not None:
            seen = self._observer.complete(replace(view, loss=self._loss), time.time())
            self._reports.see(seen, time.monotonic())

    def _note_moment(self, moment: Moment) -> None:
        if moment == self.moment:
            return
        if moment.rollbacks > self.moment.rollbacks:
            self.losses.curve.discard_after(moment.step)
        self.moment, self._loss, self.is_known = moment, None, False

    def _note_loss(self, last_stage: Sequence[Progress]) -> None:
        if self.is_known:
            return
        # A peer that meets others has the loss of the step to come in its record already.
        here = [peer for peer in last_stage if peer.moment == self.moment and peer.state == TRAINING]
        self.is_known = sum(peer.loss_samples for peer in here) >= self._size
        if (loss := mean_loss(here, self._size)) is not None and loss != self._loss:
            self._loss = loss
            self.losses.stepped(self.moment.step, loss)


class CurveFiles:
    """The files of the loss curve, which lie beside the checkpoints of all stages and are renewed with them."""

    def __init__(self, directory: Path | None, file: RunFile, say: Say) -> None:
        """Set up the files. ``directory``: that of the checkpoints; None: there are no files."""
        self._directory, self._run, self._say = directory, file.run.name, say
        self._every = [each for each in (file.run.checkpoint_every, file.evaluation.every) if each]
        self._written = (0, EvaluationHistory())  # the last due step, and the losses on held-out data

    def read(self) -> LossCurve:
        """Return the curve that earlier processes have left; an empty one if there is none."""
        curve = None if self._directory is None else read_losses(self._directory)
        return curve or LossCurve()

    def write_if_due(self, follower: StagesFollower) -> None:
        """Write the curve once the loss of a step with a checkpoint is known, or the run has gone on, and again once a
        loss on held-out data is known."""
        step = follower.moment.step
        due = max(step - step % every for every in self._every)
        if (due, follower.losses.held_out) != self._written and (due < step or follower.is_known):
            self._written = due, follower.losses.held_out
            self.write(follower)

    def write(self, follower: StagesFollower) -> None:
        """Write the curve as it is now, unless it is empty."""
        if self._directory is None or not follower.losses.curve.series:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_losses(follower.losses.curve, self._run, self._directory)
        except OSError as error:
            self._say(f"warning: the loss curve cannot be written to {self._directory}: {first_line(error)}")


async def follow_stage(
    peer: StagePeer, file: RunFile, reports: StepReports | None, files: CurveFiles, say: Say
) -> None:
    """Follow the run as a peer of a stage until cancelled: say what this peer has done in each step, and why the run
    ends. The curve is written at the end too, as the peer may move to another stage and go on with it."""
    follower, moment = StagesFollower(file, reports, say), peer.moment
    follower.losses.begin(await asyncio.to_thread(files.read), peer.step, peer.evaluation.known)
    num_micro_batches = file.stages.num_micro_batches(file.run.target_batch_size)
    reason = ""

    async def look() -> None:
        nonlocal moment, reason
        follower.see(peer.watch.all_records(), peer.evaluation.known)
        if peer.moment != moment:
            if peer.moment.rollbacks > moment.rollbacks:
                say(f"the run has gone back to step {peer.step}")
            else:
                say(f"step {peer.step}: {peer.num_counted} of {num_micro_batches} micro-batches here")
            moment = peer.moment
        if peer.evaluation.reason_of_end != reason:
            reason = peer.evaluation.reason_of_end
            if reason:
                say(f"the run has ended at step {peer.step}: {reason}")
        await asyncio.to_thread(partial(files.write_if_due, follower))

    try:
        await _repeat(look)
    finally:
        files.write(follower)


async def follow_as_trainer(watch: RunWatch, file: RunFile, reports: StepReports, say: Say) -> None:
    """Follow the run from outside of all stages until cancelled."""
    follower = StagesFollower(file, reports, say)

    async def look() -> None:
        records = watch.all_records()
        now = max((record.moment for record in records[-1]), default=Moment(0, 0))
        follower.see(records, shown_losses(now, records[-1]))

    await _repeat(look)


async def _repeat(look: Callable[[], Awaitable[None]]) -> None:
    """Look again and again until cancelled. A look that fails is logged, and does not end the others."""
    pause_s = _FOLLOW_S
    while True:
        await asyncio.sleep(pause_s)
        pause_s = _AFTER_ERROR_S
        with logged_errors(_logger, "what the run does cannot be shown now"):
            await look()
            pause_s = _FOLLOW_S
