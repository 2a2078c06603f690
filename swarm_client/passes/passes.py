"""Forward and backward passes without a cache, in micro-batches over several chains."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn import functional

from swarm_client.adapters.snapshots import NOTHING, AdapterSnapshot
from swarm_client.passes.divergence import require_finite
from swarm_client.passes.remote_sums import RemoteSum, RemoteSums, Summand, SummedPass
from swarm_client.passes.retry_budget import RetryBudget
from swarm_client.passes.ways import Visited, Way
from swarm_client.routing.compression import known_to
from swarm_client.routing.routing import Hop, Route
from swarm_client.swarm.pass_watchdog import BACKWARD
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.transport import PassWatch
from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_protocol.codecs.sizes import CODEC_NAMES, CODECS
from swarm_protocol.errors import BadReply, CacheMiss, PeerError, SwarmError
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.codec import split_rows, torch_dtype
from swarm_protocol.wire.constants import MAX_BATCH_SIZE, MAX_POSITION_IDS

T = TypeVar("T")
Found = list[tuple[Span, list[torch.Tensor]]]  # gradients of the adapter's tensors in each span
_MICRO_BATCH_TOKENS = 64  # the least positions of a micro-batch, unless the batch has fewer
_MAX_MICRO_BATCHES = 16  # micro-batches under way at a time
_KEY_BYTES = 16


async def forward(
    swarm: Swarm,
    span: Span,
    inputs: BlockInput,
    adapter: AdapterSnapshot = NOTHING,
    dropout_seed: int = 0,
    first_grad: int | None = None,
) -> tuple[list[torch.Tensor], list[Way]]:
    """Return the outputs of micro-batches, each [rows, tokens, hidden_size], and their ways for ``backward``.

    Several micro-batches are under way at once, through the chains that finish all of them soonest. With
    ``skip_padding``, positions before a micro-batch's first text and after its last one are not sent: their outputs are
    zeros.

    Args:
        dropout_seed: the seed from which the micro-batches' seeds are derived; 0: nothing is dropped.
        first_grad: the block at which the backward pass will end; None: there is none, and no ways are returned.

    Raises:
        NoRoute: no server holds some block. RequestRejected: the servers refuse the input.
        RecoveryFailed: servers failed, and no server could replace them within ``recovery_timeout_s``.
        TrainingDiverged: numbers overflow, here or on any server.
    """
    batches = _micro_batches(inputs)
    skips = swarm.config.skip_padding
    places = [rows.unpadded if skips else slice(0, rows.hidden.shape[1]) for rows in batches]
    swarm.links.see(inputs, span)
    if inputs.joined is not None:
        swarm.need_joins()
    sizes = [len(rows.hidden) * (at.stop - at.start) for rows, at in zip(batches, places, strict=True)]
    chains = await swarm.chains(span, sizes)
    ends_at = span.end if first_grad is None else first_grad
    trains = first_grad is not None or adapter.begins(span) < span.end
    require_finite([inputs.hidden], "hidden states", trains)
    require_finite(adapter.tensors, "adapter's weights")

    async def one(number: int, batch: BlockInput, at: slice, chain: Route) -> tuple[torch.Tensor, Way]:
        rows = batch.at(at)
        wire = WireTensor.of(rows.hidden, swarm.links.codec_of_pass(chain))
        context = Context.of(rows, adapter, _seed(dropout_seed, number))
        output, path = await _forward_rows(swarm, span, wire, context, chain, ends_at, RetryBudget(swarm, trains))
        decoded = output.decode(rows.hidden.shape, rows.hidden.dtype)
        return _with_padding(decoded, at, batch.hidden.shape[1]), Way(context, path, at)

    jobs = enumerate(zip(batches, places, chains, strict=True))
    giving = asyncio.ensure_future(_give_adapter(swarm, chains, adapter))
    try:
        results = await _together([partial(one, number, *job) for number, job in jobs])
    finally:
        giving.cancel()
    return [output for output, _ in results], [] if first_grad is None else [way for _, way in results]


async def _give_adapter(swarm: Swarm, chains: list[Route], adapter: AdapterSnapshot) -> None:
    """Send the adapter to servers in the order of their blocks, so that later ones get it while others compute."""
    hops = {(hop.server.peer_id, hop.span): hop for chain in chains for hop in chain}
    for hop in sorted(hops.values(), key=lambda hop: hop.span.start):
        with contextlib.suppress(SwarmError):  # the rows that reach this server will meet the error
            server = await swarm.server(hop.server)
            await server.give_adapter(hop.span, adapter.part(hop.span))


async def _forward_rows(
    swarm: Swarm,
    span: Span,
    hidden: WireTensor,
    context: Context,
    chain: Route,
    first_grad: int,
    retry_budget: RetryBudget,
) -> tuple[WireTensor, list[Visited]]:
    """Run the rows through the chain; when a server fails, continue from the same block with another chain.

    Servers with blocks from ``first_grad`` on are asked to keep what the backward pass needs.
    """
    path: list[Visited] = []
    position = span.start
    while True:
        try:
            for hop in chain:
                hidden = _readable(hidden, hop)
                key = secrets.token_bytes(_KEY_BYTES) if hop.span.end > first_grad else b""
                output, kept = await _forward_hop(swarm, hop, hidden, context, retry_budget.alarms, key)
                path.append(Visited(hop, hidden, key if kept else b""))
                hidden, position = output, hop.span.end
                retry_budget.renew(position)
            return hidden, path
        except PeerError as error:
            retry_budget.failed(error)
        chain = await retry_budget.chain(Span(position, span.end))


async def _forward_hop(
    swarm: Swarm, hop: Hop, hidden: WireTensor, context: Context, alarms: int, keep_key: bytes = b""
) -> tuple[WireTensor, bool]:
    """Return the hop's outputs, and whether the server keeps what the backward pass needs.

    Raises:
        BadReply: the outputs are wrong. Stalled: they have not come in time, see ``PassWatchdog``.
    """
    server = await swarm.server(hop.server)
    watch = _watch(swarm, hop, hidden, 1.0, 0, alarms)
    output, kept = await server.forward(hop.span, hidden, context, watch, keep_key, hidden.header.codec)
    with _blamed_on(hop):
        output.decode(hidden.header.shape, torch_dtype(output.header.dtype))
    swarm.worked([hop.server.peer_id])
    return output, kept


async def _backward_hop(
    swarm: Swarm, part: Visited, grad: WireTensor, context: Context, alarms: int, summand: Summand | None = None
) -> tuple[WireTensor, list[torch.Tensor] | None]:
    """Return the gradients of the hop's inputs and of the adapter in its blocks, from the outputs' gradients.

    The adapter's part is None if the server has added it to the sum. Errors are those of ``_forward_hop``.
    """
    hop, hidden = part.hop, part.hidden
    grad = _readable(grad, hop)
    server = await swarm.server(hop.server)
    adapter = context.adapter.part(hop.span)
    shapes = () if adapter is None else adapter.shapes
    grads_bytes = sum(math.prod(shape) for shape in shapes) * torch.float32.itemsize
    watch = _watch(swarm, hop, hidden, BACKWARD, grads_bytes, alarms)
    name = None if summand is None else summand.name
    input_grad, grads = await server.backward(hop.span, hidden, grad, context, watch, part.kept_key, name)
    with _blamed_on(hop):
        input_grad.decode(hidden.header.shape, torch_dtype(input_grad.header.dtype))
        return input_grad, None if grads is None else _decoded(grads)


def _readable(tensor: WireTensor, hop: Hop) -> WireTensor:
    """Return the tensor in a codec that the server knows: it may have been encoded for another server."""
    known = known_to(hop.server)
    return tensor if CODEC_NAMES[tensor.header.codec] in known else tensor.recoded(CODECS["raw"])


def _decoded(grads: list[WireTensor]) -> list[torch.Tensor]:
    return [grad.decode(grad.header.shape, torch.float32) for grad in grads]


def _watch(swarm: Swarm, hop: Hop, hidden: WireTensor, times: float, more_bytes: int, alarms: int) -> PassWatch:
    """Return a watch for a pass that takes ``times`` as long as the forward pass.

    ``more_bytes``: the bytes that are transferred besides two tensors like ``hidden`` (three in a backward pass).
    """
    batch_size, num_tokens, _ = hidden.header.shape

    async def watch(job: Coroutine[Any, Any, T], /) -> T:
        return await swarm.pass_watchdog.watch(
            job,
            hop,
            batch_size * num_tokens,
            (2 if times == 1.0 else 3) * hidden.header.size_bytes + more_bytes,
            times,
            alarms,
            lambda: swarm.can_replace(hop.span, hop.server.peer_id),
        )

    return watch


@contextmanager
def _blamed_on(hop: Hop) -> Iterator[None]:
    """Blame this hop's server for a wrong answer, which otherwise only the next server would notice."""
    try:
        yield
    except BadReply as error:
        raise type(error)(str(error), hop.server.peer_id, hop.span) from None


async def backward(
    swarm: Swarm,
    span: Span,
    ways: list[Way],
    grad: torch.Tensor,
    adapter: AdapterSnapshot = NOTHING,
    need_input: bool = True,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of micro-batches' inputs, each [rows, tokens, hidden_size], and of the adapter's tensors.

    ``need_input``: if False, the pass ends where the adapter begins, and no gradients of inputs are returned.

    Raises:
        SwarmError: the errors of ``forward``.
    """
    require_finite([grad], "gradients")
    sums = adapter.sums(span)
    first_block = span.start if need_input else adapter.begins(span)
    remote = RemoteSums(ways, adapter, first_block)

    async def one(way: Way, batch: torch.Tensor) -> tuple[torch.Tensor | None, Found]:
        rows = batch[:, way.positions]
        wire, found = await _backward_way(swarm, way, rows, remote, first_block)
        if not need_input:
            return None, found
        return _with_padding(wire.decode(rows.shape, rows.dtype), way.positions, batch.shape[1]), found

    async def taken(sum_: RemoteSum) -> tuple[None, Found]:
        return None, await _take_sum(swarm, sum_)

    pieces = grad.split([way.num_rows for way in ways])
    jobs: list[Callable[[], Coroutine[Any, Any, tuple[torch.Tensor | None, Found]]]]
    jobs = [partial(one, *job) for job in zip(ways, pieces, strict=True)]
    # These jobs wait for the ones before, which have got their turns first.
    jobs += [partial(taken, sum_) for sum_ in remote.sums]
    results = await _together(jobs)
    for _, found in results:  # added in the order of rows, so that the sums are reproducible
        for part, grads in found:
            sums.add(part, grads)
    require_finite(sums.tensors, "gradients of what is trained")
    return [input_grad for input_grad, _ in results if input_grad is not None], sums.tensors


async def _backward_way(
    swarm: Swarm, way: Way, rows: torch.Tensor, remote: RemoteSums, first_block: int
) -> tuple[WireTensor, Found]:
    """Go back through one micro-batch's chain to ``first_block``.

    Return the gradient of the inputs, and the gradients of the adapter's tensors that are in no sum.
    """
    codec = swarm.links.codec_of_pass(tuple(part.hop for part in way.path))
    wire, found = WireTensor.of(rows, codec), Found()
    for part in reversed(way.path):
        if part.hop.span.end <= first_block:
            break
        of_outputs, summand = wire, remote.summand(part)
        wire, of_adapter = await _backward_rows(swarm, part, of_outputs, way.context, summand)
        found += of_adapter or []
        if summand is not None:
            summand.ended(SummedPass(part, of_outputs, way.context) if of_adapter is None else None)
    return wire, found


async def _backward_rows(
    swarm: Swarm,
    part: Visited,
    grad: WireTensor,
    context: Context,
    summand: Summand | None = None,
    chain: Route | None = None,
) -> tuple[WireTensor, Found | None]:
    """Go back through the blocks of ``part``, on the same server or on others that hold them.

    Return the gradient of the inputs, and each server's gradients of the adapter's tensors in its blocks. The gradients
    of the adapter are None if they are in the sum.

    Args:
        summand: the pass's place in the server's sum. If the server fails, the pass is no longer part of the sum.
        chain: another chain to start with, if the first server has failed.
    """
    retry_budget = RetryBudget(swarm, trains=True)
    while True:
        try:
            if chain is None:
                parts = [part]
            else:
                summand = None
                # The chain may consist of the same server, for example after it was busy.
                again = len(chain) == 1 and chain[0].server.peer_id == part.hop.server.peer_id
                parts = [Visited(chain[0], _readable(part.hidden, chain[0]), part.kept_key if again else b"")]
                for hop in chain[1:]:  # the inputs of later servers must be computed again
                    last = parts[-1]
                    output, _ = await _forward_hop(swarm, last.hop, last.hidden, context, retry_budget.alarms)
                    parts.append(Visited(hop, _readable(output, hop)))
                    retry_budget.renew()
            result, found = grad, Found()
            for visited in reversed(parts):
                result, grads = await _backward_hop(swarm, visited, result, context, retry_budget.alarms, summand)
                # A suspicion ends when all blocks of the part have been passed, at the first server of the chain.
                retry_budget.renew(part.hop.span.end if visited is parts[0] else 0)
                if grads is None:  # then there is one server alone, which has the sum
                    return result, None
                found.append((visited.hop.span, grads))
            return result, found
        except PeerError as error:
            retry_budget.failed(error)
        chain = await retry_budget.chain(part.hop.span)


async def _take_sum(swarm: Swarm, sum_: RemoteSum) -> Found:
    """Return the sum; if its server does not have it, repeat the passes in it and return their gradients."""
    added, hop = await sum_.complete(), sum_.hop
    if not added:
        return []
    retry_budget, chain = RetryBudget(swarm, trains=True), None
    try:
        server = await swarm.server(hop.server)
        grads = await server.take_sum(hop.span, sum_.request(), sum_.adapter)
        with _blamed_on(hop):
            return [(hop.span, _decoded(grads))]
    except CacheMiss:  # the server works, and only lacks the sum: the passes are repeated on it
        pass
    except PeerError as error:
        retry_budget.failed(error)
        chain = await retry_budget.chain(hop.span)
    again = [partial(_backward_rows, swarm, one.part, one.grad, one.context, chain=chain) for one in added]
    results = await _together(again)
    retry_budget.renew(hop.span.end)
    return [found for _, of_one in results for found in of_one or []]


def _with_padding(rows: torch.Tensor, at: slice, num_tokens: int) -> torch.Tensor:
    """Return [rows, num_tokens, hidden_size], with the given positions in their place and zeros elsewhere."""
    return functional.pad(rows, (0, 0, at.start, num_tokens - at.stop))


def _seed(dropout_seed: int, number: int) -> int:
    """Return the seed of one micro-batch: rows of different micro-batches must not drop the same elements."""
    if not dropout_seed:
        return 0
    digest = hashlib.sha256(f"{dropout_seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") or 1


def _micro_batches(inputs: BlockInput) -> list[BlockInput]:
    """Return the batch in pieces of whole rows that fit into one request each and keep all servers busy."""
    batch_size, num_tokens, _ = inputs.hidden.shape
    num_rows = max(math.ceil(_MICRO_BATCH_TOKENS / num_tokens), math.ceil(batch_size / _MAX_MICRO_BATCHES))
    num_rows = min(num_rows, MAX_BATCH_SIZE, max(1, MAX_POSITION_IDS // num_tokens))
    pieces, first_row = [], 0
    for piece in split_rows(inputs.hidden):  # by the size of a message; then by ``num_rows``
        end = first_row + len(piece)
        starts = range(first_row, end, num_rows)
        pieces += [inputs.rows(slice(start, min(start + num_rows, end))) for start in starts]
        first_row = end
    return pieces


async def _together(jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Return the results of all jobs. A limited number runs at a time; if one fails, the others are cancelled."""
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
