"""Capture of what blocks do with one new position of each row, by running them once on made-up hidden states."""

from __future__ import annotations

from dataclasses import replace

import torch

from swarm_models.kernels.quantized_linear import QuantizedLinear, QuantizedWeight, swapped_weights
from swarm_server.blocks.blocks import BlockStack
from swarm_server.graph.assembling import Captured
from swarm_server.graph.lowering import StridedAddress, lowered
from swarm_server.graph.recording import OperationRecorder, TensorView, needed
from swarm_server.graph.stand_in import StandInCache
from swarm_server.kv.rows_cache import attention_in_place


def capture(stack: BlockStack, num_rows: int, length: int) -> Captured:
    """Return what the stack does with rows that all have ``length`` positions, the new one included.

    Raises:
        NotCapturable: the stack does something for which there are no instructions.
    """
    recorder = OperationRecorder()
    cache = _RecordingCache(stack.num_blocks, length, recorder)
    hidden = torch.zeros(num_rows, 1, stack.hidden_size, dtype=stack.dtype)
    positions = torch.full((num_rows, 1), length - 1)
    places = [_place(recorder.mark(hidden)), _place(recorder.mark(positions))]
    layers = [module for module in stack.modules() if isinstance(module, QuantizedLinear)]
    products = swapped_weights(layers, lambda weight: _RecordedWeight(weight, recorder))
    with torch.no_grad(), attention_in_place(cache, stack.configs), products, recorder:
        output = recorder.view(stack(hidden, None, positions, cache).contiguous())
    operations = needed(recorder.operations, output)
    places.append(_place(output))
    memories = {view.memory for operation in operations for view in (operation.output, *operation.inputs)}
    memories |= {place.memory for place in places}
    variable = sorted((memory for memory in memories if memory.constant is None), key=lambda memory: memory.number)
    # Only needed ones have a number: unneeded ones may differ between captures.
    numbered = {memory: replace(memory, number=number) for number, memory in enumerate(variable)}

    def renumbered(place: StridedAddress) -> StridedAddress:
        return replace(place, memory=numbered.get(place.memory, place.memory))

    code = tuple(
        replace(instruction, places=tuple(None if place is None else renumbered(place) for place in instruction.places))
        for operation in operations
        for instruction in lowered(operation)
    )
    by_number = {memory.number: memory for memory in numbered.values()}
    first, at, last = map(renumbered, places)
    return Captured(num_rows, code, by_number, first, at, last, cache.windows)


def _place(view: TensorView) -> StridedAddress:
    return StridedAddress(view.memory, view.offset, view.strides)


class _RecordingCache(StandInCache):
    """A cache that reports attention to the recorder."""

    def __init__(self, num_blocks: int, length: int, recorder: OperationRecorder) -> None:
        super().__init__(num_blocks, length)
        self._recorder = recorder

    def attended(
        self, block: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        # The instruction has no strides within a head.
        query, keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, keys, values))
        output = torch.empty(len(query), 1, query.shape[1], values.shape[3])
        self._recorder.add("attend", output, query, keys, values, block=block, scaling=scaling)
        return output


class _RecordedWeight(QuantizedWeight):
    """A weight that reports its products to the recorder, and does not compute them."""

    def __init__(self, weight: QuantizedWeight, recorder: OperationRecorder) -> None:
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
