"""The checkpoints of a stage at peers of the next stage, so that a stage can lose all of its own peers.

The first peers of each stage, by id, keep the newest checkpoint of the stage before; the first stage keeps those of the
last. A peer's record says which checkpoint it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import InitVar, dataclass

from swarm_protocol.errors import SwarmError
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.callbacks import InThread
from swarm_training.core.network import Network
from swarm_training.core.record import PRESENT, Kept, Progress
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.transfer.receiving import download_replica
from swarm_training.stages.peer.watch import RunWatch

_LOOK_S = 0.5
_KEEPERS = 2  # peers of a stage that keep a replica, since one may die together with the stage before
_MOST_BYTES = 64 << 30  # of another stage's checkpoint, whose size is not known here
_logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Replicas:
    """The replicas of the stage before, kept here, and those of the own stage, kept by peers of the next stage."""

    index: InitVar[int]
    num_stages: InitVar[int]
    _peer: TrainingPeer
    _watch: RunWatch
    _network: Network
    _in_thread: InThread

    def __post_init__(self, index: int, num_stages: int) -> None:
        self._before, self._after = (index - 1) % num_stages, (index + 1) % num_stages
        self._is_alone = num_stages == 1

    async def run(self) -> None:
        """Keep the newest checkpoint of the stage before, if this peer is to keep one, until cancelled."""
        while not self._is_alone:
            if self._is_keeper():
                await self._keep(newest(peer.kept for peer in self._watch.records(self._before)))
            await asyncio.sleep(_LOOK_S)

    async def fetch(self, step: int | None = None) -> tuple[Kept, StateFile] | None:
        """Fetch the own stage's newest checkpoint, or that of a given step, from a peer of the next stage. Return it
        and its state; None if there is none."""
        holders = self.holders()
        known = [peer.replica for peer in holders if peer.replica is not None]
        wanted = newest(each for each in known if step in (None, each.step))
        if wanted is None:
            return None
        data = await self.download(wanted, [peer for peer in holders if peer.replica == wanted])
        return None if data is None else (wanted, data)

    def holders(self) -> list[Progress]:
        """Return the peers that may have checkpoints of the own stage."""
        return [] if self._is_alone else self._watch.records(self._after)

    def _is_keeper(self) -> bool:
        own = self._peer.own
        lower = [peer for peer in self._peer.view().others if peer.peer_id < own.peer_id]
        return own.state in PRESENT and len(lower) < _KEEPERS

    async def _keep(self, wanted: Kept | None) -> None:
        if wanted is None or wanted.state_digest in self._peer.checkpoints.replicas.digests().values():
            return
        sources = [peer for peer in self._watch.records(self._before) if peer.kept == wanted]
        data = await self.download(wanted, sources)
        if data is None:
            return
        self._peer.checkpoints.replicas.discard_after(wanted.step)  # a rollback has undone later checkpoints
        try:
            await self._in_thread(
                lambda: self._peer.checkpoints.replicas.keep(wanted.step, wanted.state_digest, data, wanted.lineage)
            )
        except OSError as error:
            _logger.warning("a checkpoint of stage %d is not kept: %s", self._before, error.strerror)
            return
        self._peer.checkpoints.show_replica()

    async def download(self, wanted: Kept, sources: Iterable[Progress]) -> StateFile | None:
        """Return a checkpoint that one of these peers gives; None if none does."""
        digest = wanted.state_digest
        for source in sources:
            if source.is_reachable:
                try:
                    return await download_replica(self._network, source, digest, _MOST_BYTES, self._in_thread)
                except (SwarmError, TimeoutError, ValueError) as error:
                    _logger.debug("%s does not give a checkpoint: %s", source.peer_id, error)
        return None


def newest(checkpoints: Iterable[Kept | None]) -> Kept | None:
    """Return the checkpoint of the latest step; of several, the one with the largest digest; None if there is none."""
    known = [each for each in checkpoints if each is not None]
    return max(known, key=lambda each: (each.step, each.state_digest), default=None)
