"""Passes without a session, for training: their requests, their pieces and their replies.

Tensors of many megabytes are put together and encoded in threads, because steps of sessions share the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from swarm_protocol.errors import RequestRejected
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.statements import Signer
from swarm_protocol.wire.adapters import Adapter, adapter_key
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.codec import encode, shown_shape
from swarm_server.adapters.dropout import Dropout
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.adapters.store import IncomingAdapter
from swarm_server.net.incoming import Incoming
from swarm_server.net.validation import RequestValidator, require_key
from swarm_server.sessions.services import SpanServices
from swarm_server.training.gradient_sums import require_summand
from swarm_server.training.training_memory import RecordedPass


@dataclass(frozen=True)
class _Pass:
    """The parameters of one forward or backward pass.

    Attributes:
        trains_adapter: whether the adapter's own gradients are wanted, in addition to those that flow through it.
        keep_key: the key under which the backward pass will name this forward pass; empty if none will.
        sign: whether a signed statement is wanted with the output.
    """

    blocks: Span
    inputs: BlockInput
    adapter: PlacedAdapter | None
    dropout: Dropout | None
    trains_adapter: bool
    keep_key: bytes
    sign: bool
    codec: pb.Codec


async def forward(
    services: SpanServices, client: Caller, incoming: Incoming, request: ExitStack, signer: Signer
) -> list[pb.TensorReply]:
    """Run a forward pass and return its replies, whose tensor is [batch, tokens, hidden_size].

    ``request`` is the context in which the pass counts among arriving data; the output is about as large as the input.
    ``signer`` makes the statement that the client may ask for.
    """
    with ExitStack() as uses:
        asked = await _read(services, (await incoming.first("forward")).forward, incoming, uses, request)
        kept = uses.enter_context(services.training.keeping(asked.blocks)) if asked.keep_key else None
        outputs = [
            await services.scheduler.train(
                partial(_forward_rows, services, asked, inputs, dropout, kept), client, _num_positions(inputs.hidden)
            )
            for inputs, dropout in _few_rows(services.validator, asked)
        ]
        services.counters.positions["forward"] += _num_positions(asked.inputs.hidden)
        output = await asyncio.to_thread(torch.cat, outputs)
        encoded, statement = await asyncio.to_thread(encode, output, asked.codec), None
        if asked.sign:
            statement = await asyncio.to_thread(signer.sign, asked.blocks, asked.inputs, output[0])
        is_kept = kept is not None and services.training.keep(asked.keep_key, kept)
        return _in_parts(*encoded, statement=statement, kept=is_kept)


def _forward_rows(
    services: SpanServices, asked: _Pass, inputs: BlockInput, dropout: Dropout | None, kept: RecordedPass | None
) -> torch.Tensor:
    """Compute some rows of the pass, on the compute thread, and add them to ``kept`` if there is room."""
    max_bytes = 0 if kept is None else services.training.room(kept)
    if kept is None or not max_bytes:
        if kept is not None:
            services.training.add(kept, None)
        return services.engine.stateless.forward(asked.blocks, inputs, asked.adapter, dropout)
    output, piece = services.engine.stateless.record(
        asked.blocks,
        inputs,
        asked.adapter,
        dropout,
        trains_adapter=asked.trains_adapter,
        max_bytes=max_bytes,
        counted=kept.counted,
    )
    services.training.add(kept, piece)
    return output


async def backward(
    services: SpanServices, client: Caller, incoming: Incoming, request: ExitStack
) -> list[pb.TensorReply]:
    """Run a backward pass and return the gradients; or return sums of gradients, if the request asks for those."""
    message = await incoming.first("forward", "kept", "take_sum")
    if message.WhichOneof("kind") == "take_sum":
        blocks = services.validator.blocks(message.take_sum.contract)
        return await asyncio.to_thread(_all_in_parts, services.sums.take(message.take_sum, blocks, client))
    services.validator.codec(message.codec)
    if message.HasField("summand"):
        require_summand(message.summand)
    blocks, hidden_grad, of_adapter = await _go_back(services, client, incoming, request, message)
    encoded, is_summed = await asyncio.to_thread(encode, hidden_grad, message.codec), False
    if message.HasField("summand") and of_adapter:
        is_summed = services.sums.add(message.summand, blocks, of_adapter, client)
    replies = _in_parts(*encoded, summed=is_summed)
    return replies if is_summed else [*replies, *await asyncio.to_thread(_all_in_parts, of_adapter)]


async def _go_back(
    services: SpanServices, client: Caller, incoming: Incoming, request: ExitStack, message: pb.BackwardRequest
) -> tuple[Span, torch.Tensor, list[torch.Tensor]]:
    """Return the blocks, the gradient of their input, and the gradients of the adapter's tensors over the blocks."""
    with ExitStack() as uses:
        if message.WhichOneof("kind") == "kept":
            blocks = services.validator.blocks(message.kept.contract)
            sizes = services.training.look(message.kept.key, blocks)
            shape, num_rows = sizes.shape, sizes.num_rows
            take = uses.enter_context(services.training.taking(message.kept.key))
            ways_back = [partial(_through_kept, take, number) for number in range(len(num_rows))]
        else:
            asked = await _read(services, message.forward, incoming, uses, request)
            few = list(_few_rows(services.validator, asked))
            blocks, shape, num_rows = asked.blocks, asked.inputs.hidden.shape, [len(inputs.hidden) for inputs, _ in few]
            ways_back = [partial(_recomputing, services, asked, inputs, dropout) for inputs, dropout in few]
        grads = (await _read_grad(services.validator, incoming, shape, request)).split(num_rows)
        services.training.transpose()
        hidden_grads: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        for go_back, grad in zip(ways_back, grads, strict=True):
            hidden_grad, *of_adapter = await services.scheduler.train(
                partial(go_back, grad), client, _num_positions(grad)
            )
            services.counters.positions["backward"] += _num_positions(grad)
            hidden_grads.append(hidden_grad)
            sums = [total + more for total, more in zip(sums, of_adapter, strict=True)] if sums else of_adapter
        return blocks, await asyncio.to_thread(torch.cat, hidden_grads), sums


def _through_kept(take: Callable[[], RecordedPass], number: int, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return gradients of some rows from the kept pass; runs on the compute thread, like ``_recomputing``."""
    return take().pieces[number].backward(grad)


def _recomputing(
    services: SpanServices, asked: _Pass, inputs: BlockInput, dropout: Dropout | None, grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return services.engine.stateless.backward(
        asked.blocks, inputs, grad, asked.adapter, dropout, trains_adapter=asked.trains_adapter
    )


async def _read_grad(
    validator: RequestValidator, incoming: Incoming, shape: Sequence[int], request: ExitStack
) -> torch.Tensor:
    message = (await incoming.first("grad")).grad
    # A stranger's shape may have very many numbers, which are not copied.
    if len(message.shape) != len(shape) or tuple(message.shape) != tuple(shape):
        raise RequestRejected(
            f"gradient has shape {shown_shape(message)}: expected that of the hidden states, {list(shape)}"
        )
    return await incoming.collect(validator.hidden(message), request)


def _num_positions(hidden: torch.Tensor) -> int:
    """Return rows × positions of a tensor [batch, tokens, hidden_size]."""
    return hidden.shape[0] * hidden.shape[1]


async def put_adapter(services: SpanServices, client: Caller, incoming: Incoming) -> bytes:
    """Read, parse and keep an adapter; return its key."""
    with IncomingAdapter(services.adapters, client) as arriving:
        while (message := await incoming.next()) is not None:
            if not message.part:
                raise RequestRejected("a part of the adapter is empty")
            arriving.add(message.part)
        async with services.placing:  # reading an adapter takes twice its size
            place = services.engine.place
            placed = await asyncio.to_thread(lambda: place(adapter_key(arriving.data), Adapter.parse(arriving.data)))
        arriving.keep(placed)
        return placed.key


async def _read(
    services: SpanServices, message: pb.Forward, incoming: Incoming, uses: ExitStack, request: ExitStack
) -> _Pass:
    validator = services.validator
    if message.keep_key:
        require_key(message.keep_key, "the key to keep the pass under")
    validator.codec(message.codec)
    blocks = validator.blocks(message.contract)
    arriving = validator.hidden(message.hidden)
    validator.length(arriving.shape[1])
    adapter = uses.enter_context(services.adapters.using(message.adapter)) if message.HasField("adapter") else None
    inputs = _block_input(validator, message, await incoming.collect(arriving, request))
    dropout = Dropout(message.dropout_seed) if message.dropout_seed else None
    trains_adapter = message.adapter.WhichOneof("kind") == "key"  # the client's own; adapters with names stay as loaded
    if message.sign and (adapter is not None or dropout is not None or len(inputs.hidden) != 1):
        raise RequestRejected("statements are made about one row, computed without an adapter")
    return _Pass(blocks, inputs, adapter, dropout, trains_adapter, message.keep_key, message.sign, message.codec)


def _few_rows(validator: RequestValidator, asked: _Pass) -> Iterator[tuple[BlockInput, Dropout | None]]:
    """Yield the batch in pieces that delay decoding no longer than a chunk of a prompt does."""
    batch_size, num_tokens, _ = asked.inputs.hidden.shape
    size = max(1, validator.max_step_tokens // num_tokens)
    for start in range(0, batch_size, size):
        piece = asked.inputs.rows(slice(start, start + size))
        yield piece, None if asked.dropout is None else replace(asked.dropout, first_row=start)


def _block_input(validator: RequestValidator, message: pb.Forward, hidden: torch.Tensor) -> BlockInput:
    batch_size, num_tokens, _ = hidden.shape
    mask = positions = joined = None
    if message.packed and message.HasField("attention_mask"):
        raise RequestRejected("packed sequences are separated by their positions: expected no attention mask with them")
    if message.HasField("attention_mask"):
        mask = validator.mask(message.attention_mask, batch_size, num_tokens)
    if message.HasField("position_ids"):
        positions = validator.positions(message.position_ids, batch_size, num_tokens)
    if message.HasField("joined"):
        if message.packed:
            raise RequestRejected("packed sequences have no positions that attend to later ones")
        joined = validator.joined(message.joined, batch_size, num_tokens)
    return BlockInput(hidden, mask, positions, message.packed, joined=joined)


def _in_parts(
    wire: pb.Tensor,
    parts: Sequence[bytes],
    *,
    statement: pb.SignedStatement | None = None,
    kept: bool = False,
    summed: bool = False,
) -> list[pb.TensorReply]:
    """Return the messages of an encoded tensor. The first one also carries the statement and the flags."""
    first = pb.TensorReply(output=wire, statement=statement, kept=kept, summed=summed)
    return [first, *(pb.TensorReply(more=part) for part in parts)]


def _all_in_parts(tensors: Sequence[torch.Tensor]) -> list[pb.TensorReply]:
    return [reply for tensor in tensors for reply in _in_parts(*encode(tensor))]
