"""One generation through a chain of servers, which hold its keys and values."""

from __future__ import annotations

import asyncio
import secrets
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from swarm_client import background
from swarm_client.routing import Chain, Hop
from swarm_client.swarm import Swarm, closed_error
from swarm_client.transport import Answer, Context, HopSession, Inbox, Trouble, WireTensor, no_answer
from swarm_protocol.block_input import BlockInput
from swarm_protocol.errors import BadReply, NoRoute, PeerBusy, PeerError, RequestRejected, SessionLost, SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire import PAGE_TOKENS

CODECS = {"none": pb.RAW, "int8": pb.INT8_BLOCKS}
_CHUNKS_PER_HOP = 4  # of a prompt: the pipeline is full for all but one part in so many of the time
_SEND_TIMEOUT_S = 1.0  # for what is left of a step that has failed
_IN_ONE_PIECE = 1 << 30  # a hop that takes so many at once must be given them at once


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
        self._inbox: Inbox | None = None
        self._number = 0  # of the last step
        self._changes: list[pb.Change] = []  # since then
        self._records_past = False
        self._lock = threading.Lock()
        weakref.finalize(self, _close_soon, self._hops).atexit = False  # servers notice the end of the process
        self.length = 0
        self.batch_size: int | None = None

    def runs_on(self, swarm: Swarm) -> bool:
        """Whether the session belongs to this connection."""
        return self._swarm is swarm

    def step(self, inputs: BlockInput, num_wanted: int | None = None) -> torch.Tensor:
        """Hidden states after the last block, of the last ``num_wanted`` new positions or of all.

        inputs.hidden: [batch, new, hidden_size] -> [batch, num_wanted, hidden_size]. Long inputs go through the chain
        in chunks, one behind the other.

        Raises:
            RequestRejected: more positions than the model has, or the servers refuse the input.
            PeerError: a server of the chain failed; NoRoute: none holds some block.
        """
        batch_size, num_tokens, _ = inputs.hidden.shape
        total = self.length + num_tokens
        check_length(total, self._max_positions)
        num_wanted = num_tokens if num_wanted is None else min(num_wanted, num_tokens)
        with self._lock:
            output = background.run(self._step(inputs, num_wanted))
        self.length, self.batch_size = total, batch_size
        return output

    def reorder(self, indices: torch.Tensor) -> None:
        """New row i is old row ``indices[i]``; the batch may grow or shrink."""
        indices = indices.tolist()
        self._change(pb.Change(reorder=pb.Reorder(indices=indices)))
        self.batch_size = len(indices)

    def crop(self, num_removed: int) -> None:
        """Forgets the last ``num_removed`` positions (0 lets sliding windows drop what recording kept)."""
        length = max(0, self.length - num_removed)
        self._change(pb.Change(crop=pb.Crop(length=length)))
        self.length = length

    def record_past(self) -> None:
        """Lets sliding-window blocks keep what a later ``crop`` needs."""
        self._records_past = True
        self._change(pb.Change(record_past=pb.RecordPast()))

    def reset(self) -> None:
        """Forgets everything; the session can be used again."""
        self.close()
        self.length, self.batch_size = 0, None

    def close(self) -> None:
        """Frees the room on the servers."""
        with self._lock:
            background.run(self._forget())

    def _change(self, change: pb.Change) -> None:
        """Travels with the next step; a session without servers has nothing to change."""
        if self._hops:
            self._changes.append(change)

    async def _step(self, inputs: BlockInput, num_wanted: int) -> torch.Tensor:
        if self._swarm.closed:
            raise closed_error()
        if not self._hops:
            await self._open(inputs.hidden.shape[0], self.length + inputs.hidden.shape[1])
        steps = list(self._steps(inputs, num_wanted))
        in_flight = {step.message.number: step for step in steps}
        sending = asyncio.ensure_future(self._send(steps))
        try:
            outputs = []
            for number, step in enumerate(steps):
                hidden = await self._answer(step, in_flight)
                if number == 0:
                    self._changes.clear()
                if step.message.outputs_wanted:
                    outputs.append(self._decoded(hidden, step, inputs.hidden))
            await sending  # may end after the last answer; to cancel a write would cancel its stream
            return torch.cat(outputs, 1)
        except _HopError as failure:
            error = failure.error
            gone = isinstance(error, PeerError) and not isinstance(error, PeerBusy | SessionLost)
            if gone:
                await self._swarm.failed(error)
            if gone or isinstance(error, SessionLost) or (failure.hop, failure.step) != (0, steps[0].message.number):
                await _ended(sending)
                await self._forget()
            else:  # nothing has changed anywhere: the session can go on
                await sending
            raise error from None
        except BaseException:  # interrupted: nobody knows how far the servers have come
            sending.cancel()
            await asyncio.shield(self._forget())
            raise

    def _steps(self, inputs: BlockInput, num_wanted: int) -> Iterator[_Step]:
        """The input in chunks that keep all hops busy and are no longer than any of them takes."""
        batch_size, num_tokens, _ = inputs.hidden.shape
        size = min(hop.max_step_tokens for hop in self._hops)
        if len(self._hops) > 1 and size < _IN_ONE_PIECE:
            even = -(-num_tokens // (_CHUNKS_PER_HOP * len(self._hops)))
            size = min(size, batch_size * -(-even // PAGE_TOKENS) * PAGE_TOKENS)
        size = max(1, size // batch_size)
        if size > PAGE_TOKENS:
            size -= size % PAGE_TOKENS
        codec = CODECS[self._swarm.config.compression]
        for start in range(0, num_tokens, size):
            end = min(start + size, num_tokens)
            mask, positions = inputs.attention_mask, inputs.position_ids
            context = Context.of(
                BlockInput(
                    inputs.hidden,
                    None if mask is None else mask[:, : self.length + end],
                    None if positions is None else positions[:, start:end],
                )
            )
            hidden = WireTensor.of(inputs.hidden[:, start:end], codec)
            self._number += 1
            message = pb.Step(
                number=self._number,
                changes=self._changes if start == 0 else (),
                start_position=self.length + start,
                hidden=hidden.header,
                attention_mask=context.attention_mask,
                position_ids=context.position_ids,
                outputs_wanted=max(0, end - max(start, num_tokens - num_wanted)),
            )
            yield _Step(message, hidden.parts)

    async def _send(self, steps: list[_Step]) -> None:
        try:
            for step in steps:
                await self._hops[0].send(step.message, step.parts)
        except SwarmError as error:
            self._inbox.put_nowait(Trouble(0, None, error))

    async def _answer(self, step: _Step, in_flight: Mapping[int, _Step]) -> WireTensor | None:
        """What the last hop makes of the step; hands on what hops could not send to one another."""
        timeout_s = self._swarm.config.step_timeout_s
        last = self._hops[-1]
        while True:
            try:
                event = await asyncio.wait_for(self._inbox.get(), timeout_s)
            except asyncio.TimeoutError:
                raise _HopError(last.number, None, no_answer(last.hop.server, last.hop.span, timeout_s)) from None
            if isinstance(event, Trouble):
                if event.step is None or event.step >= step.message.number:
                    raise _HopError(event.hop, event.step, event.error)
            elif event.relay and event.hop < last.number and event.step in in_flight:
                await self._relay(event, in_flight[event.step])
            elif event.hop == last.number and event.step == step.message.number:
                return event.hidden

    async def _relay(self, answer: Answer, step: _Step) -> None:
        sender, hop = self._hops[answer.hop], self._hops[answer.hop + 1]
        ours, theirs = step.message.hidden, answer.hidden and answer.hidden.header
        if theirs is None or (theirs.dtype, theirs.shape) != (ours.dtype, ours.shape):
            server = sender.hop.server
            error = BadReply(f"server {server.short_id} answered another shape", server.peer_id, sender.hop.span)
            raise _HopError(sender.number, None, error)
        onward = step.with_hidden(answer.hidden)
        try:
            await hop.send(onward.message, onward.parts)
        except SwarmError as error:
            raise _HopError(hop.number, None, error) from None

    def _decoded(self, hidden: WireTensor | None, step: _Step, like: torch.Tensor) -> torch.Tensor:
        hop = self._hops[-1]
        shape = (like.shape[0], step.message.outputs_wanted, like.shape[2])
        try:
            if hidden is None:
                raise BadReply("the server answered nothing")
            return hidden.decode(shape, like.dtype)
        except BadReply as error:
            error.peer_id, error.span = hop.hop.server.peer_id, hop.hop.span
            raise _HopError(hop.number, None, error) from None

    async def _forget(self) -> None:
        """Lets the servers go; the session cannot go on."""
        self._changes.clear()
        await _close(self._hops)

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
        """Raises the first hop's error if some cannot be opened; then none is."""
        self._inbox, self._number = asyncio.Queue(), 0
        keys = [secrets.token_bytes(16) for _ in chain]
        opening = []
        for number, hop in enumerate(chain):
            request = pb.Open(
                session_key=keys[number],
                batch_size=batch_size,
                reserve_tokens=reserve_tokens,
                codec=CODECS[self._swarm.config.compression],
            )
            if hop is not chain[-1]:
                next_server = chain[number + 1].server
                request.next.CopyFrom(
                    pb.NextHop(
                        peer_id=next_server.peer_id,
                        addresses=next_server.addresses,
                        tls_fingerprint=next_server.tls_fingerprint,
                        session_key=keys[number + 1],
                    )
                )
            opening.append(self._open_hop(number, hop, request))
        results = await asyncio.gather(*opening, return_exceptions=True)
        self._hops[:] = [result for result in results if isinstance(result, HopSession)]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await _close(self._hops)
            raise errors[0]
        if self._records_past:
            self._changes[:] = [pb.Change(record_past=pb.RecordPast())]

    async def _open_hop(self, number: int, hop: Hop, request: pb.Open) -> HopSession:
        server = await self._swarm.server(hop.server)
        return await server.open(number, hop.span, request, self._inbox)


@dataclass(frozen=True)
class _Step:
    """A step as it goes to the first hop."""

    message: pb.Step
    parts: tuple[bytes, ...]

    def with_hidden(self, hidden: WireTensor) -> _Step:
        """The same step for another hop."""
        message = pb.Step()
        message.CopyFrom(self.message)
        message.hidden.CopyFrom(hidden.header)
        return _Step(message, hidden.parts)


class _HopError(Exception):
    """What went wrong, at which hop, and with which step."""

    def __init__(self, hop: int, step: int | None, error: SwarmError) -> None:
        self.hop, self.step, self.error = hop, step, error


def check_length(num_positions: int, max_positions: int | None) -> None:
    """Raises RequestRejected if the model has fewer positions; ``None`` stands for a model without limit."""
    if max_positions is not None and num_positions > max_positions:
        raise RequestRejected(
            f"{num_positions} positions are more than the model's {max_positions}: "
            "shorten the prompt or generate fewer tokens"
        )


async def _ended(sending: asyncio.Task) -> None:
    """Waits for the task, but not for a server that takes no more: its stream ends in the middle of a message."""
    await asyncio.wait([sending], timeout=_SEND_TIMEOUT_S)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def _close(hops: list[HopSession]) -> None:
    closing = hops[:]
    hops.clear()
    for hop in closing:
        await hop.close()


def _close_soon(hops: list[HopSession]) -> None:
    if hops:
        background.submit(_close(hops))
