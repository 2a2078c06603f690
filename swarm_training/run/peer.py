"""One peer of a run: how it joins, reports its progress, catches up and leaves. ``meetings`` has the averaging."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import inf, isfinite
from typing import Any

from torch import Tensor

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.codecs.bitmap import to_bits
from swarm_protocol.errors import PeerUnavailable, RequestRejected, SwarmError
from swarm_protocol.wire.printable import printable
from swarm_training.averaging.group import Group
from swarm_training.core.config import MAX_MICRO_BATCHES, TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING, LEFT, TRAINING, HeldOutLoss, Kept, OfferedCheckpoint, Progress
from swarm_training.core.signing import read_signed
from swarm_training.evaluation.evaluator import Evaluator, PendingEvaluation
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.ledger.archive import KeptLedger
from swarm_training.ledger.book import Book
from swarm_training.ledger.crediting import Crediting
from swarm_training.ledger.ledger import Ledger, LedgerLimits
from swarm_training.ledger.moderation import Moderation
from swarm_training.ledger.orders import ModeratorOrder, Orders
from swarm_training.meeting.attending import Averaged, WentBack
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.cut_off import must_stand_aside
from swarm_training.progress.gossip import Gossip
from swarm_training.progress.policy import LocalView
from swarm_training.progress.table import ProgressTable
from swarm_training.rollback.divergence import LossHistory
from swarm_training.rollback.restarting import offer_of
from swarm_training.rollback.rollbacks import Rollbacks
from swarm_training.rollback.stored import StoredCheckpoints
from swarm_training.run.meetings import NO_LOSS, Averager, Decisions, Environment, GradientCompression
from swarm_training.run.standing import PeerState, now, smoothed
from swarm_training.run.state import TrainedState, digest_of
from swarm_training.run.transfer.arrival import Arrival
from swarm_training.run.transfer.checkpoints import PeerCheckpoints
from swarm_training.run.transfer.downloads import StateDownloads
from swarm_training.run.transfer.giving import Offer, OwnOffer, StateServer
from swarm_training.run.transfer.receiving import Downloaded, compare

_RETRY_S = 0.1
_GATHER_S = 0.1  # how long a reply waits for more records that are not urgent
_FOUND_SOON_S = 10.0  # a peer that has found nobody for so long warns that the run's name may be wrong
_MOST_OTHERS = 64  # records of other peers that are read from one request
_CUT_OFF_SILENCES = 2.0  # the least time for which calls must have failed, in multiples of ``silence_s``
_logger = logging.getLogger(__name__)


class TrainingPeer:
    """One peer of a run, used from one event loop. It answers the requests of other peers, see ``PeerHandlers``. Its
    methods for the training loop are coroutines even if they await nothing, see ``PeerCalls``.

    Attributes:
        downloads: the downloads of states that other peers have.
        checkpoints: the checkpoints that this peer keeps.
        stored: checkpoints that earlier processes have left on the disk.
        evaluator: this peer's part in evaluations of the run on held-out data.
        offer: other data that peers may request.
    """

    def __init__(
        self,
        config: TrainingConfig,
        member: SwarmAccess,
        own: Progress,
        environment: Environment,
        state: TrainedState,
        compression: GradientCompression,
        orders: Orders | None = None,
        ledger: KeptLedger | None = None,
    ) -> None:
        """Create a peer that has not joined yet. ``member``: its key and token. ``orders``: the registry of moderators'
        orders; None: the run has no moderators. ``ledger``: the contributions known so far; None: none are."""
        if config.counting == "exact":
            if not 1 <= own.target_batch_size <= MAX_MICRO_BATCHES:
                raise ValueError(
                    f"a batch has {own.target_batch_size} micro-batches: expected 1 to {MAX_MICRO_BATCHES}"
                )
            own = dataclasses.replace(own, micro_batches=to_bits((), own.target_batch_size))
        most = config.max_samples or inf
        table = ProgressTable(own.run, own.model, own.peer_id, config.silence_s, config.presume_gone_s, most)
        self._moderation = Moderation(orders)
        self._standing = PeerState(own, member.identity, table, self._moderation)
        self._config = config
        self._network, self._board = network, board = environment.network, environment.board
        self._state = state
        self._in_thread = in_thread = environment.in_thread
        rng = environment.rng
        self.gossip = Gossip(config, table, network, board, self._standing.renew, self._moderation, rng)
        self.stored = StoredCheckpoints(config.lasting_directory, digest_of)
        known = ledger or KeptLedger(Ledger(own.run, LedgerLimits.of(own.target_batch_size, config.max_samples)))
        self.ledger = known.ledger
        self.downloads = StateDownloads(config, self._standing, environment, state, self.ledger.organiser is None)
        self.checkpoints = PeerCheckpoints(config, self._standing, self.gossip, state, self.downloads, in_thread)
        kept = self.checkpoints.kept
        self.rollbacks = Rollbacks(config, self._moderation, self.downloads.checkpoint, in_thread, rng, kept)
        self.offer = Offer()
        self._own_offer = OwnOffer(state)
        stores = (kept, self.checkpoints.replicas, self.offer, self.stored, self._own_offer)
        self._state_server = StateServer(state, stores, in_thread)
        crediting = Crediting(self.ledger, member, lambda: self._standing.own.moment)
        self._book = Book(
            self.ledger, crediting, known.archive, network, lambda: self.view().others, self._newest, in_thread, rng
        )
        self.evaluator = Evaluator(config.evaluation, self, in_thread)
        self._averager = Averager(
            config,
            self._standing,
            environment,
            self.gossip,
            compression,
            Decisions(self.rollbacks, self.evaluator),
            self._book,
        )
        self.average = self._averager.average
        self.meet, self.reduce, self.fetch = self._averager.meet, self._averager.reduce, self._averager.fetch
        self._measured_s: float | None = None
        self._averaging: asyncio.Task[Averaged | WentBack | None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def own(self) -> Progress:
        return self._standing.own

    @property
    def table(self) -> ProgressTable:
        return self._standing.table

    def view(self) -> LocalView:
        return self._standing.view()

    # ------------------------------------------------------------ joining and leaving

    def listens_at(self, address: str, tls_fingerprint: bytes) -> None:
        self._standing.update(address=address, tls_fingerprint=tls_fingerprint)

    def start(self) -> None:
        self._tasks += [asyncio.ensure_future(self.gossip.run()), asyncio.ensure_future(self._book.collect())]
        if self._config.evaluation.every:
            self._tasks.append(asyncio.ensure_future(self.evaluator.run()))

    async def found(
        self,
        state_digest: bytes,
        resumed_at: Moment | None = None,
        born: int | None = None,
        evaluations: EvaluationHistory | None = None,
    ) -> None:
        """Found the run with this peer alone, at step 0 or at the step of the checkpoint of ``resumed_at``.

        Resuming, or having a ledger, counts as a rollback, so that no moment occurs twice, above all in the ledger.
        ``born``: see ``PeerCheckpoints.keep``. ``evaluations``: the losses on held-out data known at that checkpoint.
        """
        earlier = [each for each in (resumed_at, self.ledger.newest) if each is not None]
        rollbacks = 1 + max(each.rollbacks for each in earlier) if earlier else 0
        moment = Moment(rollbacks, resumed_at.step if resumed_at is not None else 0)
        self._state.go_to(moment, None)
        self.rollbacks.took_over(self.rollbacks.history, moment.step)
        await self._in_thread(lambda: self.checkpoints.keep(state_digest, born))
        self.evaluator.took_over((evaluations or EvaluationHistory()).up_to(moment.step))
        roster = (self.own.peer_id,)
        arrival = Arrival(moment, roster, b"", went_back_to=moment.step, evaluations=self.evaluator.history)
        await self._arrive(arrival, state_digest)

    async def offer_state(
        self, moment: Moment, state_digest: bytes, evaluations: EvaluationHistory | None = None
    ) -> None:
        """Offer the present state, which is that of a checkpoint, until this peer has loaded another one.
        ``evaluations``: as for ``found``."""
        self._own_offer.begin(moment, state_digest, evaluations)
        self.show_offers([OfferedCheckpoint(0, offer_of(moment, state_digest))])

    async def await_offers(self, addresses: Sequence[str]) -> None:
        """Wait ``restart_wait_s`` for peers that offer a checkpoint. ``addresses``: multiaddrs by which they join."""
        if self._config.restart_wait_s:
            _logger.warning(
                "this peer waits %.0f s for peers with a newer checkpoint; they join by: --initial-peers %s",
                self._config.restart_wait_s,
                " ".join(addresses),
            )
            await asyncio.sleep(self._config.restart_wait_s)

    async def find_others(self) -> None:
        """Find other peers of this run.

        Raises:
            PeerUnavailable: no peer trains this run.
            ValueError: a peer of this run has another model, or another target batch size.
            AccessDenied: a moderator has banned this peer.
        """
        deadline_s = now() + self._config.join_timeout_s
        warning = asyncio.get_running_loop().call_later(_FOUND_SOON_S, self._say_nobody_is_found)
        try:
            while not self.table.known():
                await self.look()
                if now() > deadline_s:
                    raise PeerUnavailable(f"nobody trains run {self.own.run!r} among the initial peers")
                await asyncio.sleep(_RETRY_S)
        finally:
            warning.cancel()
        self.require_same_batch()

    def require_same_batch(self) -> None:
        """Raise ValueError if a known peer has another target batch size."""
        for peer in self.table.known():
            if peer.target_batch_size != self.own.target_batch_size:
                theirs, own = peer.target_batch_size, self.own.target_batch_size
                raise ValueError(f"target_batch_size is {own} here and {theirs} in the run: expected the same")

    def _say_nobody_is_found(self) -> None:
        _logger.warning(
            "the initial peers know nobody who trains run %r so far: is that its name?", printable(self.own.run, 60)
        )

    async def look(self) -> None:
        """Look once for other peers of this run. Raise the errors of ``find_others``, except PeerUnavailable."""
        if self._moderation.digest():
            self._moderation.take(await self._board.read_orders())
        self._standing.require_admitted(self.own.peer_id)
        for record in await self._board.read():
            with suppress(ValueError):
                self.table.add(record, now())
                continue
            await self._compare(record)

    async def _compare(self, record: pb.SignedProgress) -> None:
        """Raise a ValueError that names the difference if the record's peer is in this run but trains another model."""
        try:
            peer = read_signed(record)
        except ValueError:  # a stranger's entry in the DHT
            return
        if peer.run == self.own.run and peer.is_reachable:
            with suppress(SwarmError, TimeoutError):
                await compare(self._network, peer, self._state)

    async def leave(self) -> None:
        """Leave the run: the other peers stop waiting for this peer, and its samples are withdrawn. If the run has
        ended, first give the last state to peers that lack it."""
        try:
            if self.own.has_ended:
                await self._give_last_state()
        finally:  # also after a cancellation: the caller closes the channels that these tasks use
            self._standing.update(state=LEFT, **self._nothing())
            record = self._standing.renew()
            if self._averaging is not None:
                self._averaging.cancel()
            self.rollbacks.close()
            self.checkpoints.replicas.close()
            for task in self._tasks:
                task.cancel()
        # Gossip has ended with these tasks, so the last record goes to the peers directly.
        calls = [self._network.exchange(peer, pb.ExchangeRequest(own=record)) for peer in self.view().others]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.silence_s):
                await asyncio.gather(self._board.publish(record), self._book.close(), *calls, return_exceptions=True)

    async def _give_last_state(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.max_meeting_s):
                while any(peer.moment < self.own.moment for peer in (*self.view().others, *self.view().silent)):
                    await asyncio.sleep(_RETRY_S)

    # ------------------------------------------------------------ called by the training loop

    def require_admitted(self) -> None:
        """Raise AccessDenied if a moderator has banned this peer, or most other peers exclude it."""
        self._standing.require_admitted(self.own.peer_id)

    def banned(self) -> frozenset[str]:
        """Return the ids of peers that a moderator has banned, or that are excluded for computing wrongly."""
        return self._standing.banned()

    def bans(self) -> dict[str, ModeratorOrder]:
        """Return the moderators' bans that are in force now, by peer id."""
        return self._moderation.bans()

    def exclude(self, peer_id: str) -> None:
        """Exclude a peer that this peer has found to compute wrongly: accept nothing from it, and publish this."""
        _logger.warning("%s has computed wrongly, and is excluded", peer_id)
        self._standing.exclude(peer_id)
        self.gossip.tell(urgent=True)

    def shows_move(self, *, may_move: bool, next_stage: int | None = None) -> None:
        """Publish in the record whether this peer may move to another stage, and to which stage it will go."""
        self._standing.update(may_move=may_move, next_stage=next_stage)
        self.gossip.tell(urgent=True)

    async def measure(self, computed: int, could_per_s: float | None = None) -> None:
        """Update the speed in the record by the samples computed since the last call, or the last global step.

        ``could_per_s``: the speed that this peer could reach, if it is not always given samples; 0: not known yet."""
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
        """Publish the number of samples accumulated since the last global step.

        ``loss`` is the mean over ``loss_samples`` samples, or infinity if the loss of a sample was not finite.

        Raises:
            AccessDenied: a moderator has banned this peer.
        """
        self._standing.require_admitted(self.own.peer_id)
        self._averager.set_loss(loss, loss_samples)
        self._standing.update(samples=samples)
        if loss == inf:  # it may make peers meet before the batch is complete, see ``Rollbacks.cannot_wait``
            self._standing.update(loss=loss, loss_samples=loss_samples)
        self.gossip.tell(urgent=self._averager.is_due(self.view()))

    async def report_micro_batches(self, done: Collection[int], loss: float, loss_samples: int) -> None:
        """Publish which micro-batches of the batch are in this peer's sums. The rest is as in ``report``."""
        size = self.own.target_batch_size
        self._standing.update(micro_batches=to_bits(done, size))
        await self.report(len(done), loss, loss_samples)

    def hold(self, averaged: Averaged, shared: bytes = b"", squared_norm: tuple[float, ...] = ()) -> None:
        """Hold a decided average until the peers of other runs hold their averages too. ``stepped`` follows when it is
        applied. Until then this peer stays at its moment, and publishes the decision to its group and to observers.

        ``shared``: the digest of an ``Offer`` with the part of the average that these peers need. ``squared_norm``: see
        ``show_norm``."""
        self._averager.decided()
        offered = Kept(averaged.group.step, shared) if shared else None
        self._standing.update(decided=averaged.digest, shared=offered, squared_norm=squared_norm)
        self.gossip.tell(urgent=True)

    def show_norm(self, squared_norm: tuple[float, ...]) -> None:
        """Publish the squared norm of the average that this peer holds, as numbers whose sum is exact, for peers of
        other runs that clip by the norm of all averages."""
        self._standing.update(squared_norm=squared_norm)
        self.gossip.tell(urgent=True)

    async def go_back(self, moment: Moment, state_digest: bytes, skipped_batches: int) -> None:
        """Record that the run has gone back to a moment without a meeting of this run, and that this peer has taken
        over the checkpoint of that step. ``skipped_batches``: see ``skip_batches``.

        The roster stays: there was no meeting, so this peer does not know which other peers are at the moment.
        """
        self._averager.took_over_state()
        self.rollbacks.took_over(LossHistory(), moment.step)
        self.rollbacks.kept.discard_after(moment.step)
        self.evaluator.took_over(self.evaluator.history.up_to(moment.step))
        self._standing.update(skipped_batches=skipped_batches, loss=0.0, loss_samples=0, bytes_sent=0, bytes_received=0)
        known = self.evaluator.history
        arrival = Arrival(moment, self._standing.roster, b"", went_back_to=moment.step, evaluations=known)
        await self._arrive(arrival, state_digest)

    @property
    def is_cut_off(self) -> bool:
        """Return whether this peer must stand aside because it cannot call other participants: ``must_stand_aside``."""
        return must_stand_aside(self.view(), self.gossip.failing_s(), _CUT_OFF_SILENCES * self._config.silence_s)

    @property
    def is_aside(self) -> bool:
        """Return whether this peer stands aside. Unlike a peer that has not joined yet, it has a state."""
        return self.own.state == JOINING and bool(self.own.state_digest)

    @property
    def calls_all(self) -> bool:
        """Return whether all other participants answer calls."""
        return self.gossip.failing_s().keys().isdisjoint(peer.peer_id for peer in self.view().others)

    def stand_aside(self) -> None:
        """Pause until ``take_part``, or until this peer has loaded the state; other peers do not wait for this peer."""
        self._standing.update(state=JOINING, **self._nothing())
        self.gossip.tell(urgent=True)

    def take_part(self) -> None:
        self._standing.update(state=TRAINING)
        self.gossip.tell(urgent=True)

    def skip_batches(self, skipped: int) -> None:
        """Publish how many batches of the data have been skipped since the run began."""
        self._standing.update(skipped_batches=skipped)
        self.checkpoints.mark()

    @property
    def roster(self) -> tuple[str, ...]:
        """Return the ids of the peers that took the last step together."""
        return self._standing.roster

    def show_offers(self, offers: Iterable[OfferedCheckpoint]) -> None:
        """Publish checkpoints that this peer can give from ``stored``, while all stages start again."""
        self._standing.update(offers=tuple(offers))
        self.gossip.tell()

    def withdraw_offers(self) -> None:
        """Publish no checkpoints in ``stored`` any more, and give none."""
        self._own_offer.withdraw()
        if self.own.offers:
            self.show_offers(())
            self.stored.forget()

    async def is_due(self) -> bool:
        """Return whether this peer must average or load the state before the next batch."""
        return self._averager.is_due(self.view()) or self._standing.is_lost

    async def is_lost(self) -> bool:
        """Return whether the other peers have gone on without this peer, or have another state."""
        return self._standing.is_lost

    async def start_averaging(self, gradient: Tensor) -> None:
        """Start ``average`` and return at once; nothing may be reported until ``averaged`` returns."""
        self._averaging = asyncio.create_task(self._average_while_due(gradient))

    async def _average_while_due(self, gradient: Tensor) -> Averaged | WentBack | None:
        """Repeat ``average`` while it is due, since a meeting may fail, for example if its leader has fallen behind."""
        while (averaged := await self.average(gradient)) is None and not self._standing.is_lost:
            if not self._averager.is_due(self.view()):
                return None
        return averaged

    async def has_averaged(self) -> bool:
        return self._averaging is not None and self._averaging.done()

    async def averaged(self) -> Averaged | WentBack | None:
        """Wait for the ``average`` that was started, and return its result."""
        assert self._averaging is not None
        await asyncio.wait([self._averaging])  # the task goes on if the caller is cancelled
        return self._averaging.result()

    async def stepped(
        self,
        averaged: Averaged,
        state_digest: bytes,
        loss: float,
        loss_samples: int,
        global_squared_norm: float | None = None,
    ) -> None:
        """Record that the average was applied. ``loss``: the mean over ``loss_samples`` of this peer's samples.
        ``global_squared_norm``: that of the averages of all runs that step together, if they clip by it."""
        sent, received = self._averager.stepped(averaged)
        loss, loss_samples = (loss, loss_samples) if isfinite(loss) else NO_LOSS
        self._standing.update(loss=loss, loss_samples=loss_samples, bytes_sent=sent, bytes_received=received)
        group = averaged.group
        self.evaluator.averaged(group)
        if self.evaluator.reason_to_end:
            _logger.info("the run ends at step %d: %s", group.next_moment.step, self.evaluator.reason_to_end)
        self.rollbacks.averaged(group.moment, [member.record for member in group.members])
        arrival = dataclasses.replace(self._arrival(group, averaged.digest), global_squared_norm=global_squared_norm)
        await self._arrive(arrival, state_digest)

    async def went_back(self, back: WentBack, state_digest: bytes, skipped_batches: int = 0) -> None:
        """Record that the state of the checkpoint was taken over. ``skipped_batches``: see ``skip_batches``."""
        self._averager.took_over_state()
        self.rollbacks.went_back(back.group)
        self.evaluator.took_over(self.evaluator.history.up_to(back.group.next_moment.step))
        self._standing.update(skipped_batches=skipped_batches, loss=0.0, loss_samples=0, bytes_sent=0, bytes_received=0)
        await self._arrive(self._arrival(back.group, back.digest), state_digest)

    def _arrival(self, group: Group, digest: bytes) -> Arrival:
        return Arrival(
            group.next_moment,
            group.roster,
            digest,
            self.rollbacks.history,
            self.rollbacks.went_back_to,
            evaluations=self.evaluator.history,
            has_ended=bool(self.evaluator.reason_to_end),
        )

    async def loaded(self, downloaded: Downloaded, state_digest: bytes) -> bool:
        """Record that the state was taken over. Return False, and record nothing, unless most peers had it then."""
        arrival = downloaded.arrival
        with suppress(TimeoutError):  # records of that step may still arrive
            async with asyncio.timeout(self._config.silence_s):
                while self.table.majority_digest(arrival.moment) is None:
                    await asyncio.sleep(self._config.poll_s)
        expected = self.table.majority_digest(arrival.moment)
        if expected is None:
            _logger.debug("no other peer is known to have been at %s", arrival.moment)
            return False
        if expected != state_digest:
            _logger.warning("%s has given another state than that of most peers", downloaded.source)
            self.table.suspect(downloaded.source)
            return False
        self._standing.update(loss=0.0, loss_samples=0, bytes_sent=0, bytes_received=0)
        if arrival.moment.rollbacks != self.own.rollbacks:
            self.rollbacks.kept.discard_after(-1)  # the run may have gone back further in between
        self._averager.took_over_state()
        self.rollbacks.took_over(arrival.history, arrival.went_back_to)
        self.evaluator.took_over(arrival.evaluations, has_ended=arrival.has_ended)
        await self._arrive(arrival, state_digest)
        return True

    # ------------------------------------------------------------ evaluations on held-out data

    @property
    def reason_of_end(self) -> str:
        """Return why the run has ended; empty while it goes on, or while this peer can still get the last state."""
        standing = self._standing
        if not self.own.has_ended and standing.others_have_ended and not standing.is_lost:
            return "the other peers have ended it, and have left before they gave the last state to this peer"
        return self.evaluator.reason_to_end

    def evaluated(self) -> list[tuple[Progress, pb.SignedProgress]]:
        """Return all known records with a loss on held-out data, each with its signed form."""
        return self.table.evaluated()

    def publish_held_out(self, loss: HeldOutLoss) -> None:
        """Publish a loss on held-out data that this peer has computed."""
        self._standing.update(held_out=loss)
        self._standing.renew()
        self.gossip.tell(urgent=True)

    async def evaluate(self, pending: PendingEvaluation) -> None:
        """Take part in an evaluation of the present moment, in the background."""
        self.evaluator.begin(pending)

    async def evaluations(self) -> EvaluationHistory:
        """Return the losses that groups have agreed on, and those that peers have published since."""
        return self.evaluator.known()

    # ------------------------------------------------------------ requests of other peers

    async def exchange(self, peer_id: str, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        if request.HasField("own") and self._standing.note(request.own).peer_id != peer_id:
            raise RequestRejected("the record of progress is that of another peer")
        for record in request.others[:_MOST_OTHERS]:
            with suppress(ValueError):  # a stranger's record
                self._standing.note(record)
        if request.wait_s > 0:
            await self.table.changed_since(request.since, min(request.wait_s, self._config.silence_s), _GATHER_S)
        orders = self._moderation.signed_unless(request.orders_digest)
        if peer_id in self._standing.banned():  # a banned peer should learn why nobody meets it
            own = self.table.signed_of(self.own.peer_id)
            return pb.ExchangeReply(records=[] if own is None else [own], orders=orders)
        records = self.table.since(request.since, peer_id)
        return pb.ExchangeReply(records=records, until=self.table.counter, orders=orders)

    async def state(self, peer_id: str, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]:
        self._standing.require_admitted(peer_id)
        server = self._state_server
        wanted = request.checkpoint
        newest = partial(server.parts, lambda: self.own.moment, request.header_only)
        async for part in server.checkpoint_parts(wanted) if wanted else newest():
            yield part

    async def rounds(self, peer_id: str, request: pb.RoundsRequest) -> pb.RoundsReply:
        self._standing.require_admitted(peer_id)
        return self._book.answer(request)

    def _nothing(self) -> dict[str, Any]:
        """Return the fields of a record whose peer has computed nothing of the batch."""
        none = to_bits((), self.own.target_batch_size) if self.own.counts_exactly else b""
        return {"samples": 0, "micro_batches": none, "accepted": b"", "decided": b"", "squared_norm": ()}

    def _newest(self) -> Moment | None:
        """Return the last moment whose rounds the ledger takes; None: this peer does not know where the run is."""
        return None if self.own.state == JOINING else self.own.moment

    async def _arrive(self, arrival: Arrival, state_digest: bytes) -> None:
        self._averager.forget()
        self._standing.set_roster(arrival.roster)
        self._state_server.remember(arrival)
        self._measured_s = now()
        if self.own.state == JOINING:
            self.gossip.publish_soon()  # the record on the board still says that this peer is joining
        self._standing.update(
            rollbacks=arrival.moment.rollbacks,
            step=arrival.moment.step,
            state=TRAINING,
            **self._nothing(),
            result_digest=arrival.result_digest,
            global_squared_norm=arrival.global_squared_norm,
            state_digest=state_digest,
            newest_held_out=arrival.evaluations.newest,
            best_held_out=arrival.evaluations.best,
            has_ended=arrival.has_ended,
        )
        self.checkpoints.mark()
        self.gossip.tell(urgent=True)
