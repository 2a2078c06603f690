"""The downloads of one peer: which peers it asks for a state, when it asks again, and which peers it then suspects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING, Progress
from swarm_training.progress import policy
from swarm_training.rollback.restarting import moment_of, newest_shown, offer_of
from swarm_training.run.meetings import Environment
from swarm_training.run.standing import PeerState, now
from swarm_training.run.state import TrainedState
from swarm_training.run.transfer.receiving import (
    Downloaded,
    OfferedState,
    download,
    download_checkpoint,
    download_offered,
)

_logger = logging.getLogger(__name__)


class StateDownloads:
    """The downloads of states by one peer from those that have them."""

    def __init__(
        self,
        config: TrainingConfig,
        standing: PeerState,
        environment: Environment,
        state: TrainedState,
        needs_half: bool,
    ) -> None:
        """Prepare downloads of what fits ``state``. ``needs_half``: see ``newest_shown``."""
        self._config = config
        self._standing = standing
        self._network, self._in_thread, self._rng = environment.network, environment.in_thread, environment.rng
        self._state = state
        self._needs_half = needs_half
        self._why_none = "none that can be called has one"

    async def newest(self) -> Downloaded | None:
        """Download and return the state that most other peers have; None if no peer has a newer one, or gives it.

        A peer that is unavailable is asked a second time, for the state that is its newest by then: a step may have
        overtaken the first one. Raise ValueError if this peer has not joined yet, and a source trains another model.
        """
        for may_ask_again in (True, False):
            sources = list(policy.sources_of_state(self._standing.view()))
            self._rng.shuffle(sources)
            for source in sources:
                try:
                    return await download(self._network, source, self._state, self._in_thread)
                except (SwarmError, TimeoutError, ValueError) as error:
                    # RequestRejected is both a SwarmError and a ValueError: it says nothing about the model.
                    if not isinstance(error, SwarmError | TimeoutError) and not self._standing.own.state_digest:
                        raise
                    _logger.debug("%s does not give its state: %s", source.peer_id, error)
                    self._why_none = f"{source.peer_id}: {str(error) or 'it is too slow'}"
                    if not (may_ask_again and isinstance(error, PeerUnavailable)):
                        self._standing.table.suspect(source.peer_id)
        await asyncio.sleep(self._config.poll_s)  # callers ask again at once
        return None

    def no_state(self) -> PeerUnavailable:
        """Return the error of a peer that cannot join, because no peer gives the state."""
        return PeerUnavailable(f"no peer of the run has given its state: {self._why_none}")

    async def refuse(self, downloaded: Downloaded, error: ValueError) -> None:
        """Suspect the source of a download that is not a valid state."""
        _logger.warning("the state from %s cannot be used: %s", downloaded.source, error)
        self._standing.table.suspect(downloaded.source)

    async def newest_offered(self, own: Moment, refused: Collection[bytes]) -> OfferedState | None:
        """Return the newest state that peers offer; None if none is newer than the one of moment ``own``. States with a
        digest in ``refused``, and those that nobody gives, are left out."""
        without = set(refused)
        while True:
            offers = {
                peer: each.kept
                for peer in self._standing.table.heard(now(), {JOINING})
                for each in peer.offers[:1]
                if each.kept.state_digest not in without
            }
            best = newest_shown(offer_of(own, b""), list(offers.values()), self._needs_half)
            if moment_of(best) == own:
                return None
            for source in [peer for peer, kept in offers.items() if kept == best and peer.is_reachable]:
                try:
                    data, evaluations = await download_offered(
                        self._network, source, self._state, best.state_digest, self._in_thread
                    )
                    return OfferedState(moment_of(best), best.state_digest, evaluations, data)
                except (SwarmError, TimeoutError, ValueError) as error:
                    _logger.warning("%s does not give the checkpoint that it offers: %s", source.peer_id, error)
            without.add(best.state_digest)

    async def checkpoint(self, source: Progress, digest: bytes) -> StateFile:
        """Return the checkpoint of that digest, which the source has. Raise the errors of ``download_checkpoint``."""
        return await download_checkpoint(self._network, source, self._state, digest, self._in_thread)
