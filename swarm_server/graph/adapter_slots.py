"""Slots for adapters in programs. A program names a slot's tensors, into which the values of an adapter are copied."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch.nn import functional

from swarm_protocol.wire.adapters import Adapter, LowRank
from swarm_protocol.wire.constants import MIB
from swarm_server.adapters.lora import AdapterLayout, PlacedAdapter

_MOST_SLOTS = 4  # layouts of adapters that have programs at a time
_MOST_BYTES = 512 * MIB  # of all slots together
_MOST_COUNTED = 64  # layouts without a slot, or parts of the span without programs, whose steps are counted
_COLUMNS = 16  # a product is computed in groups of so many columns, and slowly for the columns that are left
STEPS_TO_PAY = 8  # steps of one kind after which programs, and a slot if they need one, have paid for their making


class StepCounts:
    """The numbers of steps of kinds that have no programs yet, for the kinds that came last."""

    def __init__(self) -> None:
        self._num_steps: OrderedDict[Hashable, int] = OrderedDict()

    def has_paid(self, kind: Hashable) -> bool:
        """Count a step of this kind. Return whether enough have come for programs to pay, and begin again if so."""
        num_steps = self._num_steps.pop(kind, 0) + 1
        if num_steps >= STEPS_TO_PAY:
            return True
        self._num_steps[kind] = num_steps
        if len(self._num_steps) > _MOST_COUNTED:
            self._num_steps.popitem(last=False)
        return False


class AdapterSlot:
    """The tensors of one layout of adapters, which hold the values of one adapter at a time.

    Their ranks are filled up with zeros to a multiple of 16, which changes no sum.

    Attributes:
        adapter: an adapter with the slot's tensors.
    """

    def __init__(self, adapter: PlacedAdapter) -> None:
        """Create a slot that holds this adapter."""
        with torch.inference_mode(False):
            parts = tuple(_filled_up(part) for part in adapter.adapter.low_rank)
            self.adapter = PlacedAdapter.of(b"", Adapter(b"", parts))
        self.size_bytes = _padded_bytes(adapter)
        self._key = self._asked = adapter.key  # of the adapter in the slot, and of the one that was asked for last

    def holds(self, adapter: PlacedAdapter) -> bool:
        """Return whether the slot holds the adapter, whose layout must be the slot's.

        An adapter that is asked for twice in a row takes the place of the one before. If adapters alternate, copying
        each would take longer than what a program saves.
        """
        if adapter.key != self._key and adapter.key == self._asked:
            for slot, part in zip(self.adapter.adapter.low_rank, adapter.adapter.low_rank, strict=True):
                slot.a[: len(part.a)].copy_(part.a)
                slot.b[:, : len(part.a)].copy_(part.b)
            self._key = adapter.key
        self._asked = adapter.key
        return adapter.key == self._key


class AdapterSlots:
    """The slots of the layouts that were used last."""

    def __init__(self, forget: Callable[[AdapterSlot], None]) -> None:
        """Create no slots yet. ``forget`` is called with each slot that is dropped, and must drop its programs."""
        self._slots: OrderedDict[AdapterLayout, AdapterSlot] = OrderedDict()
        self._counts = StepCounts()  # of layouts that have no slot
        self._forget = forget

    def slot_of(self, adapter: PlacedAdapter) -> AdapterSlot | None:
        """Return the slot for the adapter's layout; None if such adapters are too large or too rare."""
        slot = self._slots.get(adapter.layout) or self._new_slot(adapter)
        if slot is not None:
            self._slots.move_to_end(adapter.layout)
        return slot

    def _new_slot(self, adapter: PlacedAdapter) -> AdapterSlot | None:
        size_bytes = _padded_bytes(adapter)
        if size_bytes > _MOST_BYTES or not self._counts.has_paid(adapter.layout):
            return None
        while len(self._slots) == _MOST_SLOTS or self._used_bytes + size_bytes > _MOST_BYTES:
            self._forget(self._slots.popitem(last=False)[1])
        slot = self._slots[adapter.layout] = AdapterSlot(adapter)
        return slot

    @property
    def _used_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self._slots.values())


def _padded_bytes(adapter: PlacedAdapter) -> int:
    """Return how many bytes a slot for this adapter takes."""
    return sum(
        (len(part.a) + _num_missing(part)) * (part.a.shape[1] + len(part.b)) * part.a.itemsize
        for part in adapter.adapter.low_rank
    )


def _num_missing(part: LowRank) -> int:
    return -len(part.a) % _COLUMNS


def _filled_up(part: LowRank) -> LowRank:
    """Return a copy with a multiple of 16 as its rank, and transposes that ``Opcode.MATRIX_PRODUCT`` takes."""
    a = functional.pad(part.a.t(), (0, _num_missing(part))).clone(memory_format=torch.contiguous_format)
    b = functional.pad(part.b.t(), (0, 0, 0, _num_missing(part))).clone(memory_format=torch.contiguous_format)
    return replace(part, a=a.t(), b=b.t())
