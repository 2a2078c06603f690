"""One peer's book: it keeps the rounds of the peer's own meetings, collects other rounds, and passes them all on."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from swarm_training.core.callbacks import InThread
from swarm_training.core.moment import Moment
from swarm_training.core.network import Network
from swarm_training.core.record import Progress
from swarm_training.ledger.archive import Archive
from swarm_training.ledger.collecting import Collector
from swarm_training.ledger.contributions import RoundContributions, verify_round
from swarm_training.ledger.crediting import Crediting
from swarm_training.ledger.ledger import Ledger
from swarm_training.pb import training_pb2 as pb

MAX_REPLY_BYTES = (1 << 20) - 4096  # of the rounds; 4096 bytes are for the message around them
_logger = logging.getLogger(__name__)


class Book:
    """The keeper of one peer's ledger."""

    def __init__(
        self,
        ledger: Ledger,
        crediting: Crediting,
        archive: Archive | None,
        network: Network,
        peers: Callable[[], Sequence[Progress]],
        newest: Callable[[], Moment | None],
        in_thread: InThread,
        rng: random.Random,
    ) -> None:
        """Keep ``ledger``; see ``Collector`` for most arguments. ``archive``: the file for new rounds, if any."""
        self.ledger = ledger
        self.crediting = crediting
        self._archive = archive
        self._in_thread = in_thread
        self._taking: set[asyncio.Task[None]] = set()
        self.collect = Collector(ledger, network, peers, newest, self._keep, in_thread, rng).run

    def committed(self, data: bytes, moment: Moment, leader: str, weights: Mapping[str, int], given: int) -> None:
        """Take the round of a meeting that has succeeded. ``data``: the round as its leader has signed it.

        ``weights``: the samples with which members joined; ``given``: this peer's samples in the result. The round is
        checked in a task of its own: the step goes on whatever is wrong with the round.
        """
        if not data:
            signers = {leader, *(peer for peer, samples in weights.items() if samples)}
            if given and len(signers) >= self.ledger.limits.min_peers:
                _logger.warning("%s, which led step %d, has credited nobody", leader, moment.step + 1)
            return
        taking = asyncio.ensure_future(self._take_committed(data, moment, leader, weights, given))
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)

    async def _take_committed(
        self, data: bytes, moment: Moment, leader: str, weights: Mapping[str, int], given: int
    ) -> None:
        try:
            round_ = await self._in_thread(lambda: verify_round(data, self.ledger.organiser))
            self.crediting.require_fair(round_, moment, leader, weights, given)
            await self._keep(data, round_)
        except ValueError as error:
            _logger.warning("the ledger lacks step %d, which %s led: %s", moment.step + 1, leader, error)

    async def _keep(self, data: bytes, round_: RoundContributions) -> bool:
        is_new = self.ledger.take(data, round_)
        if is_new and self._archive is not None:
            archive = self._archive
            await self._in_thread(lambda: archive.append(data))
        return is_new

    def answer(self, request: pb.RoundsRequest) -> pb.RoundsReply:
        since = Moment(request.since_rollbacks, request.since_step)
        rounds, has_more = self.ledger.lacking(since, request.known, MAX_REPLY_BYTES)
        return pb.RoundsReply(rounds=rounds, has_more=has_more)

    async def close(self) -> None:
        """Wait until the rounds that came with the last step are kept."""
        await asyncio.gather(*self._taking, return_exceptions=True)
