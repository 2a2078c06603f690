"""How the state of a run gets to those who join, or have fallen behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.wire.constants import PART_BYTES
from swarm_training.core.config import MAX_MEMBERS
from swarm_training.core.network import Network
from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb
from swarm_training.run.state import TrainedState

_REMEMBERED = 4  # steps
_IDLE_S = 10.0  # between two parts
_POLL_S = 0.02
_STATE_FACTOR = 16  # bytes of parameters and optimizer state for each parameter; Adam in fp32 takes 12
_SPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class Downloaded:
    source: str
    step: int
    roster: tuple[str, ...]
    result_digest: bytes
    data: bytes


class StateServer:
    def __init__(self, state: TrainedState, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        """``in_thread``: calls a function that takes long."""
        self._state = state
        self._in_thread = in_thread
        self._steps: dict[int, tuple[tuple[str, ...], bytes]] = {}  # roster and digest of the result

    def remember(self, step: int, roster: tuple[str, ...], result_digest: bytes) -> None:
        self._steps[step] = roster, result_digest
        while len(self._steps) > _REMEMBERED:
            del self._steps[next(iter(self._steps))]

    async def parts(self, arrived: Callable[[], int]) -> AsyncIterator[pb.StatePart]:
        """``arrived``: the step that this peer is known to be at; the state is there a moment earlier."""
        step, data = await self._in_thread(self._state.to_bytes)
        while arrived() < step:
            await asyncio.sleep(_POLL_S)
        if step not in self._steps:
            raise PeerUnavailable("the run has gone on; ask again")
        roster, result_digest = self._steps[step]
        yield pb.StatePart(
            header=pb.StateHeader(
                step=step,
                size_bytes=len(data),
                roster=roster,
                parameters=self._state.shapes,
                optimizer=self._state.optimizer_name,
                result_digest=result_digest,
            )
        )
        for at in range(0, len(data), PART_BYTES):
            yield pb.StatePart(data=data[at : at + PART_BYTES])


async def download(network: Network, source: Progress, own: TrainedState) -> Downloaded:
    """Raises:
    PeerUnavailable, TimeoutError: the source is gone, or too slow.
    ValueError: it trains another model.
    """
    parts = network.state(source)
    async with asyncio.timeout(_IDLE_S):
        header = (await anext(parts)).header
    _require_same(header, own)
    if not 0 < len(header.roster) <= MAX_MEMBERS or header.size_bytes > own.length * _STATE_FACTOR + _SPARE_BYTES:
        raise PeerUnavailable("the peer offers a state that is too large", source.peer_id)
    data = bytearray()
    while len(data) < header.size_bytes:
        async with asyncio.timeout(_IDLE_S):
            part = await anext(parts, None)
        if part is None:
            raise PeerUnavailable("the peer has sent only some of its state", source.peer_id)
        data += part.data
    return Downloaded(source.peer_id, header.step, tuple(header.roster), header.result_digest, bytes(data))


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
