"""Slots for adapters: only layouts that are used often have one, and values are rarely copied."""

from __future__ import annotations

import pytest
import torch

from swarm_protocol.wire.adapters import Adapter, LowRank
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.graph import adapter_slots
from swarm_server.graph.adapter_slots import STEPS_TO_PAY, AdapterSlot, AdapterSlots

IN, OUT = 32, 16
BYTES = 16 * (IN + OUT) * 4  # of a slot for any rank up to 16


def placed(rank: int, seed: int = 0) -> PlacedAdapter:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, IN, generator=generator), torch.randn(OUT, rank, generator=generator)
    return PlacedAdapter.of(bytes([rank, seed]), Adapter(b"", (LowRank(0, "linear", 0.5, a, b),)))


def test_layouts_in_turn_have_no_slot_before_it_pays_and_few_afterwards() -> None:
    dropped: list[AdapterSlot] = []
    slots, adapters = AdapterSlots(dropped.append), [placed(rank) for rank in range(1, 6)]
    for _ in range(STEPS_TO_PAY - 1):
        assert [slots.slot_of(adapter) for adapter in adapters] == [None] * 5
    first, *_ = (slots.slot_of(adapter) for adapter in adapters)
    assert first is not None
    for _ in range(STEPS_TO_PAY - 1):
        assert slots.slot_of(adapters[0]) is not first
    assert dropped == [first]


def test_all_slots_have_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[AdapterSlot] = []
    slots, large = AdapterSlots(dropped.append), placed(33)
    monkeypatch.setattr(adapter_slots, "_MOST_BYTES", 2 * BYTES)
    found = [[slots.slot_of(adapter) for _ in range(STEPS_TO_PAY)][-1] for adapter in (*map(placed, (1, 2, 3)), large)]
    assert found[3] is None and None not in found[:3]
    assert dropped == found[:1]
    assert found[0] is not None and found[0].size_bytes == BYTES
    assert sum(tensor.nbytes for tensor in found[0].adapter.adapter.tensors) == BYTES


def test_a_slot_takes_another_adapter_that_comes_twice_in_a_row() -> None:
    one, other = placed(3, 1), placed(3, 2)
    slot = AdapterSlot(one)
    assert [slot.holds(each) for each in (one, other, one, other, other, one)] == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]
