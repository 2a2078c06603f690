"""Runs blocks once, on made-up hidden states, to write down what they do with one new position of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from swarm_protocol.kernels.quantized_linear import QuantizedLinear, QuantizedWeight
from swarm_server.blocks.blocks import BlockStack
from swarm_server.graph.assembling import Captured
from swarm_server.graph.lowering import Place, lowered
from swarm_server.graph.recording import NotCapturable, Recorder, View, needed
from swarm_server.kv.rows_attention import is_plain_sdpa
from swarm_server.kv.rows_cache import RowsCache, attention_in_place


def capture(stack: BlockStack, num_rows: int, length: int) -> Captured:
    """What the stack does with rows that all have ``length`` positions, the new one included.

    Raises:
        NotCapturable: there are no instructions for something that it does.
    """
    recorder = Recorder()
    cache = _RecordingCache(stack.num_blocks, length, recorder)
    hidden = torch.zeros(num_rows, 1, stack.hidden_size, dtype=stack.dtype)
    positions = torch.full((num_rows, 1), length - 1)
    places = _place(recorder.mark(hidden)), _place(recorder.mark(positions))
    with torch.no_grad(), attention_in_place(cache, stack.configs), _recorded_products(stack, recorder), recorder:
        output = recorder.view(stack(hidden, None, positions, cache).contiguous())
    operations = needed(recorder.operations, output)
    views = [view for operation in operations for view in (operation.output, *operation.inputs)]
    memories = {view.memory.number: view.memory for view in views if view.memory.constant is None}
    for place in (*places, _place(output)):
        memories[place.memory.number] = place.memory
    numbers = {number: i for i, number in enumerate(sorted(memories))}
    for memory in memories.values():  # what is not needed is not counted, as it may differ from capture to capture
        memory.number = numbers[memory.number]
    code = tuple(instruction for operation in operations for instruction in lowered(operation))
    by_number = {memory.number: memory for memory in memories.values()}
    return Captured(num_rows, code, by_number, *places, _place(output), cache.windows)


def _place(view: View) -> Place:
    return Place(view.memory, view.offset, view.strides)


class _RecordingCache(RowsCache):
    """Stands for rows of one length; nothing is stored.

    Attributes:
        windows: of each block so far, how many of the last positions it looks at; None: all.
    """

    def __init__(self, num_blocks: int, length: int, recorder: Recorder) -> None:
        super().__init__([], length, 1, in_place=True)
        self._num_blocks = num_blocks
        self._recorder = recorder
        self._newest: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self.windows: dict[int, int | None] = {}

    def update(  # type: ignore[override]  # as in RowsCache
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._newest = layer_idx, keys, values
        return keys, values

    def attend(
        self,
        attention: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        piecewise: bool,
        **options: Any,
    ) -> torch.Tensor:
        if not piecewise or not is_plain_sdpa(options):
            raise NotCapturable("attention is more than scaled dot products")
        assert self._newest is not None, "attention without keys and values"
        block, keys, values = self._newest
        if block in self.windows:
            raise NotCapturable("a block attends twice")
        self.windows[block] = None if mask is None else _window(mask)
        query, keys, values = (_with_rows_of_floats(tensor) for tensor in (query, keys, values))
        output = torch.empty(len(query), 1, query.shape[1], values.shape[3])
        scaling = options.get("scaling")
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        self._recorder.add("attend", output, query, keys, values, block=block, scaling=float(scaling))
        return output

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self._num_blocks

    is_linear = is_dummy = is_sliding

    def __len__(self) -> int:
        return self._num_blocks


def _with_rows_of_floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _window(mask: torch.Tensor) -> int | None:
    """How many of the last positions a mask [rows, 1, 1, length] lets through, the same for all rows; None: all."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    length = seen.shape[-1]
    count = int(seen[0].sum())
    if not bool(seen[..., length - count :].all()) or int(seen.sum()) != count * len(seen):
        raise NotCapturable("attention leaves out positions in between")
    return None if count == length else count


@contextmanager
def _recorded_products(stack: BlockStack, recorder: Recorder) -> Iterator[None]:
    """Quantised layers only tell the recorder of their product meanwhile."""
    layers = [module for module in stack.modules() if isinstance(module, QuantizedLinear)]
    weights = [layer.quantized for layer in layers]
    try:
        for layer in layers:
            layer.quantized = _RecordedWeight(layer.quantized, recorder)
        yield
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer.quantized = weight


class _RecordedWeight(QuantizedWeight):
    def __init__(self, weight: QuantizedWeight, recorder: Recorder) -> None:
        self._weight, self._recorder = weight, recorder
        self.shape = weight.shape

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        product = torch.empty(len(x), self.shape[0], dtype=torch.float32)
        self._recorder.add("product", product, x, weight=self._weight)
        return product

    def matmul_grad(self, grad: torch.Tensor) -> torch.Tensor:
        return self._weight.matmul_grad(grad)

    def dequantize(self) -> torch.Tensor:
        return self._weight.dequantize()
