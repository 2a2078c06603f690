"""Computation of adapters: hooks on blocks and their linear layers, for the rows of a batch that have an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter, LowRank
from swarm_server.adapters.dropout import Dropout
from swarm_server.blocks.split_stack import Stack

ModulePlace = tuple[int, str]  # block, and the module's path inside it
AdapterLayout = tuple[tuple[int, str, float, torch.Size, torch.Size], ...]  # all of an adapter but its values


@dataclass(frozen=True, eq=False)
class PlacedAdapter:
    """An adapter that fits the blocks and is on their devices.

    Attributes:
        key: a key that is equal only for equal adapters.
    """

    key: bytes
    adapter: Adapter
    low_rank: Mapping[ModulePlace, LowRank]
    prompts: Mapping[int, torch.Tensor]
    num_positions: int  # positions to which prompts are added

    @classmethod
    def of(cls, key: bytes, adapter: Adapter) -> PlacedAdapter:
        return cls(
            key,
            adapter,
            {(part.block, part.module): part for part in adapter.low_rank},
            {prompt.block: prompt.values for prompt in adapter.prompts},
            max((len(prompt.values) for prompt in adapter.prompts), default=0),
        )

    @cached_property
    def layout(self) -> AdapterLayout:
        """Return the place, scaling and shapes of each low-rank part."""
        return tuple(
            (part.block, part.module, part.scaling, part.a.shape, part.b.shape) for part in self.adapter.low_rank
        )

    def trainable(self, span: Span) -> PlacedAdapter:
        """Return the adapter's part over ``span``, with tensors of its own that take gradients."""
        part = self.adapter.over(span).mapped(lambda tensor, _block: tensor.detach().requires_grad_())
        return PlacedAdapter.of(self.key, part)


@dataclass(frozen=True)
class AdapterRows:
    """Consecutive rows of one batch that have the same adapter.

    Attributes:
        start: the position of the rows' first hidden states; ``adapter.num_positions`` if it is beyond all prompts.
    """

    rows: slice
    adapter: PlacedAdapter
    start: int = 0
    dropout: Dropout | None = None


def shares_of(adapters: Sequence[tuple[PlacedAdapter | None, int, int]]) -> list[AdapterRows]:
    """Return the shares of a batch; equal neighbours are joined. ``adapters``: adapter, rows and start by session."""
    shares: list[AdapterRows] = []
    first = 0
    alike = groupby(
        adapters, lambda session: (session[0], min(session[2], session[0].num_positions if session[0] else 0))
    )
    for (adapter, start), sessions in alike:
        num_rows = sum(num_rows for _, num_rows, _ in sessions)
        if adapter is not None:
            shares.append(AdapterRows(slice(first, first + num_rows), adapter, start))
        first += num_rows
    return shares


def adapter_of_all(shares: Sequence[AdapterRows], num_rows: int) -> PlacedAdapter | None:
    """Return the adapter that all rows of a batch share, if it has no prompts; None if there is no such adapter."""
    if len(shares) != 1 or shares[0].rows != slice(0, num_rows) or shares[0].adapter.prompts:
        return None
    return shares[0].adapter


class Patches:
    """The hooks in one stack of blocks and its views. Only the compute thread uses them.

    A hook is made when the first adapter needs it, and stays. Without shares, hooks do nothing.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._hooked: set[ModulePlace] = set()  # the empty path stands for the block itself
        self._shares: Sequence[AdapterRows] = ()
        self._shape = (0, 0)  # rows and tokens of the batch

    @contextmanager
    def applied(self, shares: Sequence[AdapterRows], num_rows: int, num_tokens: int) -> Iterator[None]:
        """Apply these adapters to whatever runs inside the context, on a batch of this shape."""
        if not shares:
            yield
            return
        for share in shares:
            self._hook(share.adapter)
        self._shares, self._shape = shares, (num_rows, num_tokens)
        try:
            yield
        finally:
            self._shares = ()

    def _hook(self, adapter: PlacedAdapter) -> None:
        for block, path in adapter.low_rank.keys() - self._hooked:
            linear = self._stack.original(block).get_submodule(path)
            linear.register_forward_hook(partial(self._add_low_rank, (block, path)))
            self._hooked.add((block, path))
        for block in adapter.prompts:
            if (block, "") not in self._hooked:
                self._stack.original(block).register_forward_pre_hook(
                    partial(self._add_prompts, block), with_kwargs=True
                )
                self._hooked.add((block, ""))

    def _add_low_rank(
        self, place: ModulePlace, _linear: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        """Add low-rank products. x: [rows, tokens, in_features], or [rows * tokens, in_features]; output alike."""
        concerned = [
            (share, share.adapter.low_rank[place]) for share in self._shares if place in share.adapter.low_rank
        ]
        if not concerned:
            return None
        x, result = (_by_row(tensor, self._shape, place) for tensor in (inputs[0], output))
        added = [(share.rows, _low_rank(x[share.rows], part, share.dropout)) for share, part in concerned]
        return _with_added(result, added).view(output.shape)

    def _add_prompts(
        self, block: int, _block: nn.Module, inputs: tuple[Any, ...], others: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        hidden, added = inputs[0], []
        num_tokens = hidden.shape[1]
        for share in self._shares:
            values = share.adapter.prompts.get(block)
            if values is not None and share.start < len(values):
                values = values[share.start : share.start + num_tokens]
                added.append((share.rows, functional.pad(values, (0, 0, 0, num_tokens - len(values)))))
        return ((_with_added(hidden, added), *inputs[1:]), others) if added else None


def _low_rank(x: torch.Tensor, part: LowRank, dropout: Dropout | None) -> torch.Tensor:
    """Return scaling * dropped(x) @ a.T @ b.T in fp32, as PEFT computes it. x: [rows, tokens, in_features]."""
    x = x.to(part.a.dtype)
    if dropout is not None and part.dropout:
        x = x * dropout.factors(part.block, part.module, part.dropout, x)
    return functional.linear(functional.linear(x, part.a) * part.scaling, part.b)


def _with_added(batch: torch.Tensor, added: list[tuple[slice, torch.Tensor]]) -> torch.Tensor:
    """Return ``batch``, [rows, tokens, size], with something added to some of its rows, out of place."""
    if len(added) == 1 and added[0][0] == slice(0, len(batch)):
        return (batch + added[0][1]).to(batch.dtype)
    batch = batch.clone()
    for rows, more in added:
        batch[rows] += more
    return batch


def _by_row(tensor: torch.Tensor, shape: tuple[int, int], place: ModulePlace) -> torch.Tensor:
    if tensor.shape[:-1].numel() != shape[0] * shape[1]:
        raise RequestRejected(
            f"module {place[1]} of block {place[0]} does not see every position once: adapters cannot be used there"
        )
    return tensor.reshape(*shape, tensor.shape[-1])
