"""Passes without a cache, forward and backward, in micro-batches over several chains."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from swarm_client.patience import Patience
from swarm_client.routing import Chain, Hop
from swarm_client.swarm import Swarm
from swarm_client.wire_tensor import CODECS, Context, WireTensor
from swarm_protocol.block_input import BlockInput
from swarm_protocol.codec import split_rows, torch_dtype
from swarm_protocol.errors import BadReply, PeerError
from swarm_protocol.span import Span

T = TypeVar("T")
_MICRO_BATCH_TOKENS = 64  # at least, unless there are not so many
_MAX_MICRO_BATCHES = 16  # under way at a time


@dataclass(frozen=True)
class Visited:
    """A server that some rows went to, and the hidden states that they entered its blocks with."""

    hop: Hop
    hidden: WireTensor


async def forward(
    swarm: Swarm, span: Span, inputs: BlockInput, need_grad: bool
) -> tuple[list[torch.Tensor], list[list[Visited]]]:
    """The outputs of micro-batches, and the way of each for ``backward``.

    Several are under way at once, through as many chains as get all of them done soonest.

    Raises:
        NoRoute: nobody holds some block. RequestRejected: the servers refuse the input.
        RecoveryFailed: servers failed, and nobody could take their place within ``recovery_timeout_s``.
    """
    batches = _micro_batches(inputs)
    chains = await swarm.chains(span, [rows.hidden.shape[0] * rows.hidden.shape[1] for rows in batches])

    async def one(rows: BlockInput, chain: Chain) -> tuple[torch.Tensor, list[Visited]]:
        wire = WireTensor.of(rows.hidden, CODECS[swarm.config.compression])
        output, path = await _forward_rows(swarm, span, wire, Context.of(rows), chain)
        return output.decode(rows.hidden.shape, rows.hidden.dtype), path if need_grad else []

    results = await _together([partial(one, *job) for job in zip(batches, chains, strict=True)])
    return [output for output, _ in results], [path for _, path in results]


async def _forward_rows(
    swarm: Swarm, span: Span, hidden: WireTensor, context: Context, chain: Chain
) -> tuple[WireTensor, list[Visited]]:
    """Goes on from where it is with another chain when a server fails."""
    path: list[Visited] = []
    position, patience = span.start, Patience(swarm)
    while True:
        try:
            for hop in chain:
                output = await _visit(swarm, hop, hidden, context)
                path.append(Visited(hop, hidden))
                hidden, position = output, hop.span.end
                patience.renew()
            return hidden, path
        except PeerError as error:
            patience.failed(error)
        chain = await patience.chain(Span(position, span.end))


async def _visit(
    swarm: Swarm, hop: Hop, hidden: WireTensor, context: Context, grad: WireTensor | None = None
) -> WireTensor:
    """The hop's outputs, or the gradient of its inputs given that of its outputs; raises BadReply if they are wrong."""
    server = await swarm.server(hop.server)
    if grad is None:
        result = await server.forward(hop.span, hidden, context)
    else:
        result = await server.backward(hop.span, hidden, grad, context)
    try:
        result.decode(hidden.header.shape, torch_dtype(result.header.dtype))
    except BadReply as error:  # said by this server: the next one would be blamed
        raise BadReply(str(error), hop.server.peer_id, hop.span) from None
    return result


async def backward(swarm: Swarm, visited: list[list[Visited]], outputs: BlockInput) -> list[torch.Tensor]:
    """Gradients of the inputs of micro-batches. ``outputs``: gradients of their outputs, with their mask and positions.

    Raises:
        As ``forward``.
    """

    async def one(rows: BlockInput, path: list[Visited]) -> torch.Tensor:
        context, wire = Context.of(rows), WireTensor.of(rows.hidden)
        for part in reversed(path):
            wire = await _backward_rows(swarm, part, wire, context)
        return wire.decode(rows.hidden.shape, rows.hidden.dtype)

    jobs, first_row = [], 0
    for path in visited:
        num_rows = path[0].hidden.header.shape[0]
        jobs.append(partial(one, _rows(outputs, slice(first_row, first_row + num_rows)), path))
        first_row += num_rows
    return await _together(jobs)


async def _backward_rows(swarm: Swarm, part: Visited, grad: WireTensor, context: Context) -> WireTensor:
    """Through the blocks of ``part``: on the same server, or on any others that hold them."""
    patience, chain = Patience(swarm), (part.hop,)
    while True:
        try:
            inputs = [part.hidden]  # of each hop
            for hop in chain[:-1]:
                inputs.append(await _visit(swarm, hop, inputs[-1], context))
                patience.renew()
            result = grad
            for hop, hidden in zip(reversed(chain), reversed(inputs), strict=True):
                result = await _visit(swarm, hop, hidden, context, result)
                patience.renew()
            return result
        except PeerError as error:
            patience.failed(error)
        chain = await patience.chain(part.hop.span)


def _micro_batches(inputs: BlockInput) -> list[BlockInput]:
    """The batch in pieces of whole rows: each fits into one request, and all servers have something to do."""
    batch_size, num_tokens, _ = inputs.hidden.shape
    num_rows = max(math.ceil(_MICRO_BATCH_TOKENS / num_tokens), math.ceil(batch_size / _MAX_MICRO_BATCHES))
    pieces, first_row = [], 0
    for piece in split_rows(inputs.hidden):
        end = first_row + len(piece)
        starts = range(first_row, end, num_rows)
        pieces += [_rows(inputs, slice(start, min(start + num_rows, end))) for start in starts]
        first_row = end
    return pieces


def _rows(inputs: BlockInput, rows: slice) -> BlockInput:
    mask, positions = inputs.attention_mask, inputs.position_ids
    return BlockInput(
        inputs.hidden[rows],
        None if mask is None else mask[rows],
        positions if positions is None or len(positions) == 1 else positions[rows],
    )


async def _together(jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """The results of all jobs, of which a limited number runs at a time; if one fails, the others are cancelled."""
    turns = asyncio.Semaphore(_MAX_MICRO_BATCHES)

    async def in_turn(job: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with turns:
            return await job()

    tasks = [asyncio.ensure_future(in_turn(job)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
