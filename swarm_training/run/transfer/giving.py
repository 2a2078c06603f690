"""The side of a transfer that gives: the present state of a peer, its checkpoints, and other data that it offers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Protocol
from weakref import WeakValueDictionary

from swarm_protocol.errors import PeerUnavailable, RequestRejected
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.callbacks import InThread
from swarm_training.core.moment import Moment
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.pb import training_pb2 as pb
from swarm_training.run.state import TrainedState
from swarm_training.run.transfer.arrival import Arrival

_REMEMBERED = 4  # arrivals
_MOST_SNAPSHOTS = 3  # whole states that a giver has among its temporary files
_POLL_S = 0.02  # between two looks at whether the moment has been published
_GONE_ON = "the run has gone on; ask again"


class Store(Protocol):
    """A store of data that peers request by digest."""

    def read(self, digest: bytes) -> StateFile | None:
        """Return the data with this digest, or None if there are none."""


class Offer:
    """The data that a peer offers to others. Only the newest data are offered."""

    def __init__(self) -> None:
        self._entry = b"", b""

    def add(self, data: bytes) -> bytes:
        """Offer ``data``, and return the SHA-256 by which peers request them."""
        digest = sha256(data).digest()
        self._entry = digest, data
        return digest

    def read(self, digest: bytes) -> StateFile | None:
        own, data = self._entry
        return StateFile.of(data) if own == digest else None


class OwnOffer:
    """A peer's offer of its own state, before it has joined."""

    def __init__(self, state: TrainedState) -> None:
        self._state = state
        self._lock = threading.Lock()
        # Weak: a temporary file is removed when the last download of it has ended.
        self._written: WeakValueDictionary[bytes, StateFile] = WeakValueDictionary()
        self.digest = b""  # the digest of the state; empty: there is no offer
        self.evaluations = EvaluationHistory()  # the losses on held-out data up to then

    def begin(self, moment: Moment, digest: bytes, evaluations: EvaluationHistory | None) -> None:
        """Offer the present state, which is that of ``moment``, with the losses on held-out data up to that moment."""
        self.digest, self.evaluations = digest, (evaluations or EvaluationHistory()).up_to(moment.step)

    def withdraw(self) -> None:
        self.digest = b""

    def read(self, digest: bytes) -> StateFile | None:
        with self._lock:  # peers that ask at the same time read one file
            if digest != self.digest:
                return None
            if (data := self._written.get(digest)) is None:
                self._written[digest] = data = self._state.snapshot()[1]
            return data


class _Snapshots:
    """The files with the newest states of a peer. All who download the state of one moment share a file."""

    def __init__(self, state: TrainedState, in_thread: InThread) -> None:
        self._state = state
        self._in_thread = in_thread
        self._writing: dict[Moment, asyncio.Task[StateFile]] = {}
        self._written: WeakValueDictionary[Moment, StateFile] = WeakValueDictionary()
        self._is_overtaken = False

    async def at(self, moment: Moment) -> StateFile:
        """Return the state of ``moment``. Raise PeerUnavailable if the run has gone on, or too many files are in use;
        SwarmError if the file cannot be written."""
        if (data := self._written.get(moment)) is not None:
            return data
        if moment not in self._writing:
            if len(self._writing) + len(self._written) >= _MOST_SNAPSHOTS:
                raise PeerUnavailable("the peer gives as many states as it can; ask again later")
            self._writing[moment] = asyncio.ensure_future(self._write(moment))
        data = await asyncio.shield(self._writing[moment])  # other downloads may wait for this file too
        return data

    async def _write(self, moment: Moment) -> StateFile:
        """Write the state while the run goes on. If a step makes this fail, steps wait for the next snapshot."""
        try:
            found: Moment
            data: StateFile
            found, data = await self._in_thread(partial(self._state.snapshot, waits=self._is_overtaken))
            if found != moment:
                raise PeerUnavailable(_GONE_ON)
        except PeerUnavailable:
            self._is_overtaken = True
            raise
        finally:
            del self._writing[moment]
        self._is_overtaken = False
        self._written[moment] = data
        return data


class StateServer:
    def __init__(self, state: TrainedState, kept: Sequence[Store], in_thread: InThread) -> None:
        """Serve ``state``, and by digest the contents of ``kept``, mainly checkpoints of this and other runs.
        ``in_thread``: calls a slow function in a thread."""
        self._state = state
        self._kept = kept
        self._in_thread = in_thread
        self._snapshots = _Snapshots(state, in_thread)
        self._arrivals: dict[Moment, Arrival] = {}

    def remember(self, arrival: Arrival) -> None:
        self._arrivals[arrival.moment] = arrival
        while len(self._arrivals) > _REMEMBERED:
            del self._arrivals[next(iter(self._arrivals))]

    async def parts(self, arrived: Callable[[], Moment], header_only: bool = False) -> AsyncIterator[pb.StatePart]:
        """Yield the state's header, before its data are written to a file, and the data. ``arrived`` returns the
        published moment, which may lag behind: the optimizer steps before the event loop learns of it."""
        moment, size_bytes = await self._in_thread(self._state.measured)
        while arrived() < moment:
            await asyncio.sleep(_POLL_S)
        if moment not in self._arrivals:
            raise PeerUnavailable(_GONE_ON)
        arrival = self._arrivals[moment]
        header = pb.StateHeader(
            step=moment.step,
            rollbacks=moment.rollbacks,
            roster=arrival.roster,
            result_digest=arrival.result_digest,
            usual_losses=arrival.history.usual,
            num_high_losses=arrival.history.num_high,
            went_back_to=arrival.went_back_to,
            global_squared_norm=arrival.global_squared_norm,
            evaluations=_evaluations_to_proto(arrival.evaluations),
            has_ended=arrival.has_ended,
        )
        yield self._header(header, size_bytes)
        if not header_only:
            async for part in self._data(await self._snapshots.at(moment)):
                yield part

    async def checkpoint_parts(self, digest: bytes) -> AsyncIterator[pb.StatePart]:
        """Yield a checkpoint's header and data. Raise RequestRejected if this peer has none with that digest."""
        for kept in self._kept:
            if (data := await self._in_thread(partial(kept.read, digest))) is not None:
                break
        else:
            raise RequestRejected("this peer does not have the checkpoint")
        earlier = kept.evaluations if isinstance(kept, OwnOffer) else EvaluationHistory()
        yield self._header(pb.StateHeader(evaluations=_evaluations_to_proto(earlier)), data.size_bytes)
        async for part in self._data(data):
            yield part

    def _header(self, header: pb.StateHeader, size_bytes: int) -> pb.StatePart:
        state = self._state
        header.MergeFrom(
            pb.StateHeader(
                size_bytes=size_bytes, parameters=state.shapes, optimizer=state.optimizer_name, common=state.common
            )
        )
        return pb.StatePart(header=header)

    async def _data(self, data: StateFile) -> AsyncIterator[pb.StatePart]:
        parts = data.parts()
        while (part := await self._in_thread(partial(next, parts, None))) is not None:
            yield pb.StatePart(data=part)


def _evaluations_to_proto(history: EvaluationHistory) -> list[pb.HeldOutLoss]:
    return [loss.to_proto() for loss in history.losses]
