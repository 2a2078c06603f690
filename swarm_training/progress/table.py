"""The newest record of every peer of a run, and the time when it arrived."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING, LEFT, PRESENT, Progress
from swarm_training.core.signing import read_signed
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.policy import LocalView, majority_digest

MAX_PEERS = 4096
_SILENT_S = 60.0  # the least time for which a view lists a silent peer
_KEPT_DIGESTS = 16  # steps of each peer
_FORGET_S = 600.0  # the least time after which the record of a silent peer is dropped
# A change of these fields sets ``urgent``.
_URGENT = ("state", "moment", "accepted", "decided", "shared", "next_stage", "address", "excludes", "skipped_batches")


@dataclass(frozen=True)
class _Entry:
    record: Progress
    signed: pb.SignedProgress
    heard_s: float
    counter: int  # the number of the table's change that brought the record


class ProgressTable:
    """The newest records of a run's peers. All times are read from one clock, in seconds.

    Attributes:
        counter: the number of changes so far.
        urgent: the number of the last change that peers may wait for, such as a peer that comes, goes or advances.
    """

    def __init__(
        self,
        run: str,
        model: bytes | None,
        own_id: str,
        silence_s: float,
        presume_gone_s: float = inf,
        max_samples: float = inf,
    ) -> None:
        """Start empty. ``model``: the digest of the trained model; other models' records are refused. None: unknown.
        ``max_samples``: see ``LocalView``."""
        self._run = run
        self._model = model
        self._own_id = own_id
        self._silence_s = silence_s
        self._silent_s, self._forget_s = max(_SILENT_S, 2 * silence_s), max(_FORGET_S, 4 * silence_s)
        self._presume_gone_s = presume_gone_s
        self._max_samples = max_samples
        self._entries: dict[str, _Entry] = {}
        self._gone: dict[str, int] = {}  # by peer, the version of its record when it was found gone
        self._suspects: dict[str, int] = {}
        self._banned: frozenset[str] = frozenset()
        self._ruled_out: dict[str, float] = {}  # by peer, since when
        self._known: set[bytes] = set()  # bytes of all entries; their signatures are not checked again
        self._digests: dict[str, deque[Progress]] = {}  # by peer, records of its last steps
        self.counter = self.urgent = 0
        self._news = asyncio.Event()

    def add(self, signed: pb.SignedProgress, now: float) -> Progress | None:
        """Store a record. Return it if it is newer than the known record of its peer, else None. Raise ValueError if
        the record is not signed by its peer, or that peer trains another run or model."""
        if signed.progress in self._known:
            return None
        record = read_signed(signed)
        self._check(record)
        entry = self._entries.get(record.peer_id)
        if len(self._entries) >= MAX_PEERS if entry is None else record.version <= entry.record.version:
            return None
        if entry is not None:
            self._known.discard(entry.signed.progress)
        self._known.add(signed.progress)
        if record.state_digest:
            self._keep_digest(record)
        self.counter += 1
        if entry is None or any(getattr(entry.record, name) != getattr(record, name) for name in _URGENT):
            self.urgent = self.counter
        self._news.set()
        self._entries[record.peer_id] = _Entry(record, signed, now, self.counter)
        self._forget(now)
        return record

    def _check(self, record: Progress) -> None:
        if record.run != self._run:
            raise ValueError(f"the peer trains run {record.run!r}, and not {self._run!r}")
        if self._model is not None and record.model != self._model:
            raise ValueError("the peer trains another model")

    def _keep_digest(self, record: Progress) -> None:
        """Keep one record for each step, because a peer makes many while it accumulates samples."""
        kept = self._digests.setdefault(record.peer_id, deque(maxlen=_KEPT_DIGESTS))
        if kept and kept[-1].moment == record.moment:
            kept.pop()
        kept.append(record)

    def majority_digest(self, moment: Moment) -> bytes | None:
        """Return the state that most other peers had at a moment, even if they have gone on since; None if unknown."""
        others = self._digests.keys() - {self._own_id} - self._banned
        records = (record for peer in others for record in self._digests[peer])
        return majority_digest(record for record in records if record.moment == moment)

    def signed_of(self, peer_id: str) -> pb.SignedProgress | None:
        entry = self._entries.get(peer_id)
        return None if entry is None else entry.signed

    def evaluated(self) -> list[tuple[Progress, pb.SignedProgress]]:
        """Return the records with a loss on held-out data, including this peer's own and those of peers that left."""
        entries = (entry for peer_id, entry in self._entries.items() if peer_id not in self._banned)
        return [(entry.record, entry.signed) for entry in entries if entry.record.held_out is not None]

    def ended(self) -> list[Progress]:
        """Return the records in which other peers say that the run has ended. These peers may have left."""
        entries = (entry for peer_id, entry in self._entries.items() if peer_id not in {self._own_id, *self._banned})
        return [entry.record for entry in entries if entry.record.has_ended]

    def since(self, counter: int, but_of: str) -> list[pb.SignedProgress]:
        """Return the records that came after ``counter``, without those of banned peers and of the peer ``but_of``."""
        news = [entry for entry in self._entries.values() if entry.counter > counter]
        return [entry.signed for entry in news if entry.record.peer_id not in {but_of, *self._banned}]

    async def changed_since(self, counter: int, timeout_s: float, gather_s: float = 0.0) -> None:
        """Wait until there are records after ``counter``, at most ``timeout_s``. If none of them is urgent, wait up to
        ``gather_s`` for more."""
        await self._until(lambda: self.counter > counter, timeout_s)
        if self.counter > counter:
            await self._until(lambda: self.urgent > counter, gather_s)

    async def urgent_since(self, counter: int) -> None:
        """Wait until there is an urgent record after ``counter``."""
        await self._until(lambda: self.urgent > counter, inf)

    async def _until(self, has_come: Callable[[], bool], timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not has_come():
                    self._news.clear()
                    await self._news.wait()

    def heard(self, now: float, states: Collection[int] = PRESENT) -> list[Progress]:
        """Return the records of other peers heard from recently in one of these states, by default participants."""
        return [
            entry.record
            for peer_id, entry in self._entries.items()
            if peer_id not in {self._own_id, *self._banned}
            and not self._has_ended(entry)
            and entry.record.state in states
            and self._is_heard(entry, now)
        ]

    def ban(self, peer_ids: Collection[str], ruled_out: Collection[str], now: float) -> None:
        """Leave these peers, and no others, out of views.

        ``ruled_out``: peers that moderators have banned, or most peers exclude. For ``silence_s`` they are not *gone*
        unless they leave, because a peer that has not heard of the ban may still vote together with them. After that
        they are *gone*: by then every peer that is heard from knows of the ban, and all others count as silent. A peer
        that only this peer excludes keeps its vote, or this peer could go on alone.
        """
        self._banned = frozenset(peer_ids)
        self._ruled_out = {peer_id: self._ruled_out.get(peer_id, now) for peer_id in ruled_out}

    def suspect(self, peer_id: str) -> None:
        """Count a peer as silent until a newer record of it arrives."""
        if peer_id in self._entries:
            self._suspects[peer_id] = self._entries[peer_id].record.version

    def note_gone(self, peer_id: str) -> None:
        """Record that the peer's process has evidently ended."""
        if peer_id in self._entries:
            self._gone[peer_id] = self._entries[peer_id].record.version

    def view(self, own: Progress, now: float) -> LocalView:
        others, silent = [], []
        long_ago = (peer_id for peer_id, since_s in self._ruled_out.items() if now - since_s > self._silence_s)
        gone = set(long_ago) - {self._own_id}
        for peer_id, entry in self._entries.items():
            if peer_id == self._own_id:
                continue
            silence_s = now - entry.heard_s
            # A banned peer that has ended is gone too, so these cases come first.
            if self._has_ended(entry) or silence_s > self._presume_gone_s:
                gone.add(peer_id)
            elif entry.record.state == JOINING:
                gone.add(peer_id)  # a peer that joins or stands aside has no vote
            elif peer_id in self._banned:
                continue
            elif entry.record.state in PRESENT and self._is_heard(entry, now):
                others.append(entry.record)
            elif entry.record.state in PRESENT and silence_s < self._silent_s:
                silent.append(entry.record)
        others.sort(key=lambda peer: peer.peer_id)
        return LocalView(own, tuple(others), tuple(silent), frozenset(gone), self._max_samples)

    def known(self) -> list[Progress]:
        """Return the records of all other peers, including silent ones, except those that have left or ended."""
        return [
            entry.record
            for peer_id, entry in self._entries.items()
            if peer_id != self._own_id and not self._has_ended(entry)
        ]

    def _has_ended(self, entry: _Entry) -> bool:
        return entry.record.state == LEFT or self._is_noted(self._gone, entry)

    def _is_heard(self, entry: _Entry, now: float) -> bool:
        return now - entry.heard_s <= self._silence_s and not self._is_noted(self._suspects, entry)

    def _is_noted(self, notes: dict[str, int], entry: _Entry) -> bool:
        return notes.get(entry.record.peer_id, -1) >= entry.record.version

    def _forget(self, now: float) -> None:
        for peer_id in [peer for peer, entry in self._entries.items() if now - entry.heard_s > self._forget_s]:
            if peer_id != self._own_id:
                self._known.discard(self._entries.pop(peer_id).signed.progress)
                for notes in (self._digests, self._gone, self._suspects):
                    notes.pop(peer_id, None)
