"""The start of a stage from what peers have on their disks, after all peers of the run have ended.

Peers that cannot join yet offer the intact checkpoints on their disks, of whatever stage, in their records. When every
stage is offered, each stage goes on from the newest checkpoint that all stages have (``agreement``), wherever it is.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.callbacks import InThread
from swarm_training.core.moment import Moment
from swarm_training.core.record import MAX_OFFERS, Kept, OfferedCheckpoint, Progress
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.standing import now
from swarm_training.stages.peer.watch import RunWatch
from swarm_training.stages.resume.agreement import StartingPoint, agreed, lacking
from swarm_training.stages.routing.barrier import skipped_batches

SETTLE_S = 5.0  # the time without a new offer before the best one is taken: slow machines may have a newer checkpoint
NEWER_S = 30.0  # this time if some stage already offers a newer checkpoint than those that all stages have
_SAY_AGAIN_S = 60.0
Download = Callable[[Kept, Sequence[Progress]], Awaitable[StateFile | None]]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumedState:
    """The state from which a stage goes on."""

    moment: Moment  # the moment at which the run is presumed to have ended, see ``TrainingPeer.found``
    kept: Kept  # the checkpoint, with its state in ``data``
    data: StateFile
    skipped_batches: int = 0


class Resuming:
    """The start of a peer that has not joined yet: its offers from its disk, and its choice among all offers."""

    def __init__(
        self, index: int, peer: TrainingPeer, watch: RunWatch, download: Download, in_thread: InThread
    ) -> None:
        """Offer nothing yet. ``index``: the own stage. ``download``: returns a checkpoint that one of these peers
        gives; None if none does."""
        self._index, self._num_stages = index, watch.num_stages
        self._peer, self._watch, self._download, self._in_thread = peer, watch, download, in_thread
        self._own: list[OfferedCheckpoint] = []
        self._files: dict[Path, OfferedCheckpoint] = {}
        self._most_rollbacks = 0
        self._seen: list[list[Kept]] = []
        self._seen_since_s = 0.0
        self._said: tuple[str, float] | None = None

    async def look(self) -> None:
        """Find out what is on the disk."""
        self._files = await self._in_thread(partial(self._peer.stored.files, self._num_stages))
        lineages = [offered.kept.lineage for offered in self._files.values()]
        self._most_rollbacks = max((lineage.rollbacks for lineage in lineages), default=0)

    async def offer(self) -> None:
        """Offer what is on the disk, the newest first, each once it has been read and found intact."""
        for path, offered in self._files.items():
            if len(self._own) == MAX_OFFERS:
                break
            if await self._in_thread(partial(self._peer.stored.check, path, offered.kept.state_digest)):
                self._own.append(offered)
                self._peer.show_offers(self._own)

    def note_joined(self, step: int) -> None:
        """Warn if the own stage has newer checkpoints on the disk than the step to which the run has come."""
        own = [offered.kept.step for offered in self._files.values() if offered.stage == self._index]
        if own and max(own) > step:
            _logger.warning(
                "the run is at step %d, and goes on without the newer checkpoint of step %d here", step, max(own)
            )

    def is_awaited(self) -> bool:
        """Return whether a run may go on from some disk, so that none may start from step 0.

        The state of step 0 alone says nothing: another stage of this run may have written it just now.
        """
        on_disk = (offered.kept for offered in self._files.values())
        return any(not kept.is_beginning for kept in (*on_disk, *chain.from_iterable(self._offers())))

    async def find(self, newest: Moment) -> ResumedState | None:
        """Return the state from which the own stage goes on; None if it must wait, or has none. ``newest``: the latest
        moment of any peer that trains."""
        offers = self._offers()
        if offers != self._seen:
            self._seen, self._seen_since_s = offers, now()
        waited_s = now() - self._seen_since_s
        if newest == Moment(0, 0):
            point = self._start(offers, waited_s)
        else:
            point = self._start_beside(newest, offers[self._index], waited_s >= SETTLE_S)
        if point is None:
            return None
        known = [kept for kept in offers[self._index] if point.has(kept)]
        for kept in known:
            data = await self._in_thread(partial(self._peer.stored.read, kept.state_digest))
            data = data or await self._download(kept, self._holders(kept))
            if data is not None:
                return ResumedState(Moment(point.rollbacks, point.step), kept, data, point.skipped_batches)
        return None

    def _start(self, offers: Sequence[Sequence[Kept]], waited_s: float) -> StartingPoint | None:
        """Return where the run goes on if no stage has begun; None: some stage is awaited, or news of others.

        ``waited_s``: the time without a new offer."""
        point = agreed(offers)
        if point is None:
            if self.is_awaited() and waited_s >= SETTLE_S:  # until then, peers still read their disks
                checkpoints = self._peer.stored.directory or "those of the other peers"
                self._say(
                    f"the run goes on from checkpoints when each stage has one: {lacking(offers)}. To start over, "
                    f"remove {checkpoints}"
                )
            return None
        if point.newest_step == point.step:
            return point if waited_s >= SETTLE_S else None
        if waited_s < NEWER_S:
            self._say(
                f"the run goes on from step {point.step}, the newest of which each stage has a checkpoint, unless "
                f"those of step {point.newest_step} come within {NEWER_S:.0f} s"
            )
            return None
        return point

    def _start_beside(self, newest: Moment, own: Sequence[Kept], is_settled: bool) -> StartingPoint | None:
        """Return where the own stage goes on beside others that have begun: at a checkpoint that they all have too. An
        older one than their newest is taken only if ``is_settled``, since a newer one may be on its way.

        ``own``: the checkpoints of the own stage."""
        stages = [(stage, self._watch.records(stage)) for stage in range(self._num_stages)]
        stages = [(stage, peers) for stage, peers in stages if peers]
        shown = [[peer.kept for peer in peers if peer.kept is not None] for _, peers in stages]
        offered = [[each.kept for peer in peers for each in peer.offers if each.stage == at] for at, peers in stages]
        best = _newest_in(own, shown)
        if best is None and is_settled:
            best = _newest_in(own, [kept + others for kept, others in zip(shown, offered, strict=True)])
        if best is None:
            return None
        # The run is founded with one rollback more. Stages that stand at this step have made theirs already.
        rollbacks = newest.rollbacks - (best.step == newest.step)
        skipped = skipped_batches(peers for _, peers in stages)
        rollbacks = max(rollbacks, self._most_rollbacks)
        return StartingPoint(best.step, best.lineage.born, rollbacks, skipped, newest_step=best.step)

    def _offers(self) -> list[list[Kept]]:
        """Return the checkpoints of each stage that peers offer, this one too."""
        found: list[dict[tuple[int, bytes], Kept]] = [{} for _ in range(self._num_stages)]
        for offered in (*self._own, *(each for peer in self._others() for each in peer.offers)):
            if offered.stage < self._num_stages:
                at, kept = found[offered.stage], offered.kept
                known = at.setdefault((kept.step, kept.state_digest), kept)
                if known.lineage.skipped_batches < kept.lineage.skipped_batches:
                    at[kept.step, kept.state_digest] = kept
        return [[stage[key] for key in sorted(stage)] for stage in found]

    def _others(self) -> Sequence[Progress]:
        own_id = self._peer.own.peer_id
        placed = [peer for stage in range(self._num_stages) for peer in self._watch.placed(stage)]
        return [peer for peer in placed if peer.peer_id != own_id]

    def _holders(self, kept: Kept) -> list[Progress]:
        wanted = OfferedCheckpoint(self._index, kept)
        return [peer for peer in self._others() if wanted in peer.offers]

    def _say(self, what: str) -> None:
        if self._said is None or self._said[0] != what or now() - self._said[1] > _SAY_AGAIN_S:
            self._said = what, now()
            _logger.warning("%s", what)


def _newest_in(own: Sequence[Kept], others: Sequence[Sequence[Kept]]) -> Kept | None:
    """Return the newest of the ``own`` checkpoints that belongs together with one of each other stage; None if there is
    none."""
    theirs = [{(kept.step, kept.lineage.born) for kept in stage} for stage in others]
    common = (kept for kept in own if theirs and all((kept.step, kept.lineage.born) in stage for stage in theirs))
    return max(common, key=lambda kept: (kept.step, kept.lineage.born), default=None)
