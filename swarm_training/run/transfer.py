"""State transfer: how peers that join or have fallen behind download the state of a run."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from math import isfinite
from typing import Any, BinaryIO, Protocol
from weakref import WeakValueDictionary

from swarm_models.checkpoints.safetensors_bytes import write_all
from swarm_protocol.errors import PeerUnavailable, RequestRejected
from swarm_protocol.failures import undone_on_error
from swarm_training.checkpoints.state_file import StateFile, no_room, temporary_file
from swarm_training.core.config import MAX_MEMBERS, MAX_WINDOW
from swarm_training.core.moment import Moment
from swarm_training.core.network import Network
from swarm_training.core.record import HeldOutLoss, Progress, is_squared_norm
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.pb import training_pb2 as pb
from swarm_training.rollback.divergence import LossHistory
from swarm_training.run.state import TrainedState, digest_of

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
_REMEMBERED = 4  # steps
_IDLE_S = 10.0  # the longest wait for a part
_DISK_BYTES_PER_S = 20e6  # a giver writes or reads the whole state at least so fast before it sends some of it
_MOST_SNAPSHOTS = 3  # whole states that a giver has among its temporary files
_POLL_S = 0.02
_STATE_FACTOR = 16  # bytes of parameters and optimizer state for each parameter; Adam in fp32 takes 12
_AVERAGE_BYTES = 4  # for each parameter
_SPARE_BYTES = 16 << 20
_GONE_ON = "the run has gone on; ask again"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrival:
    """A moment of a run, and the decision that led to it.

    Attributes:
        roster: ids of the peers that decided it and can be reached.
        result_digest: the digest of the average that led to the moment, or of the rollback.
        history: the losses up to the moment, by which the next loss is judged.
        went_back_to: the step of the last rollback's checkpoint; 0 if there was none.
        global_squared_norm: see ``Progress``.
        evaluations: the losses on held-out data that groups have agreed on up to the moment.
        has_ended: whether the moment is the last one of the run.
    """

    moment: Moment
    roster: tuple[str, ...]
    result_digest: bytes
    history: LossHistory = field(default_factory=LossHistory)
    went_back_to: int = 0
    global_squared_norm: float | None = None
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    has_ended: bool = False


@dataclass(frozen=True)
class Downloaded:
    source: str
    arrival: Arrival
    data: StateFile


@dataclass(frozen=True)
class OfferedState:
    """A state that a peer offers to a run which starts again, with the losses on held-out data up to its moment."""

    moment: Moment
    digest: bytes
    evaluations: EvaluationHistory
    data: StateFile


class Store(Protocol):
    def read(self, digest: bytes) -> StateFile | None:
        """Return the data with this digest, or None if there are none."""


class Offer:
    """The data that a peer offers to others; newer data replace them."""

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
    """The state that a peer which has not joined yet offers.

    Attributes:
        digest: the digest of the state; empty: there is no offer.
        evaluations: the losses on held-out data up to then.
    """

    def __init__(self, state: TrainedState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._written: WeakValueDictionary[bytes, StateFile] = WeakValueDictionary()
        self.digest = b""
        self.evaluations = EvaluationHistory()

    def begin(self, moment: Moment, digest: bytes, evaluations: EvaluationHistory | None) -> None:
        """Offer the present state, which is that of ``moment``, with the losses up to then."""
        self.digest, self.evaluations = digest, (evaluations or EvaluationHistory()).up_to(moment.step)

    def withdraw(self) -> None:
        self.digest = b""

    def read(self, digest: bytes) -> StateFile | None:
        with self._lock:  # several peers read one file
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
        """Return the state of ``moment``. Raises PeerUnavailable if the run has gone on, or too many files are in use;
        SwarmError if the file cannot be written."""
        if (data := self._written.get(moment)) is not None:
            return data
        if moment not in self._writing:
            if len(self._writing) + len(self._written) >= _MOST_SNAPSHOTS:
                raise PeerUnavailable("the peer gives as many states as it can; ask again later")
            self._writing[moment] = asyncio.ensure_future(self._write(moment))
        data = await asyncio.shield(self._writing[moment])  # others may wait for it too
        return data

    async def _write(self, moment: Moment) -> StateFile:
        """Write the state while the run goes on. If that has failed because of a step, steps wait the next time."""
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
        published moment, which may lag behind."""
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


async def compare(network: Network, source: Progress, own: TrainedState) -> None:
    """Request only the header, and check that the source trains the same model. Raise the errors of ``download``."""
    await _header(network.state(source, pb.StateRequest(header_only=True)), _IDLE_S, own)


async def download(network: Network, source: Progress, own: TrainedState, in_thread: InThread) -> Downloaded:
    """Download the newest state of the source.

    Raises:
        PeerUnavailable, TimeoutError: the source is gone, or too slow.
        ValueError: the source trains another model.
    """
    header, data = await _received(network, source, pb.StateRequest(), _most_bytes(own), in_thread, own)
    losses = tuple(header.usual_losses)
    if not 0 < len(header.roster) <= MAX_MEMBERS or header.went_back_to > header.step:
        raise PeerUnavailable("the peer offers a state that no group can have decided", source.peer_id)
    if len(losses) > MAX_WINDOW or not all(map(isfinite, losses)):
        raise PeerUnavailable("the peer offers losses that are too many, or not finite", source.peer_id)
    norm = header.global_squared_norm if header.HasField("global_squared_norm") else None
    if not is_squared_norm((norm or 0.0,)):
        raise PeerUnavailable("the peer offers a norm that is no number", source.peer_id)
    arrival = Arrival(
        Moment(header.rollbacks, header.step),
        tuple(header.roster),
        header.result_digest,
        LossHistory(losses, header.num_high_losses),
        header.went_back_to,
        norm,
        _evaluations_of(header, source),
        header.has_ended,
    )
    return Downloaded(source.peer_id, arrival, data)


async def download_checkpoint(
    network: Network, source: Progress, own: TrainedState, digest: bytes, in_thread: InThread
) -> StateFile:
    """Download the checkpoint with that digest.

    Raises:
        PeerUnavailable, TimeoutError: the source is gone, or too slow.
        RequestRejected: the source does not have the checkpoint.
        ValueError: the source has sent something else.
    """
    return (await download_offered(network, source, own, digest, in_thread))[0]


async def download_offered(
    network: Network, source: Progress, own: TrainedState, digest: bytes, in_thread: InThread
) -> tuple[StateFile, EvaluationHistory]:
    """Download the checkpoint with that digest, and the losses on held-out data that its owner knows. Raise the errors
    of ``download_checkpoint``."""
    request = pb.StateRequest(checkpoint=digest)
    header, data = await _received(network, source, request, _most_bytes(own), in_thread, own)
    return await _checked(data, digest, in_thread), _evaluations_of(header, source)


async def download_replica(
    network: Network, source: Progress, digest: bytes, most_bytes: int, in_thread: InThread
) -> StateFile:
    """Download a checkpoint of a run that this peer, or the source, is not in. The parameters of that run are not
    known here, so only the digest is checked. Raise the errors of ``download_checkpoint``."""
    _, data = await _received(network, source, pb.StateRequest(checkpoint=digest), most_bytes, in_thread)
    return await _checked(data, digest, in_thread)


async def download_offer(
    network: Network, source: Progress, digest: bytes, most_bytes: int, in_thread: InThread
) -> bytes:
    """Download the source's ``Offer`` into memory. Raise the errors of ``download_checkpoint``."""
    received = io.BytesIO()  # its getvalue returns the data without a copy
    await _receive(network, source, pb.StateRequest(checkpoint=digest), most_bytes, in_thread, received)
    data: bytes = await in_thread(received.getvalue)
    if (await in_thread(partial(sha256, data))).digest() != digest:
        raise ValueError("the peer has sent something else than what was asked for")
    return data


async def _checked(data: StateFile, digest: bytes, in_thread: InThread) -> StateFile:
    if await in_thread(partial(digest_of, data)) != digest:
        raise ValueError("the peer has sent another checkpoint than the one that was asked for")
    return data


async def _received(
    network: Network,
    source: Progress,
    request: pb.StateRequest,
    most_bytes: int,
    in_thread: InThread,
    expected: TrainedState | None = None,
) -> tuple[pb.StateHeader, StateFile]:
    """Return the header, and the data in a temporary file. ``expected``: as for ``_header``.

    Raises SwarmError if the file cannot be written."""
    file = temporary_file()
    with undone_on_error(file.close):
        header = await _receive(network, source, request, most_bytes, in_thread, file, expected)
        return header, StateFile(file)


async def _receive(
    network: Network,
    source: Progress,
    request: pb.StateRequest,
    most_bytes: int,
    in_thread: InThread,
    file: BinaryIO,
    expected: TrainedState | None = None,
) -> pb.StateHeader:
    """Write the data to a file. Return the header."""
    parts = network.state(source, request)
    patience_s = _IDLE_S + most_bytes / _DISK_BYTES_PER_S
    header = await _header(parts, patience_s if request.checkpoint else _IDLE_S, expected)
    if header.size_bytes > most_bytes:
        raise PeerUnavailable("the peer offers a state that is too large", source.peer_id)
    missing = header.size_bytes
    limit_s = _IDLE_S + missing / _DISK_BYTES_PER_S
    while missing > 0:
        async with asyncio.timeout(limit_s):
            part = await anext(parts, None)
        limit_s = _IDLE_S
        if part is None or not part.data:
            raise PeerUnavailable("the peer has sent only some of its state", source.peer_id)
        await in_thread(partial(_write, file, part.data))
        missing -= len(part.data)
    return header


def _write(file: BinaryIO, data: bytes) -> None:
    try:
        write_all(file, data)
    except OSError as error:
        _logger.warning("%s", no_room(error))
        raise no_room(error) from None


async def _header(parts: AsyncIterator[pb.StatePart], limit_s: float, expected: TrainedState | None) -> pb.StateHeader:
    """Receive the header. ``expected``: a state whose model and settings the header must match."""
    async with asyncio.timeout(limit_s):
        header = (await anext(parts)).header
    if expected is not None:
        _require_same(header, expected)
    return header


def _evaluations_to_proto(history: EvaluationHistory) -> list[pb.HeldOutLoss]:
    return [loss.to_proto() for loss in history.losses]


def _evaluations_of(header: pb.StateHeader, source: Progress) -> EvaluationHistory:
    try:
        return EvaluationHistory.of(map(HeldOutLoss.from_proto, header.evaluations))
    except ValueError:
        raise PeerUnavailable("the peer offers evaluations that nobody can have made", source.peer_id) from None


def _most_bytes(own: TrainedState) -> int:
    average = _AVERAGE_BYTES if own.average_decay else 0
    return own.length * (_STATE_FACTOR + average) + _SPARE_BYTES


def _require_same(header: pb.StateHeader, own: TrainedState) -> None:
    theirs = list(header.parameters)
    if len(theirs) != len(own.shapes):
        raise ValueError(
            f"the run trains {len(theirs)} parameters, and this model has {len(own.shapes)}: expected the same model"
        )
    for number, (here, there) in enumerate(zip(own.shapes, theirs, strict=True)):
        if here != there:
            raise ValueError(f"parameter {number} is {here} here and {there} in the run: expected the same model")
    if header.optimizer != own.optimizer_name:
        raise ValueError(f"the optimizer is {own.optimizer_name} here and {header.optimizer} in the run: expected one")
    for name in sorted({*own.common, *header.common}):
        here, there = (common.get(name, "not set") for common in (own.common, header.common))
        if here != there:
            raise ValueError(f"{name} is {here} here and {there} in the run: expected the same")
