"""The side of a transfer that receives: the state of a run, checkpoints, and other data that peers offer."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import isfinite
from typing import BinaryIO

from swarm_models.checkpoints.safetensors_bytes import write_all
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.failures import undone_on_error
from swarm_training.checkpoints.state_file import StateFile, no_room, temporary_file
from swarm_training.core.callbacks import InThread
from swarm_training.core.config import MAX_MEMBERS, MAX_WINDOW
from swarm_training.core.moment import Moment
from swarm_training.core.network import Network
from swarm_training.core.record import HeldOutLoss, Progress, is_squared_norm
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.pb import training_pb2 as pb
from swarm_training.rollback.divergence import LossHistory
from swarm_training.run.state import TrainedState, digest_of
from swarm_training.run.transfer.arrival import Arrival

_IDLE_S = 10.0  # the longest wait for a part
_DISK_BYTES_PER_S = 20e6  # a giver writes or reads the whole state at least so fast before it sends some of it
_STATE_FACTOR = 16  # bytes of parameters and optimizer state for each parameter; Adam in fp32 takes 12
_AVERAGE_BYTES = 4  # for each parameter
_SPARE_BYTES = 16 << 20
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Downloaded:
    """A state that was downloaded from the peer ``source``, and is not verified yet."""

    source: str
    arrival: Arrival
    data: StateFile


@dataclass(frozen=True)
class OfferedState:
    """A state that a peer offers to a run that starts again, with the losses on held-out data up to its moment."""

    moment: Moment
    digest: bytes
    evaluations: EvaluationHistory
    data: StateFile


async def compare(network: Network, source: Progress, own: TrainedState) -> None:
    """Request only the header, and check that the source trains the same model. Raise the errors of ``download``."""
    await _header(network.state(source, pb.StateRequest(header_only=True)), _IDLE_S, own)


async def download(network: Network, source: Progress, own: TrainedState, in_thread: InThread) -> Downloaded:
    """Download the newest state of the source. Raise PeerUnavailable or TimeoutError if the source is gone, or too
    slow; ValueError if the source trains another model."""
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
    """Download a checkpoint whose run this peer, or the source, does not take part in. This peer may not know the
    parameters of that run, so only the digest is checked. Raise the errors of ``download_checkpoint``."""
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
    """Return the header, and the data in a temporary file. ``expected``: as for ``_header``. Raise SwarmError if the
    file cannot be written."""
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
    # A giver may read or write a whole checkpoint before it sends the header. The header of its present state comes at
    # once, and the file is written before the first part.
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
        first = await anext(parts, None)
    if first is None:
        raise PeerUnavailable("the peer has sent nothing of its state")
    if expected is not None:
        _require_same(first.header, expected)
    return first.header


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
