"""Decode steps as programs, one for every part of the span, number of new positions and layout of adapters."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from swarm_models.kernels.attention import Numbers, PagedRows
from swarm_models.kernels.int4_linear import KernelInt4Weight
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.program import Program
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_protocol.span import Span
from swarm_server.adapters.lora import AdapterRows, Patches, PlacedAdapter
from swarm_server.blocks.blocks import BlockStack
from swarm_server.graph.adapter_slots import AdapterSlot, AdapterSlots, StepCounts
from swarm_server.graph.assembling import Assembled, Linear
from swarm_server.graph.capturing import capture
from swarm_server.graph.recording import NotCapturable
from swarm_server.group.split_weight import SplitWeight
from swarm_server.kv.rows_attention import channel_numbers, hidden_before, paged_rows
from swarm_server.kv.rows_cache import BlockRuns

_MOST_PROGRAMS = 256  # programs that are kept; each takes some 100 KB, and a crowd's batches have any number of rows
_MOST_CAPTURES = 64  # captures that are kept: clients ask for any part of the span, and n blocks have n (n + 1) / 2
_MOST_POSITIONS = 256  # new positions: as many as in the largest batch of decoding steps
_ROWS = (2, 3, 5)  # rows of the captures: two predict the capture for any number, the third checks this
_BEYOND = (1000, 5000, 1003)  # positions of the captures, beyond the longest window

_logger = logging.getLogger(__name__)


class StepGraphs:
    """The programs of one stack and its views. Only the compute thread uses them.

    Attributes:
        refusal: why steps of the whole stack are not programs; None if they are.
    """

    description = "programs, which the kernel runs in one call"

    def __init__(self, stack: BlockStack, longest_window: int) -> None:
        self._stack = stack
        self._longest_window = longest_window
        self._patches = Patches(stack)
        self._slots = AdapterSlots(self._forget)
        self._counts = StepCounts()  # by part of the span
        self._captured: OrderedDict[tuple[Span, AdapterSlot | None], Linear | None] = OrderedDict()
        self._assembled: OrderedDict[tuple[Span, AdapterSlot | None, int], Assembled] = OrderedDict()
        self._memory = torch.empty(0)  # all programs compute in it, one at a time
        self.refusal = self._first_refusal()

    def run(
        self,
        blocks: Span,
        hidden: Sequence[torch.Tensor],
        positions: torch.Tensor,
        places: Sequence[BlockRuns],
        seen: Sequence[int],
        adapter: PlacedAdapter | None = None,
    ) -> torch.Tensor | None:
        """Compute the new positions of each row and store their keys and values; return None if no program can.

        A program has rows of one new position. Several new positions of one sequence are several such rows: each sees
        the positions before it, since all keys and values of a block are stored before any row attends.

        Args:
            hidden: the hidden states of each session, [rows, new, hidden_size].
            positions: the position ids, [rows, new].
            seen: how many of its last positions each row attends to at most, new positions included.
            adapter: the adapter that is added to the blocks, without prompts.

        Returns:
            The output of the last block, [rows, new, hidden_size].
        """
        num_rows, num_new = positions.shape
        if self.refusal is not None or not 0 < num_rows * num_new <= _MOST_POSITIONS or min(seen) < num_new:
            return None
        slot = None if adapter is None else self._slots.slot_of(adapter)
        # Without a slot for its adapter, or while the slot has another adapter, the blocks' own code computes the step.
        linear = None if slot is None and adapter is not None else self._linear(blocks, slot)
        if linear is None or (slot is not None and adapter is not None and not slot.holds(adapter)):
            return None
        assembled = self._program(blocks, slot, linear, num_rows * num_new)
        flat = [rows.numpy().reshape(-1, 1, rows.shape[2]) for rows in hidden]
        np.concatenate(flat, out=assembled.hidden)
        assembled.positions[:] = positions.numpy().reshape(-1, 1)
        attending, keep = _places(places, linear.windows, seen, num_new)
        done = assembled.program.run(attending)
        del keep
        return torch.from_numpy(assembled.output.reshape(num_rows, num_new, -1).copy()) if done else None

    def _first_refusal(self) -> str | None:
        if not Program.is_available():
            return "the kernel is not compiled here"
        weights = [module.quantized for module in self._stack.modules() if isinstance(module, QuantizedLinear)]
        if not weights or not all(
            isinstance(weight, KernelWeight | KernelInt4Weight | SplitWeight) for weight in weights
        ):
            return "products are not the kernel's"
        if not self._stack.family.takes_positions:
            return "the family has positions of its own"
        try:
            self._captured[self._stack.span, None] = self._capture(self._stack, None)
        except NotCapturable as error:
            return str(error)
        return None

    def _linear(self, blocks: Span, slot: AdapterSlot | None) -> Linear | None:
        key = blocks, slot
        if key not in self._captured:
            if len(self._captured) >= _MOST_CAPTURES:
                # Else clients that take turns with more parts would have each of their steps captured.
                if not self._counts.has_paid(blocks):
                    return None
                self._drop(next(iter(self._captured)))  # it was used longest ago
            try:
                self._captured[key] = self._capture(self._stack.view(blocks), slot)
            except NotCapturable as error:
                kind = "" if slot is None else " with an adapter"
                _logger.info("decode steps of blocks %s%s are not programs: %s", blocks, kind, error)
                self._captured[key] = None
        self._captured.move_to_end(key)
        return self._captured[key]

    def _capture(self, stack: BlockStack, slot: AdapterSlot | None) -> Linear:
        captures = []
        with torch.inference_mode(False):
            for num_rows, beyond in zip(_ROWS, _BEYOND, strict=True):
                shares = [] if slot is None else [AdapterRows(slice(0, num_rows), slot.adapter)]
                with self._patches.applied(shares, num_rows, 1):
                    captures.append(capture(stack, num_rows, self._longest_window + beyond))
        linear = Linear(*captures[:2])
        if not linear.matches(captures[2]):
            raise NotCapturable("what is computed depends on how many positions there are")
        return linear

    def _forget(self, slot: AdapterSlot) -> None:
        for key in [key for key in self._captured if key[1] is slot]:
            self._drop(key)

    def _drop(self, key: tuple[Span, AdapterSlot | None]) -> None:
        """Forget a capture and its programs. If it is needed again, it is made again."""
        del self._captured[key]
        for place in [place for place in self._assembled if place[:2] == key]:
            del self._assembled[place]

    def _program(self, blocks: Span, slot: AdapterSlot | None, linear: Linear, num_rows: int) -> Assembled:
        key = blocks, slot, num_rows
        if key not in self._assembled:
            with torch.inference_mode(False):
                self._assembled[key] = linear.assembled(num_rows, self._room)
            if len(self._assembled) > _MOST_PROGRAMS:
                self._assembled.popitem(last=False)
        self._assembled.move_to_end(key)
        return self._assembled[key]

    def _room(self, num_floats: int) -> torch.Tensor:
        if num_floats > len(self._memory):
            self._assembled.clear()  # they would keep the old memory alive
            self._memory = torch.zeros(num_floats)
        return self._memory


def _places(
    blocks: Sequence[BlockRuns], windows: Mapping[int, int | None], seen: Sequence[int], num_new: int
) -> tuple[np.ndarray, list[object]]:
    """Return for each block what ``Program.run`` takes, and the objects that must live until the program has run."""
    rows: dict[tuple[int, int | None], PagedRows] = {}
    keep: list[object] = []
    words = np.zeros((len(blocks), 4), dtype=np.int64)
    for number, window in windows.items():
        block = blocks[number]
        key = id(block.runs), window
        if key not in rows:
            rows[key] = paged_rows(block.runs, hidden_before(block.runs, window, seen, num_new), num_new)
        numbers: tuple[Numbers, Numbers] = channel_numbers(block.keys), channel_numbers(block.values)
        keep.append(numbers)
        words[number] = rows[key].address, rows[key].firsts, numbers[0].address, numbers[1].address
    keep.append(rows)
    return words, keep
