"""The requests to the peers of a stage: one peer after another is asked until one answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from swarm_protocol.errors import (
    AccessDenied,
    NotFinite,
    PeerBusy,
    PeerMoved,
    PeerUnavailable,
    RequestRejected,
    SwarmError,
    TrainingDiverged,
)
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.stages.routing.coverage import PeerCoverage
from swarm_training.stages.routing.router import Router
from swarm_training.stages.trainer.config import TrainerConfig

T = TypeVar("T")
Call = Callable[[Progress, float], Awaitable[T]]
_LISTEN_S = 0.5
_ENOUGH = 2  # refusals from which on the request is at fault, and not the peers
_logger = logging.getLogger(__name__)


class ReachablePeer(PeerCoverage, Protocol):
    """A peer of a stage, and where it is; the address is empty if it cannot be called.

    ``samples_per_s``: the micro-batches per second that it says it could compute; 0: not known yet.
    ``skipped_batches``: at step t of its moment, the batch is t plus this."""

    @property
    def address(self) -> str: ...
    @property
    def tls_fingerprint(self) -> bytes: ...
    @property
    def samples_per_s(self) -> float: ...
    @property
    def skipped_batches(self) -> int: ...


Look = Callable[[], Sequence[Sequence[ReachablePeer]]]


class StepOver(Exception):
    """The error that no peer of a stage is at this moment of the run any more."""


class PeerCaller:
    """A caller that sends a trainer's requests to stage peers, and sends them again where it may.

    Attributes:
        num_retries: the number of requests that had to be made again.
    """

    def __init__(self, look: Look, router: Router, config: TrainerConfig, run: str) -> None:
        """Set up requests. ``look``: returns the living peers of each stage, as they are known now. ``run``: the name
        of the run without the number of a stage."""
        self._look = look
        self._router = router
        self._config = config
        self._run = run
        self.num_retries = 0

    async def ask(
        self, stage: int, moment: Moment, kind: str, call: Call[T], kept_by: str | None = None
    ) -> tuple[T, Progress]:
        """Return the answer, and the peer that gave it. ``call``: sends the request, given a peer and how many seconds
        its answer may take. ``kept_by``: the peer that may have a part of it already.

        Raises:
            StepOver: no peer is at this moment any more.
            RequestRejected, AccessDenied: the request is wrong, or this trainer may not ask.
            TrainingDiverged: the answer is not finite, whichever peer computes it.
        """
        refusals: dict[str, SwarmError] = {}
        clock = asyncio.get_running_loop().time
        while True:
            peers = {peer.peer_id: peer for peer in self._look()[stage] if peer.moment == moment and peer.address}
            if not peers:
                raise StepOver
            _require_no_agreement(refusals, peers)
            peer_id = self._router.choose(peers.keys() - refusals.keys() or peers, kind, clock(), kept_by)
            if peer_id is None:
                await asyncio.sleep(min(self._config.poll_s, self._router.wait_s(peers, clock())))
                continue
            try:
                return await self._ask_one(stage, peers[peer_id], peers, kind, call)
            except (RequestRejected, AccessDenied, NotFinite) as error:
                refusals[peer_id] = error
            except SwarmError as error:
                _logger.debug("stage %d: %s gives no answer: %s", stage, peer_id, error)
            self.num_retries += 1

    async def tell(self, stage: int, moment: Moment, call: Call[bool]) -> bool:
        """Ask all peers of a stage at once. Return False if one of them says no, and none yes.

        If no peer answers, nothing is known yet: then return True, and the caller may ask again.
        """
        peers = [peer for peer in self._look()[stage] if peer.moment == moment and peer.address]
        calls = (call(self._callee(peer), self._config.first_deadline_s) for peer in peers)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, SwarmError):
                raise answer
        return True in answers or False not in answers

    def _callee(self, peer: ReachablePeer) -> Progress:
        return Progress(self._run, peer.peer_id, address=peer.address, tls_fingerprint=peer.tls_fingerprint)

    async def _ask_one(
        self, stage: int, peer: ReachablePeer, candidates: Collection[str], kind: str, call: Call[T]
    ) -> tuple[T, Progress]:
        router, clock, peer_id = self._router, asyncio.get_running_loop().time, peer.peer_id
        asked_s = clock()
        deadline_s = self._deadline_s(peer_id, candidates, kind, asked_s)
        router.asked(peer_id, candidates, kind, asked_s)
        callee = self._callee(peer)
        note = partial(router.withdrawn, peer_id, kind)  # after a cancellation, nothing is known of the peer
        try:
            answer = await self._unless_silent(stage, peer_id, call(callee, deadline_s))
            note = partial(router.answered, peer_id, kind, asked_s)
        except (PeerBusy, PeerMoved):  # the next look says where a moved peer is
            note = partial(router.busy, peer_id, kind)
            raise
        except SwarmError:
            note = partial(router.failed, peer_id, kind)
            raise
        finally:
            note(clock())
        return answer, callee

    async def _unless_silent(self, stage: int, peer_id: str, answering: Awaitable[T]) -> T:
        """Return the answer. Raises PeerUnavailable if meanwhile nothing is heard of the peer any more."""
        task = asyncio.ensure_future(answering)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LISTEN_S)
                if not task.done() and all(peer.peer_id != peer_id for peer in self._look()[stage]):
                    raise PeerUnavailable("nothing is heard of the peer any more", peer_id)
            return task.result()
        finally:
            task.cancel()

    def _deadline_s(self, peer_id: str, candidates: Collection[str], kind: str, now: float) -> float:
        if not self._router.is_known(candidates, kind):
            return self._config.first_deadline_s
        expected_s = self._router.ready_s(peer_id, candidates, kind, now) - now
        return max(self._config.least_deadline_s, self._config.slack * expected_s)


def _require_no_agreement(refusals: Mapping[str, SwarmError], peers: Collection[str]) -> None:
    """Raise a refusal of the request if enough peers have refused it, or all that there are."""
    if not refusals or (len(refusals) < _ENOUGH and not refusals.keys() >= set(peers)):
        return
    error = next(iter(refusals.values()))
    if isinstance(error, NotFinite):
        raise TrainingDiverged(f"whoever computes it: {error}; use a lower learning rate")
    raise error
