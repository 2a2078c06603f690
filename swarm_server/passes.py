"""Passes without a session, for training: what they are sent, how they are cut, what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from swarm_protocol.adapters import Adapter, adapter_key
from swarm_protocol.block_input import BlockInput
from swarm_protocol.codec import encode
from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_server.adapters import Arriving
from swarm_server.dropout import Dropout
from swarm_server.engine import Engine
from swarm_server.host import Host
from swarm_server.incoming import Incoming
from swarm_server.lora import PlacedAdapter
from swarm_server.validation import Rules


@dataclass(frozen=True)
class _Pass:
    """What a forward or backward is asked for.

    Attributes:
        trains_adapter: gradients of the adapter are wanted, not only through it.
    """

    blocks: Span
    inputs: BlockInput
    adapter: PlacedAdapter | None
    dropout: Dropout | None
    trains_adapter: bool


async def forward(host: Host, incoming: Incoming) -> list[pb.TensorReply]:
    with ExitStack() as uses:
        asked = await _read(host, incoming, uses)
        outputs = []
        for _, inputs, dropout in _few_rows(host.rules, asked):
            compute = partial(host.engine.forward, asked.blocks, inputs, asked.adapter, dropout)
            outputs.append(await host.scheduler.train(compute))
        return _in_parts(torch.cat(outputs))


async def backward(host: Host, incoming: Incoming) -> list[pb.TensorReply]:
    with ExitStack() as uses:
        asked = await _read(host, incoming, uses)
        message = await incoming.first("grad")
        if tuple(message.grad.shape) != tuple(asked.inputs.hidden.shape):
            raise RequestRejected(
                f"gradient has shape {list(message.grad.shape)}: expected that of the hidden states, "
                f"{list(asked.inputs.hidden.shape)}"
            )
        grad = await incoming.collect(host.rules.hidden(message.grad))
        hidden_grads, sums = [], []
        for rows, inputs, dropout in _few_rows(host.rules, asked):
            compute = partial(
                host.engine.backward,
                asked.blocks,
                inputs,
                grad[rows],
                asked.adapter,
                dropout,
                trains_adapter=asked.trains_adapter,
            )
            hidden_grad, *grads = await host.scheduler.train(compute)
            hidden_grads.append(hidden_grad)
            sums = [total + grad for total, grad in zip(sums, grads, strict=True)] if sums else grads
        return [reply for tensor in (torch.cat(hidden_grads), *sums) for reply in _in_parts(tensor)]


async def put_adapter(host: Host, incoming: Incoming) -> bytes:
    """Keeps an adapter; returns its key."""
    with Arriving(host.adapters) as arriving:
        while (message := await incoming.next()) is not None:
            arriving.add(message.part)
        async with host.placing:  # while it is read, an adapter takes twice its size
            placed = await asyncio.to_thread(_place, host.engine, arriving.data)
        arriving.keep(placed)
        return placed.key


def _place(engine: Engine, data: bytearray) -> PlacedAdapter:
    return engine.place(adapter_key(data), Adapter.parse(data))


async def _read(host: Host, incoming: Incoming, uses: ExitStack) -> _Pass:
    rules = host.rules
    message = (await incoming.first("forward")).forward
    blocks = rules.blocks(message.contract)
    arriving = rules.hidden(message.hidden)
    rules.length(arriving.shape[1])
    adapter = uses.enter_context(host.adapters.using(message.adapter)) if message.HasField("adapter") else None
    inputs = _block_input(rules, message, await incoming.collect(arriving))
    dropout = Dropout(message.dropout_seed) if message.dropout_seed else None
    return _Pass(blocks, inputs, adapter, dropout, message.adapter.WhichOneof("kind") == "key")


def _few_rows(rules: Rules, asked: _Pass) -> Iterator[tuple[slice, BlockInput, Dropout | None]]:
    """The batch in pieces that hold up decoding no longer than a chunk of a prompt."""
    inputs = asked.inputs
    batch_size, num_tokens, _ = inputs.hidden.shape
    size = max(1, rules.max_step_tokens // num_tokens)
    mask, positions = inputs.attention_mask, inputs.position_ids
    for start in range(0, batch_size, size):
        rows = slice(start, start + size)
        piece = BlockInput(
            inputs.hidden[rows],
            None if mask is None else mask[rows],
            positions if positions is None or len(positions) == 1 else positions[rows],
        )
        yield rows, piece, None if asked.dropout is None else replace(asked.dropout, first_row=start)


def _block_input(rules: Rules, message: pb.Forward, hidden: torch.Tensor) -> BlockInput:
    batch_size, num_tokens, _ = hidden.shape
    mask = positions = None
    if message.HasField("attention_mask"):
        mask = rules.mask(message.attention_mask, batch_size, num_tokens)
    if message.HasField("position_ids"):
        positions = rules.positions(message.position_ids, batch_size, num_tokens)
    return BlockInput(hidden, mask, positions)


def _in_parts(tensor: torch.Tensor) -> list[pb.TensorReply]:
    wire, parts = encode(tensor)
    return [pb.TensorReply(output=wire), *(pb.TensorReply(more=part) for part in parts)]
