"""Slots for adapters in programs. A program names a slot's tensors, into which the values of an adapter are copied."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from swarm_server.adapters.lora import AdapterLayout, PlacedAdapter

_MOST_SLOTS = 4  # layouts of adapters that have programs at a time
STEPS_TO_PAY = 8  # steps with adapters of one layout after which programs are worth their making: about 0.1 s


class AdapterSlot:
    """The tensors of one layout of adapters, which hold the values of one adapter at a time.

    Attributes:
        adapter: an adapter with the slot's tensors.
        num_steps: how many steps have asked for the slot.
    """

    def __init__(self, adapter: PlacedAdapter) -> None:
        with torch.inference_mode(False):
            self.adapter = PlacedAdapter.of(b"", adapter.adapter.mapped(_with_contiguous_columns))
        self.num_steps = 0
        self._key = adapter.key

    def place(self, adapter: PlacedAdapter) -> None:
        """Copy the adapter's values into the slot, unless they are there. Its layout must be the slot's."""
        if adapter.key != self._key:
            for tensor, values in zip(self.adapter.adapter.tensors, adapter.adapter.tensors, strict=True):
                tensor.copy_(values)
            self._key = adapter.key


class AdapterSlots:
    """The slots of the layouts that were used last."""

    def __init__(self, forget: Callable[[AdapterSlot], None]) -> None:
        """Create no slots yet. ``forget`` is called with each slot that is dropped: its programs are of no use."""
        self._slots: OrderedDict[AdapterLayout, AdapterSlot] = OrderedDict()
        self._forget = forget

    def slot_of(self, adapter: PlacedAdapter) -> AdapterSlot | None:
        """Return a slot that holds the adapter; None if adapters of its layout are not used often enough yet."""
        slot = self._slots.get(adapter.layout)
        if slot is None:
            if len(self._slots) == _MOST_SLOTS:
                self._forget(self._slots.popitem(last=False)[1])
            slot = self._slots[adapter.layout] = AdapterSlot(adapter)
        self._slots.move_to_end(adapter.layout)
        slot.num_steps += 1
        if slot.num_steps < STEPS_TO_PAY:
            return None
        slot.place(adapter)
        return slot


def _with_contiguous_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Return a copy whose transpose is contiguous, as ``Opcode.MATRIX_PRODUCT`` takes it."""
    return matrix.t().clone(memory_format=torch.contiguous_format).t()
