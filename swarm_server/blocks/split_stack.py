"""Consecutive blocks on several devices: one stack for each device, computed one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from swarm_protocol.span import Span
from swarm_server.blocks.blocks import BlockStack


class SplitStack:
    """A stack of blocks on several devices, which replaces a ``BlockStack`` except where one device is needed.

    Attributes:
        parts: the stack of each device; together the stacks are the span.
    """

    def __init__(self, parts: Sequence[BlockStack]) -> None:
        self.parts = tuple(parts)
        self.span = Span(parts[0].span.start, parts[-1].span.end)
        assert all(part.span.end == after.span.start for part, after in itertools.pairwise(parts))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Return the blocks before which hidden states go to another device."""
        return tuple(part.span.start for part in self.parts[1:])

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(part.device for part in self.parts)

    @property
    def hidden_size(self) -> int:
        return self.parts[0].hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the hidden states that go in and come out."""
        return self.parts[0].dtype

    @property
    def row_independent(self) -> bool:
        return all(part.row_independent for part in self.parts)

    def view(self, span: Span) -> BlockStack:
        """Return the stack of the blocks of ``span``, which must all be on one device.

        Raises:
            ValueError: the blocks are on several devices, or are not all hosted.
        """
        for part in self.parts:
            if part.span.covers(span):
                return part.view(span)
        parts = " and ".join(str(part.span) for part in self.parts)
        raise ValueError(f"blocks {span} are not all on one device: the devices have {parts}")

    def views(self, span: Span) -> list[BlockStack]:
        """Return the stacks of the blocks of ``span``, one for each device that holds some of these blocks."""
        if not self.span.covers(span):
            raise ValueError(f"blocks {span} are not all among the hosted blocks {self.span}")
        bounds = [span.start, *(cut for cut in self.cuts if span.start < cut < span.end), span.end]
        return [self.view(Span(start, end)) for start, end in itertools.pairwise(bounds)]

    def device_of(self, index: int) -> torch.device:
        return self._part(index).device

    def original(self, index: int) -> nn.Module:
        """Return the original of a block, see ``BlockStack.original``."""
        return self._part(index).original(index)

    def modules(self) -> Iterator[nn.Module]:
        for part in self.parts:
            yield from part.modules()

    def weight_addresses(self) -> set[int]:
        return set().union(*(part.weight_addresses() for part in self.parts))

    def _part(self, index: int) -> BlockStack:
        return next(part for part in self.parts if index in part.span)


Stack = BlockStack | SplitStack
