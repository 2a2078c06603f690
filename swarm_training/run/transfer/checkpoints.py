"""The checkpoints that a peer keeps, of its own run and of another one. Its record names them, others copy them."""

from __future__ import annotations

import logging
from functools import partial

from swarm_protocol.errors import SwarmError
from swarm_training.core.callbacks import InThread
from swarm_training.core.config import NUM_REPLICAS, TrainingConfig
from swarm_training.core.record import Lineage
from swarm_training.progress.gossip import Gossip
from swarm_training.rollback.kept import KeptCheckpoints
from swarm_training.rollback.stored import copies_directory, stage_directory
from swarm_training.run.standing import PeerState
from swarm_training.run.state import TrainedState, digest_of
from swarm_training.run.transfer.downloads import StateDownloads

_logger = logging.getLogger(__name__)


class PeerCheckpoints:
    """The checkpoints that one peer keeps. ``kept``: those of its own run; ``replicas``: copies for another run."""

    def __init__(
        self,
        config: TrainingConfig,
        standing: PeerState,
        gossip: Gossip,
        state: TrainedState,
        downloads: StateDownloads,
        in_thread: InThread,
    ) -> None:
        self.kept, self.replicas = _stores(config, standing.own.run)
        self._evaluation = config.evaluation
        self._standing, self._gossip, self._state = standing, gossip, state
        self._downloads, self._in_thread = downloads, in_thread

    def keep(self, state_digest: bytes, born: int | None = None) -> None:
        """Keep the present state as a checkpoint if one is due and the state is finite. Any thread may call this.

        ``born``: see ``Lineage``; None: the state is new, or kept already."""
        kept, own, moment = self.kept, self._standing.own, self._state.moment
        is_evaluated = own.counts_exactly and kept.is_on and self._evaluation.is_due(moment.step)
        if is_evaluated:  # the checkpoint stays at least until its loss on held-out data is known
            kept.spare({*kept.spared, moment.step})
        if (is_evaluated or kept.is_due(moment.step)) and self._state.is_finite():
            lineage = Lineage(moment.rollbacks if born is None else born, moment.rollbacks, own.skipped_batches)
            try:
                is_extra = not kept.is_due(moment.step)
                kept.keep_written(moment.step, state_digest, self._state.write, lineage, is_extra=is_extra)
            except OSError as error:
                _logger.warning("the state of step %d is not kept: %s", moment.step, error.strerror)

    def born(self, state_digest: bytes) -> int | None:
        """Return ``Lineage.born`` of the state with this digest, if another peer keeps it; None if none does."""
        known = (peer.kept for peer in self._standing.view().others if peer.kept is not None)
        return next((kept.lineage.born for kept in known if kept.state_digest == state_digest), None)

    async def copy_newest(self) -> None:
        """Copy the newest checkpoint of the other peers, so that later joiners can go back even if those peers die."""
        own, kept = self._standing.own, self.kept
        others = [
            peer for peer in self._standing.view().others if peer.kept is not None and peer.rollbacks == own.rollbacks
        ]
        wanted = max((peer.kept.step for peer in others if peer.kept and peer.kept.step <= own.step), default=-1)
        if wanted <= max(kept.digests(), default=-1):
            self.show()
            return
        for source in others:
            if source.is_reachable and source.kept is not None and source.kept.step == wanted:
                digest = source.kept.state_digest
                try:
                    data = await self._downloads.checkpoint(source, digest)
                    await self._in_thread(partial(kept.keep, wanted, digest, data, source.kept.lineage))
                except (SwarmError, TimeoutError, ValueError, OSError) as error:
                    _logger.debug("%s does not give its checkpoint: %s", source.peer_id, error)
                    continue
                self.show()
                return

    def show(self) -> None:
        """Publish the newest checkpoint that this peer keeps, so that other peers can copy it."""
        newest = self.kept.newest()
        if self._standing.own.counts_exactly and newest != self._standing.own.kept:
            self._standing.update(kept=newest)
            self._gossip.tell()

    def show_best(self, step: int | None) -> None:
        """Publish the checkpoint of the step with the lowest loss on held-out data, if this peer keeps it."""
        best = None if step is None else self.kept.of(step)
        if best != self._standing.own.best:
            self._standing.update(best=best)
            self._gossip.tell()

    def show_replica(self) -> None:
        """Publish the newest checkpoint in ``replicas``."""
        self._standing.update(replica=self.replicas.newest())
        self._gossip.tell()

    def mark(self) -> None:
        """Note in the checkpoint of this moment, if there is one, how the run came here. Publish the newest one."""
        own = self._standing.own
        if own.counts_exactly:
            self.kept.mark(own.step, own.rollbacks, own.skipped_batches)
            self._standing.update(kept=self.kept.newest())


def _stores(config: TrainingConfig, run: str) -> tuple[KeptCheckpoints, KeptCheckpoints]:
    """Return the stores for checkpoints of this run, and for those of another run."""
    every, most, directory = config.checkpoint_every, config.checkpoints_kept, config.lasting_directory
    if directory is None:
        temporary = config.checkpoint_directory
        return KeptCheckpoints(every, most, temporary), KeptCheckpoints(every, NUM_REPLICAS, temporary)
    stage = int(run.rpartition("/")[2])  # see ``stage_run``
    own, copies = stage_directory(directory, stage), copies_directory(directory, stage)
    return (
        KeptCheckpoints(every, most, own, stays=True, digest_of=digest_of),
        KeptCheckpoints(every, NUM_REPLICAS, copies, stays=True, digest_of=digest_of),
    )
