"""The newest record of every peer of a run, and when it was heard of."""

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
from swarm_training.progress.policy import View, majority_digest

MAX_PEERS = 4096
_SILENT_S = 60.0  # so long those that are silent are missed
_KEPT_DIGESTS = 16  # steps, of each peer
_FORGET_S = 600.0  # records of those that are long silent
_URGENT = (
    "state",
    "moment",
    "accepted",
    "decided",
    "shared",
    "next_stage",
    "address",
    "excludes",
    "skipped_batches",
)  # see ``ProgressTable``


@dataclass(frozen=True)
class _Entry:
    record: Progress
    signed: pb.SignedProgress
    heard_s: float
    counter: int  # of changes to this table


class ProgressTable:
    """Times are those of one clock, in seconds.

    Attributes:
        counter: of changes.
        urgent: the last of them for which others may wait: somebody has come or gone, or is further than before.
    """

    def __init__(
        self, run: str, model: bytes | None, own_id: str, silence_s: float, presume_gone_s: float = inf
    ) -> None:
        """``model``: the digest of what is trained, records of others are refused; None: it is not known."""
        self._run = run
        self._model = model
        self._own_id = own_id
        self._silence_s = silence_s
        self._presume_gone_s = presume_gone_s
        self._entries: dict[str, _Entry] = {}
        self._gone: dict[str, int] = {}  # the version with which a peer was last seen to be gone
        self._suspects: dict[str, int] = {}
        self._banned: frozenset[str] = frozenset()
        self._ruled_out: dict[str, float] = {}  # since when
        self._known: set[bytes] = set()  # the bytes of all entries, whose signatures need not be checked again
        self._digests: dict[str, deque[Progress]] = {}  # of the last steps, by peer
        self.counter = self.urgent = 0
        self._news = asyncio.Event()

    def add(self, signed: pb.SignedProgress, now: float) -> Progress | None:
        """Takes note of a record; returns it if it is newer than what was known of that peer.

        Raises:
            ValueError: it is not signed by its peer, or trains something else.
        """
        if signed.progress in self._known:
            return None
        record = read_signed(signed)
        if record.run != self._run:
            raise ValueError(f"the peer trains run {record.run!r}, and not {self._run!r}")
        if self._model is not None and record.model != self._model:
            raise ValueError("the peer trains another model")
        entry = self._entries.get(record.peer_id)
        if entry is not None and record.version <= entry.record.version:
            return None
        if entry is None and len(self._entries) >= MAX_PEERS:
            return None
        if entry is not None:
            self._known.discard(entry.signed.progress)
        self._known.add(signed.progress)
        if record.state_digest:
            self._keep_digest(record)
        self.counter += 1
        if entry is None or _is_urgent(entry.record, record):
            self.urgent = self.counter
        self._news.set()
        self._entries[record.peer_id] = _Entry(record, signed, now, self.counter)
        self._forget(now)
        return record

    def _keep_digest(self, record: Progress) -> None:
        """One record for each step: a peer makes many while it accumulates samples."""
        kept = self._digests.setdefault(record.peer_id, deque(maxlen=_KEPT_DIGESTS))
        if kept and kept[-1].moment == record.moment:
            kept.pop()
        kept.append(record)

    def majority_digest(self, moment: Moment) -> bytes | None:
        """The state that most others had at a moment, those too that have gone on since; None if nobody has said it."""
        others = self._digests.keys() - {self._own_id} - self._banned
        records = (record for peer in others for record in self._digests[peer])
        return majority_digest(record for record in records if record.moment == moment)

    def record_of(self, peer_id: str) -> Progress | None:
        entry = self._entries.get(peer_id)
        return None if entry is None else entry.record

    def signed_of(self, peer_id: str) -> pb.SignedProgress | None:
        entry = self._entries.get(peer_id)
        return None if entry is None else entry.signed

    def since(self, counter: int, but_of: str) -> list[pb.SignedProgress]:
        """Records that have come later than that."""
        news = [entry for entry in self._entries.values() if entry.counter > counter]
        return [entry.signed for entry in news if entry.record.peer_id not in {but_of, *self._banned}]

    async def changed_since(self, counter: int, timeout_s: float, gather_s: float = 0.0) -> None:
        """Returns once there are later records than that, or after that time. If nobody waits for the first of them,
        others may follow for ``gather_s``."""
        await self._until(lambda: self.counter > counter, timeout_s)
        if self.counter > counter:
            await self._until(lambda: self.urgent > counter, gather_s)

    async def urgent_since(self, counter: int) -> None:
        """Returns once there is a later record for which others may wait."""
        await self._until(lambda: self.urgent > counter, inf)

    async def _until(self, has_come: Callable[[], bool], timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not has_come():
                    self._news.clear()
                    await self._news.wait()

    def heard(self, now: float, states: Collection[int] = PRESENT) -> list[Progress]:
        """All others that have been heard of lately, in one of these states: those that are part of the run."""
        return [
            entry.record
            for peer_id, entry in self._entries.items()
            if peer_id not in {self._own_id, *self._banned}
            and not self._has_ended(entry)
            and entry.record.state in states
            and self._is_heard(entry, now)
        ]

    def ban(self, peer_ids: Collection[str], ruled_out: Collection[str], now: float) -> None:
        """These, and no others, are left out of views.

        ``ruled_out``: those of them that moderators have banned, or most peers exclude. For as long as silence is
        suffered they are not *gone* unless they leave: one who has not heard of it yet may still vote together with
        them. Then they are: who is heard of has heard of it, who is not counts as silent, and a run does not wait for
        the vote of somebody whom it does not ask. Whom this peer alone excludes keeps its vote: it could go on alone.
        """
        self._banned = frozenset(peer_ids)
        self._ruled_out = {peer_id: self._ruled_out.get(peer_id, now) for peer_id in ruled_out}

    def suspect(self, peer_id: str) -> None:
        """It does not answer; it counts as silent until it is heard of again."""
        if peer_id in self._entries:
            self._suspects[peer_id] = self._entries[peer_id].record.version

    def note_gone(self, peer_id: str) -> None:
        """Its process has evidently ended."""
        if peer_id in self._entries:
            self._gone[peer_id] = self._entries[peer_id].record.version

    def view(self, own: Progress, now: float) -> View:
        others, silent = [], []
        long_ago = (peer_id for peer_id, since_s in self._ruled_out.items() if now - since_s > self._silence_s)
        gone = set(long_ago) - {self._own_id}
        for peer_id, entry in self._entries.items():
            if peer_id == self._own_id:
                continue
            silence_s = now - entry.heard_s
            if self._has_ended(entry) or silence_s > self._presume_gone_s:
                gone.add(peer_id)
            elif entry.record.state == JOINING:
                gone.add(peer_id)  # it has no vote
            elif peer_id in self._banned:
                continue
            elif entry.record.state in PRESENT and self._is_heard(entry, now):
                others.append(entry.record)
            elif entry.record.state in PRESENT and silence_s < _SILENT_S:
                silent.append(entry.record)
        others.sort(key=lambda peer: peer.peer_id)
        return View(own, tuple(others), tuple(silent), frozenset(gone))

    def known(self) -> list[Progress]:
        """All others, silent ones too, but not those that are gone."""
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
        for peer_id in [peer for peer, entry in self._entries.items() if now - entry.heard_s > _FORGET_S]:
            if peer_id != self._own_id:
                self._known.discard(self._entries.pop(peer_id).signed.progress)
                self._digests.pop(peer_id, None)


def _is_urgent(before: Progress, record: Progress) -> bool:
    return any(getattr(before, name) != getattr(record, name) for name in _URGENT)
