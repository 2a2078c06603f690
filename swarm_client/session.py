"""One generation through a chain of servers, which hold its keys and values."""

from __future__ import annotations

import secrets
import threading
import weakref

import torch

from swarm_client import background
from swarm_client.routing import Chain
from swarm_client.swarm import Swarm, closed_error
from swarm_client.transport import Context, HopSession, WireTensor
from swarm_protocol.block_input import BlockInput
from swarm_protocol.errors import NoRoute, PeerBusy, PeerError, RequestRejected, SessionLost
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span

CODECS = {"none": pb.RAW, "int8": pb.INT8_BLOCKS}


class RemoteSession:
    """Keys and values of one batch in a span of remote blocks.

    Servers are asked for room at the first step. Closing, or losing the last reference, frees it.

    Attributes:
        length: positions in the cache, for every row.
        batch_size: rows; None before the first step.
    """

    def __init__(self, swarm: Swarm, blocks: Span, max_positions: int | None, reserve_tokens: int = 0) -> None:
        self._swarm = swarm
        self._blocks = blocks
        self._max_positions = max_positions
        self._reserve_tokens = reserve_tokens
        self._hops: list[HopSession] = []
        self._records_past = False
        self._lock = threading.Lock()
        weakref.finalize(self, _close_soon, self._hops).atexit = False  # servers notice the end of the process
        self.length = 0
        self.batch_size: int | None = None

    def runs_on(self, swarm: Swarm) -> bool:
        """Whether the session belongs to this connection."""
        return self._swarm is swarm

    def step(self, inputs: BlockInput) -> torch.Tensor:
        """Hidden states of new positions after the last block, [batch, new, hidden_size].

        Raises:
            RequestRejected: more positions than the model has, or the servers refuse the input.
            PeerError: a server of the chain failed; NoRoute: none holds some block.
        """
        batch_size, num_tokens, _ = inputs.hidden.shape
        total = self.length + num_tokens
        check_length(total, self._max_positions)
        with self._lock:
            output = background.run(self._step(inputs))
        self.length, self.batch_size = total, batch_size
        return output

    def reorder(self, indices: torch.Tensor) -> None:
        """New row i is old row ``indices[i]``; the batch may grow or shrink."""
        indices = indices.tolist()
        self._tell(pb.SessionRequest(reorder=pb.Reorder(indices=indices)))
        self.batch_size = len(indices)

    def crop(self, num_removed: int) -> None:
        """Forgets the last ``num_removed`` positions (0 trims what recording kept beyond sliding windows)."""
        length = max(0, self.length - num_removed)
        self._tell(pb.SessionRequest(crop=pb.Crop(length=length)))
        self.length = length

    def record_past(self) -> None:
        """Lets sliding-window blocks keep what a later ``crop`` needs."""
        self._records_past = True
        self._tell(pb.SessionRequest(record_past=pb.RecordPast()))

    def reset(self) -> None:
        """Forgets everything; the session can be used again."""
        self.close()
        self.length, self.batch_size = 0, None

    def close(self) -> None:
        """Frees the room on the servers."""
        with self._lock:
            background.run(_close(self._hops))

    async def _step(self, inputs: BlockInput) -> torch.Tensor:
        if self._swarm.closed:
            raise closed_error()
        if not self._hops:
            await self._open(inputs.hidden.shape[0], self.length + inputs.hidden.shape[1])
        context = Context.of(inputs)
        hidden = WireTensor.of(inputs.hidden, CODECS[self._swarm.config.compression])
        try:
            for hop in self._hops:
                hidden = await hop.step(self.length, hidden, context)
            return hidden.decode(like=inputs.hidden)
        except (PeerError, RequestRejected) as error:
            if isinstance(error, PeerError) and not isinstance(error, PeerBusy | SessionLost):
                await self._swarm.failed(error)
            elif hop is self._hops[0] and not isinstance(error, SessionLost):
                raise  # refused before anything changed: the session can go on
            await _close(self._hops)
            raise

    async def _open(self, batch_size: int, num_tokens: int) -> None:
        """Opens a stream to every server of the fastest chain; takes another chain if a server refuses or is gone."""
        if self.length:
            raise RequestRejected("the session's servers have forgotten it; start again")
        reserve_tokens = max(self._reserve_tokens, num_tokens)
        if self._max_positions is not None:
            reserve_tokens = min(reserve_tokens, self._max_positions)
        full: dict[str, PeerBusy] = {}  # servers without room
        while True:
            try:
                chain = await self._swarm.chain(self._blocks, batch_size * reserve_tokens, avoid=full)
            except NoRoute:
                if full:
                    raise next(iter(full.values())) from None
                raise
            try:
                await self._open_chain(chain, batch_size, reserve_tokens)
                return
            except PeerBusy as error:
                full[error.peer_id] = error
            except PeerError as error:
                await self._swarm.failed(error)

    async def _open_chain(self, chain: Chain, batch_size: int, reserve_tokens: int) -> None:
        session_id = secrets.token_hex(8)
        try:
            for hop in chain:
                server = await self._swarm.server(hop.server)
                self._hops.append(await server.open(hop.span, session_id, batch_size, reserve_tokens))
            if self._records_past:
                await self._send(pb.SessionRequest(record_past=pb.RecordPast()))
        except BaseException:
            await _close(self._hops)
            raise

    def _tell(self, request: pb.SessionRequest) -> None:
        if self._hops:
            with self._lock:
                background.run(self._send(request))

    async def _send(self, request: pb.SessionRequest) -> None:
        for hop in self._hops:
            await hop.request(request)


def check_length(num_positions: int, max_positions: int | None) -> None:
    """Raises RequestRejected if the model has fewer positions; ``None`` stands for a model without limit."""
    if max_positions is not None and num_positions > max_positions:
        raise RequestRejected(
            f"{num_positions} positions are more than the model's {max_positions}: "
            "shorten the prompt or generate fewer tokens"
        )


async def _close(hops: list[HopSession]) -> None:
    closing = hops[:]
    hops.clear()
    for hop in closing:
        await hop.close()


def _close_soon(hops: list[HopSession]) -> None:
    if hops:
        background.submit(_close(hops))
