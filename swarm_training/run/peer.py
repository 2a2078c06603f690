"""One peer of a run: joins, reports, catches up and leaves; its meetings are in ``meetings``."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial
from math import inf, isfinite
from typing import Any, TypeVar

from torch import Tensor

from swarm_protocol.errors import PeerUnavailable, RequestRejected, SwarmError
from swarm_protocol.net.identity import Identity
from swarm_protocol.wire.printable import printable
from swarm_training.averaging.group import Group
from swarm_training.core.bitmap import MAX_MICRO_BATCHES, to_bits
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.network import Network
from swarm_training.core.record import JOINING, LEFT, TRAINING, Kept, Progress
from swarm_training.core.signing import read_signed
from swarm_training.ledger.archive import Archive
from swarm_training.ledger.book import Book
from swarm_training.ledger.crediting import Crediting, Member
from swarm_training.ledger.ledger import Ledger, LedgerLimits
from swarm_training.ledger.orders import Orders
from swarm_training.meeting.attending import Averaged, WentBack
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress import policy
from swarm_training.progress.board import Board
from swarm_training.progress.cut_off import must_stand_aside
from swarm_training.progress.gossip import Gossip
from swarm_training.progress.policy import View
from swarm_training.progress.table import ProgressTable
from swarm_training.rollback.divergence import LossHistory
from swarm_training.rollback.kept import KeptCheckpoints
from swarm_training.rollback.rollbacks import Rollbacks
from swarm_training.run.meetings import NO_LOSS, Compression, Meetings
from swarm_training.run.moderation import Moderation
from swarm_training.run.standing import Standing, now, smoothed
from swarm_training.run.state import TrainedState
from swarm_training.run.transfer import Arrival, Downloaded, Offer, StateServer, compare, download, download_checkpoint

T = TypeVar("T")
InThread = Callable[[Callable[[], T]], Awaitable[T]]
_RETRY_S = 0.1
_GATHER_S = 0.1  # news that can wait are told together
_REPLICAS = 2
_FOUND_SOON_S = 10.0
_MOST_OTHERS = 64  # records of others in a request
_CUT_OFF_SILENCES = 2.0  # times the silence that is suffered: so long, calls must fail
_logger = logging.getLogger(__name__)


class TrainingPeer:
    """All on one event loop. Answers what others ask, see ``Handlers``.

    Attributes:
        replicas: checkpoints of another run that this peer keeps for it.
    offer: what else others may ask for.
    """

    def __init__(
        self,
        config: TrainingConfig,
        identity: Identity,
        own: Progress,
        network: Network,
        board: Board,
        state: TrainedState,
        compression: Compression,
        in_thread: InThread[Any],
        rng: random.Random,
        orders: Orders | None = None,
        ledger: Ledger | None = None,
        archive: Archive | None = None,
        token: bytes = b"",
    ) -> None:
        """``orders``: of a run that has moderators. ``ledger``: what is known of the run so far; ``archive``: where
        it is kept. ``token``: of a private run."""
        if config.counting == "exact":
            if not 1 <= own.target_batch_size <= MAX_MICRO_BATCHES:
                raise ValueError(
                    f"a batch has {own.target_batch_size} micro-batches: expected 1 to {MAX_MICRO_BATCHES}"
                )
            own = dataclasses.replace(own, micro_batches=to_bits((), own.target_batch_size))
        table = ProgressTable(own.run, own.model, own.peer_id, config.silence_s, config.presume_gone_s)
        self._moderation = Moderation(orders)
        self._standing = Standing(own, identity, table, self._moderation)
        self._config = config
        self._network = network
        self._board = board
        self._state = state
        self._rng = rng
        self._in_thread = in_thread
        self.rollbacks = Rollbacks(config, self._moderation, self._checkpoint_of, in_thread, rng)
        self.replicas = KeptCheckpoints(config.checkpoint_every, _REPLICAS, config.checkpoint_directory)
        self.offer = Offer()
        self._state_server = StateServer(state, (self.rollbacks.kept, self.replicas, self.offer), in_thread)
        self.gossip = Gossip(config, table, network, board, self._standing.renew, self._moderation, rng)
        self.ledger = ledger or Ledger(own.run, LedgerLimits.of(own.target_batch_size))
        crediting = Crediting(self.ledger, Member(identity, token), lambda: self._standing.own.moment)
        self._book = Book(
            self.ledger, crediting, archive, network, lambda: self.view().others, self._newest, in_thread, rng
        )
        self._meetings = Meetings(
            config, self._standing, network, self.gossip, compression, self.rollbacks, self._book, rng, in_thread
        )
        self.average = self._meetings.average
        self.meet, self.reduce, self.fetch = self._meetings.meet, self._meetings.reduce, self._meetings.fetch
        self._measured_s: float | None = None
        self._averaging: asyncio.Task[Averaged | WentBack | None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def own(self) -> Progress:
        return self._standing.own

    @property
    def table(self) -> ProgressTable:
        return self._standing.table

    def view(self) -> View:
        return self._standing.view()

    # ------------------------------------------------------------ life

    def listens_at(self, address: str, tls_fingerprint: bytes) -> None:
        self._standing.update(address=address, tls_fingerprint=tls_fingerprint)

    def start(self) -> None:
        self._tasks += [asyncio.ensure_future(self.gossip.run()), asyncio.ensure_future(self._book.collect())]

    async def found(self, state_digest: bytes, resumed_at: Moment | None = None) -> None:
        """Begins the run, as its only peer so far, or goes on from a checkpoint of that moment.

        What was after it is undone, as by a rollback: so no moment comes twice, in the ledger above all.
        """
        earlier = [each for each in (resumed_at, self.ledger.newest) if each is not None]
        rollbacks = 1 + max(each.rollbacks for each in earlier) if earlier else 0
        moment = Moment(rollbacks, resumed_at.step if resumed_at is not None else 0)
        self._state.moment, self.rollbacks.went_back_to = moment, moment.step
        await self._in_thread(lambda: self.keep(state_digest))
        roster = (self.own.peer_id,)
        await self._arrive(Arrival(moment, roster, b"", went_back_to=moment.step), state_digest)

    async def find_others(self) -> None:
        """Raises:
        PeerUnavailable: nobody trains this run.
        ValueError: who does has another model, or another target.
        AccessDenied: a moderator has banned this peer.
        """
        deadline_s = now() + self._config.join_timeout_s
        warning = asyncio.get_running_loop().call_later(_FOUND_SOON_S, self._say_nobody_is_found)
        try:
            await self._find_some(deadline_s)
        finally:
            warning.cancel()
        self.require_same_batch()

    def require_same_batch(self) -> None:
        """Raises ValueError if somebody else trains with other batches."""
        for peer in self.table.known():
            if peer.target_batch_size != self.own.target_batch_size:
                theirs, own = peer.target_batch_size, self.own.target_batch_size
                raise ValueError(f"target_batch_size is {own} here and {theirs} in the run: expected the same")

    def _say_nobody_is_found(self) -> None:
        _logger.warning(
            "the initial peers know nobody who trains run %r so far: is that its name?", printable(self.own.run, 60)
        )

    async def _find_some(self, deadline_s: float) -> None:
        while not self.table.known():
            await self.look()
            if now() > deadline_s:
                raise PeerUnavailable(f"nobody trains run {self.own.run!r} among the initial peers")
            await asyncio.sleep(_RETRY_S)

    async def look(self) -> None:
        """Once, for others who train this run. Raises as ``find_others``, but for being alone."""
        if self._moderation.digest():
            self._moderation.take(await self._board.read_orders())
        self._standing.require_admitted(self.own.peer_id)
        for record in await self._board.read():
            with suppress(ValueError):
                self.table.add(record, now())
                continue
            await self._compare(record)

    async def _compare(self, record: pb.SignedProgress) -> None:
        """Raises ValueError that says what differs, if the record is that of somebody who trains another model."""
        try:
            peer = read_signed(record)
        except ValueError:
            return
        if peer.run == self.own.run and peer.is_reachable:
            with suppress(SwarmError, TimeoutError):
                await compare(self._network, peer, self._state)

    async def leave(self) -> None:
        """Says goodbye: others do not wait for this peer, and its samples are withdrawn."""
        self._standing.update(state=LEFT, **self._nothing())
        record = self._standing.renew()
        if self._averaging is not None:
            self._averaging.cancel()
        self.rollbacks.close()
        self.replicas.close()
        for task in self._tasks:
            task.cancel()
        calls = [self._network.exchange(peer, pb.ExchangeRequest(own=record)) for peer in self.view().others]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.silence_s):
                await asyncio.gather(self._board.publish(record), self._book.close(), *calls, return_exceptions=True)

    # ------------------------------------------------------------ what the run asks

    def require_admitted(self) -> None:
        """Raises AccessDenied if a moderator has banned this peer, or most others exclude it."""
        self._standing.require_admitted(self.own.peer_id)

    def banned(self) -> frozenset[str]:
        """Ids of those that a moderator has banned, or that compute wrongly."""
        return self._standing.banned()

    def exclude(self, peer_id: str) -> None:
        """It computes wrongly, as has been found here: this peer takes nothing from it, and says so in its record."""
        _logger.warning("%s has computed wrongly, and is excluded", peer_id)
        self._standing.exclude(peer_id)
        self.gossip.tell(urgent=True)

    def shows_move(self, *, may_move: bool, next_stage: int | None = None) -> None:
        """What the record says of moving to another stage."""
        self._standing.update(may_move=may_move, next_stage=next_stage)
        self.gossip.tell(urgent=True)

    async def measure(self, computed: int, could_per_s: float | None = None) -> None:
        """So many samples have been computed since the last call, or the last global step.

        ``could_per_s``: how many this peer could compute, if it is not always given some; 0: it does not know yet."""
        measured_s = now()
        if self._measured_s is not None and computed:
            call_s = max(measured_s - self._measured_s, 1e-3)
            self._standing.update(call_s=smoothed(self.own.call_s, call_s))
            if could_per_s is None:
                self._standing.update(samples_per_s=smoothed(self.own.samples_per_s, computed / call_s))
        if could_per_s is not None:
            self._standing.update(samples_per_s=could_per_s)
        self._measured_s = measured_s

    async def report(self, samples: int, loss: float, loss_samples: int) -> None:
        """So many samples have been accumulated since the last global step.

        ``loss``: the mean over so many; infinity if one of them was not finite.

        Raises:
            AccessDenied: a moderator has banned this peer.
        """
        self._standing.require_admitted(self.own.peer_id)
        self._meetings.loss = loss, loss_samples
        self._standing.update(samples=samples)
        if loss == inf:
            self._standing.update(loss=loss, loss_samples=loss_samples)
        self.gossip.tell(urgent=self._meetings.is_due(self.view()))

    async def report_micro_batches(self, done: Collection[int], loss: float, loss_samples: int) -> None:
        """These of the batch are in this peer's sums. For the rest, as ``report``."""
        size = self.own.target_batch_size
        self._standing.update(micro_batches=to_bits(done, size))
        await self.report(len(done), loss, loss_samples)

    def hold(self, averaged: Averaged, shared: bytes = b"") -> None:
        """The average has been decided, and is applied only when others, of whom this peer does not decide, are as far:
        ``stepped`` says so. Until then the peer stays at its moment, and tells its mates and all who watch.

        ``shared``: digest of an offer, what others need of the average."""
        offered = Kept(averaged.group.step, shared) if shared else None
        self._standing.update(decided=averaged.digest, shared=offered)
        self.gossip.tell(urgent=True)

    async def go_back(self, moment: Moment, state_digest: bytes) -> None:
        """The run has gone back to a moment, as it has been decided elsewhere, and this peer has taken over its
        checkpoint of that step.

        Those who took part in the last step decide about the next one: nobody else is known to be there.
        """
        self._meetings.took_over_state()
        self.rollbacks.took_over(LossHistory(), moment.step)
        self.rollbacks.kept.discard_after(moment.step)
        self._standing.update(loss=0.0, loss_samples=0, bytes_sent=0, bytes_received=0)
        await self._arrive(Arrival(moment, self._standing.roster, b"", went_back_to=moment.step), state_digest)

    @property
    def is_cut_off(self) -> bool:
        """Whether this peer is to stand aside, as it cannot call others that take part: see ``must_stand_aside``."""
        return must_stand_aside(self.view(), self.gossip.failing_s(), _CUT_OFF_SILENCES * self._config.silence_s)

    @property
    def is_aside(self) -> bool:
        return self.own.state == JOINING and bool(self.own.state_digest)

    @property
    def calls_all(self) -> bool:
        """Whether all others that take part answer."""
        return self.gossip.failing_s().keys().isdisjoint(peer.peer_id for peer in self.view().others)

    def stand_aside(self) -> None:
        """Takes no part until ``take_part``, or until it has loaded the state; others do not wait for this peer."""
        self._standing.update(state=JOINING, **self._nothing())
        self.gossip.tell(urgent=True)

    def take_part(self) -> None:
        self._standing.update(state=TRAINING)
        self.gossip.tell(urgent=True)

    def skip_batches(self, skipped: int) -> None:
        """So many batches of the data have been passed over since the run began."""
        self._standing.update(skipped_batches=skipped)

    def show_replica(self) -> None:
        """``replicas`` have another one."""
        self._standing.update(replica=_newest_of(self.replicas))
        self.gossip.tell()

    async def is_due(self) -> bool:
        """Whether there is something to do before the next batch: averaging, or loading the state."""
        return self._meetings.is_due(self.view()) or self._standing.is_lost

    async def is_lost(self) -> bool:
        """Whether the others have gone on without this peer, or have another state."""
        return self._standing.is_lost

    async def start_averaging(self, gradient: Tensor) -> None:
        """Starts ``average`` and returns; nothing may be reported until ``averaged``."""
        self._averaging = asyncio.create_task(self._average_while_due(gradient))

    async def _average_while_due(self, gradient: Tensor) -> Averaged | WentBack | None:
        """A meeting may come to nothing, when its leader has fallen behind for instance."""
        while (averaged := await self.average(gradient)) is None and not self._standing.is_lost:
            if not self._meetings.is_due(self.view()):
                return None
        return averaged

    async def has_averaged(self) -> bool:
        return self._averaging is not None and self._averaging.done()

    async def averaged(self) -> Averaged | WentBack | None:
        """What ``average`` returns, when it does."""
        assert self._averaging is not None
        await asyncio.wait([self._averaging])  # which goes on if the caller is interrupted
        return self._averaging.result()

    async def stepped(self, averaged: Averaged, state_digest: bytes, loss: float, loss_samples: int) -> None:
        """The average has been applied; ``loss``: the mean over so many of this peer's samples in it."""
        sent, received = self._meetings.stepped(averaged)
        loss, loss_samples = (loss, loss_samples) if isfinite(loss) else NO_LOSS
        self._standing.update(loss=loss, loss_samples=loss_samples, bytes_sent=sent, bytes_received=received)
        group = averaged.group
        self.rollbacks.averaged(group.moment, [member.record for member in group.members])
        await self._arrive(self._arrival(group, averaged.digest), state_digest)

    async def went_back(self, back: WentBack, state_digest: bytes, skipped_batches: int = 0) -> None:
        """The state of the checkpoint has been taken over. ``skipped_batches``: see ``skip_batches``."""
        self.skip_batches(skipped_batches)
        self._meetings.took_over_state()
        self.rollbacks.went_back(back.group)
        self._standing.update(loss=0.0, loss_samples=0, bytes_sent=0, bytes_received=0)
        await self._arrive(self._arrival(back.group, back.digest), state_digest)

    def keep(self, state_digest: bytes) -> None:
        """The state as it is now, if it is one that the run may go back to. May be called from another thread."""
        kept = self.rollbacks.kept
        if kept.is_due(self._state.step) and self._state.is_finite():
            try:
                kept.keep_written(self._state.step, state_digest, self._state.write)
            except OSError as error:
                _logger.warning("the state of step %d is not kept: %s", self._state.step, error.strerror)

    async def copy_checkpoint(self) -> None:
        """Keeps the newest checkpoint of the others too: who has joined since could not go back if they died."""
        own, kept = self.own, self.rollbacks.kept
        others = [peer for peer in self.view().others if peer.kept is not None and peer.rollbacks == own.rollbacks]
        wanted = max((peer.kept.step for peer in others if peer.kept and peer.kept.step <= own.step), default=-1)
        if wanted <= max(kept.digests(), default=-1):
            self.show_kept()
            return
        for source in others:
            if source.is_reachable and source.kept is not None and source.kept.step == wanted:
                digest = source.kept.state_digest
                try:
                    data = await self._checkpoint_of(source, digest)
                    await self._in_thread(partial(kept.keep, wanted, digest, data))
                except (SwarmError, TimeoutError, ValueError, OSError) as error:
                    _logger.debug("%s does not give its checkpoint: %s", source.peer_id, error)
                    continue
                self.show_kept()
                return

    def show_kept(self) -> None:
        """What it keeps has changed since it came to this moment, and others may copy it."""
        newest = _newest_of(self.rollbacks.kept)
        if self.own.counts_exactly and newest != self.own.kept:
            self._standing.update(kept=newest)
            self.gossip.tell()

    def _arrival(self, group: Group, digest: bytes) -> Arrival:
        return Arrival(group.next_moment, group.roster, digest, self.rollbacks.history, self.rollbacks.went_back_to)

    async def _checkpoint_of(self, source: Progress, digest: bytes) -> bytes:
        return await download_checkpoint(self._network, source, self._state, digest, self._in_thread)

    async def download(self) -> Downloaded | None:
        """The state that most others have; None if this peer has caught up by itself, or is alone.

        Raises:
            ValueError: they train another model than this peer, which has not joined yet.
        """
        view = self.view()
        sources = list(policy.sources_of_state(view))
        self._rng.shuffle(sources)
        for source in sources:
            try:
                return await download(self._network, source, self._state, self._in_thread)
            except (SwarmError, TimeoutError, ValueError) as error:
                if not isinstance(error, SwarmError | TimeoutError) and not self.own.state_digest:
                    raise
                _logger.debug("%s does not give its state: %s", source.peer_id, error)
                self.table.suspect(source.peer_id)
        await asyncio.sleep(_RETRY_S)
        return None

    async def refuse(self, downloaded: Downloaded, error: ValueError) -> None:
        """What was downloaded is no state."""
        _logger.warning("%s has not given its state: %s", downloaded.source, error)
        self.table.suspect(downloaded.source)

    async def loaded(self, downloaded: Downloaded, state_digest: bytes) -> bool:
        """The state has been taken over; it counts if it is the one that most peers have had at that moment."""
        arrival = downloaded.arrival
        with suppress(TimeoutError):  # news of that step may be on their way
            async with asyncio.timeout(self._config.silence_s):
                while self.table.majority_digest(arrival.moment) is None:
                    await asyncio.sleep(_RETRY_S)
        expected = self.table.majority_digest(arrival.moment)
        if expected is None:
            _logger.debug("nobody is known to have been at %s", arrival.moment)
            return False
        if expected != state_digest:
            _logger.warning("%s has given another state than that of most peers", downloaded.source)
            self.table.suspect(downloaded.source)
            return False
        self._standing.update(loss=0.0, loss_samples=0, bytes_sent=0, bytes_received=0)
        if arrival.moment.rollbacks != self.own.rollbacks:
            self.rollbacks.kept.discard_after(-1)  # how far back the run has been in between is not known
        self._meetings.took_over_state()
        self.rollbacks.took_over(arrival.history, arrival.went_back_to)
        await self._arrive(arrival, state_digest)
        return True

    # ------------------------------------------------------------ what others ask

    async def exchange(self, peer_id: str, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        if request.HasField("own") and self._standing.note(request.own).peer_id != peer_id:
            raise RequestRejected("the record of progress is that of another peer")
        for record in request.others[:_MOST_OTHERS]:
            with suppress(ValueError):  # from a stranger
                self._standing.note(record)
        if request.wait_s > 0:
            await self.table.changed_since(request.since, min(request.wait_s, self._config.silence_s), _GATHER_S)
        orders = self._moderation.signed_unless(request.orders_digest)
        if peer_id in self._standing.banned():  # it should know why nobody meets it
            own = self.table.signed_of(self.own.peer_id)
            return pb.ExchangeReply(records=[] if own is None else [own], orders=orders)
        records = self.table.since(request.since, peer_id)
        return pb.ExchangeReply(records=records, until=self.table.counter, orders=orders)

    async def state(self, peer_id: str, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]:
        self._standing.require_admitted(peer_id)
        server = self._state_server
        wanted = request.checkpoint
        async for part in server.checkpoint_parts(wanted) if wanted else server.parts(lambda: self.own.moment):
            yield part

    async def rounds(self, peer_id: str, request: pb.RoundsRequest) -> pb.RoundsReply:
        self._standing.require_admitted(peer_id)
        return self._book.answer(request)

    def _nothing(self) -> dict[str, Any]:
        """What a record says of the batch when none of it has been computed."""
        none = to_bits((), self.own.target_batch_size) if self.own.counts_exactly else b""
        return {"samples": 0, "micro_batches": none, "accepted": b"", "decided": b""}

    def _newest(self) -> Moment | None:
        return None if self.own.state == JOINING else self.own.moment

    async def _arrive(self, arrival: Arrival, state_digest: bytes) -> None:
        self._meetings.forget()
        self._standing.roster = arrival.roster
        self._state_server.remember(arrival)
        self._measured_s = now()
        if self.own.state == JOINING:
            self.gossip.publish_soon()
        self._standing.update(
            rollbacks=arrival.moment.rollbacks,
            step=arrival.moment.step,
            state=TRAINING,
            **self._nothing(),
            result_digest=arrival.result_digest,
            state_digest=state_digest,
            kept=_newest_of(self.rollbacks.kept) if self.own.counts_exactly else None,
        )
        self.gossip.tell(urgent=True)


def _newest_of(kept: KeptCheckpoints) -> Kept | None:
    digests = kept.digests()
    return Kept(max(digests), digests[max(digests)]) if digests else None
