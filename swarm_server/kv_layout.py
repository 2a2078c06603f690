"""What blocks keep of each position: found out by caching one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarm_protocol.span import Span
from swarm_server.blocks import BlockStack
from swarm_server.kv_rows import Channel, Group, Layout, Place


@dataclass(frozen=True)
class BlockFacts:
    """Keys and values of one block; ``window``: how many positions its attention looks at, None for all."""

    keys: Channel
    values: Channel
    window: int | None


@dataclass(frozen=True)
class StackLayout:
    """What each hosted block stores."""

    hosted: Span
    blocks: tuple[BlockFacts, ...]
    outputs: Channel

    @classmethod
    def probe(cls, stack: BlockStack) -> StackLayout:
        cache = stack.new_cache()
        with torch.inference_mode():
            hidden = torch.zeros(1, 1, stack.hidden_size, dtype=stack.dtype, device=stack.device)
            stack(hidden, None, torch.zeros(1, 1, dtype=torch.long, device=stack.device), cache)
        facts = tuple(
            BlockFacts(_channel(layer.keys), _channel(layer.values), getattr(layer, "sliding_window", None))
            for layer in cache.layers
        )
        return cls(stack.span, facts, Channel(1, stack.hidden_size, stack.dtype))

    @property
    def token_bytes(self) -> int:
        """What one position takes in all hosted blocks, with the outputs."""
        return self.part(self.hosted, keeps_outputs=True).size_bytes(1)

    def part(self, span: Span, keeps_outputs: bool, windows: bool = True) -> Layout:
        """What a session over ``span`` stores. Without ``windows``, every block keeps all positions."""
        facts = self.blocks[span.start - self.hosted.start : span.end - self.hosted.start]
        channels: dict[int | None, list[Channel]] = {}
        numbers: dict[int | None, int] = {}
        places = []
        for block in facts:
            window = block.window if windows else None
            group = numbers.setdefault(window, len(numbers))
            start = len(channels.setdefault(window, []))
            channels[window] += [block.keys, block.values]
            places.append(Place(group, start, start + 1))
        outputs_group = None
        if keeps_outputs:
            outputs_group = numbers.setdefault(None, len(numbers))
            channels.setdefault(None, []).append(self.outputs)
        groups = tuple(Group(tuple(channels[window]), window) for window in numbers)
        return Layout(groups, tuple(places), outputs_group)


def _channel(tensor: torch.Tensor) -> Channel:
    """tensor: [1, heads, 1, width]."""
    return Channel(tensor.shape[1], tensor.shape[3], tensor.dtype)
