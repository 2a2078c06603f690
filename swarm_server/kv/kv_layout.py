"""Layout of what blocks store for each position, found by running one position with a cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionAndFullAttentionLayer

from swarm_protocol.span import Span
from swarm_server.blocks.blocks import BlockStack
from swarm_server.blocks.split_stack import Stack
from swarm_server.kv.kv_rows import Channel, ChannelPlace, KvGroup, PageLayout
from swarm_server.kv.row_states import Slot
from swarm_server.kv.rows_cache import StatesCache

_MAX_STATES = 8  # states of one kind in one block


@dataclass(frozen=True)
class BlockFacts:
    """The channels and states that one block stores.

    Attributes:
        keys, values: the channels of the keys and values; None for blocks without them.
        window: how many positions the block's attention looks at; None for all.
        slots: the recurrent and convolution states that the block stores besides.
        index: keys with which an index chooses the positions to attend to, [1 head, width]; None without an index.
    """

    keys: Channel | None
    values: Channel | None
    window: int | None
    slots: tuple[Slot, ...] = ()
    index: Channel | None = None


@dataclass(frozen=True)
class StackLayout:
    """The layout of what each hosted block stores, and of its outputs."""

    hosted: Span
    blocks: tuple[BlockFacts, ...]
    outputs: tuple[Channel, ...]

    @classmethod
    def probe(cls, stack: Stack, in_int8: bool = False) -> StackLayout:
        """Return the layout of what the blocks of ``stack`` store. ``in_int8``: keys and values are stored in int8."""
        facts = tuple(facts for part in stack.views(stack.span) for facts in _probed(part, in_int8))
        outputs = tuple(Channel(1, stack.hidden_size, stack.dtype, stack.device_of(block)) for block in stack.span)
        return cls(stack.span, facts, outputs)

    @property
    def token_bytes(self) -> int:
        """Return the bytes that one position takes in all hosted blocks, with the outputs of the last one."""
        return sum(group.token_bytes for group in self.part(self.hosted, keeps_outputs=True).groups)

    def token_bytes_by_device(self) -> dict[torch.device, int]:
        """Return the bytes that one position takes in the blocks of each device."""
        result: dict[torch.device, int] = {}
        for group in self.part(self.hosted, keeps_outputs=True).groups:
            for channel in group.channels:
                result[channel.device] = result.get(channel.device, 0) + channel.token_bytes
        return result

    @property
    def has_states(self) -> bool:
        """Return whether some blocks store recurrent or convolution states."""
        return any(block.slots for block in self.blocks)

    @property
    def has_index(self) -> bool:
        """Return whether some blocks choose the positions that they attend to."""
        return any(block.index for block in self.blocks)

    @property
    def in_int8(self) -> bool:
        """Return whether keys and values are stored in int8."""
        return any(block.keys is not None and block.keys.in_int8 for block in self.blocks)

    def part(self, span: Span, keeps_outputs: bool, windows: bool = True) -> PageLayout:
        """Return the layout of a session over ``span``. Without ``windows``, every block keeps all positions."""
        facts = self.blocks[span.start - self.hosted.start : span.end - self.hosted.start]
        channels: dict[int | None, list[Channel]] = {}
        numbers: dict[int | None, int] = {}
        places: list[ChannelPlace | None] = []
        for block in facts:
            if block.keys is None or block.values is None:
                places.append(None)
                continue
            window = block.window if windows else None
            group = numbers.setdefault(window, len(numbers))
            start = len(channels.setdefault(window, []))
            stored = [channel for channel in (block.keys, block.values, block.index) if channel is not None]
            channels[window] += stored
            places.append(ChannelPlace(group, start, start + 1, start + 2 if block.index is not None else None))
        outputs_group = None
        if keeps_outputs:
            outputs_group = numbers.setdefault(None, len(numbers))
            channels.setdefault(None, []).append(self.outputs[span.end - 1 - self.hosted.start])
        groups = tuple(KvGroup(tuple(channels[window]), window) for window in numbers)
        slots = tuple(block.slots for block in facts)
        return PageLayout(groups, tuple(places), outputs_group, slots if any(slots) else ())


class _TakesAll(StatesCache):
    """A cache that stores everything that blocks write for one position."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [LinearAttentionAndFullAttentionLayer(_MAX_STATES) for _ in range(num_blocks)]
        super().__init__([*self.blocks])
        self.index_keys: dict[int, torch.Tensor] = {}  # by block

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self.index_keys[layer_idx] = keys
        return keys


def _probed(stack: BlockStack, in_int8: bool) -> list[BlockFacts]:
    """Run one position of zeros through the blocks, and return what each has stored."""
    cache = _TakesAll(len(stack.span))
    with torch.inference_mode():
        hidden = torch.zeros(1, 1, stack.hidden_size, dtype=stack.dtype, device=stack.device)
        stack(hidden, None, torch.zeros(1, 1, dtype=torch.long, device=stack.device), cache)
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=stack.config).layers]
    return [_facts(cache, block, window, in_int8) for block, window in enumerate(windows)]


def _facts(cache: _TakesAll, block: int, window: int | None, in_int8: bool) -> BlockFacts:
    layer, index_keys = cache.blocks[block], cache.index_keys.get(block)
    slots = [
        Slot(is_convolution, index, tuple(state.shape[1:]), state.dtype, state.device)
        for is_convolution, states in ((True, layer.conv_states), (False, layer.recurrent_states))
        for index, state in states.items()
        if state is not None
    ]
    if layer.keys is None or layer.values is None:
        return BlockFacts(None, None, None, tuple(slots))
    index = None if index_keys is None else _channel(index_keys[:, None])
    keys, values = _channel(layer.keys, in_int8), _channel(layer.values, in_int8)
    return BlockFacts(keys, values, window, tuple(slots), index)


def _channel(tensor: torch.Tensor, in_int8: bool = False) -> Channel:
    """Return the channel that stores tensors like ``tensor``, [1, heads, 1, width]."""
    return Channel(tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device, in_int8)
