"""Replicas are sent while experts come and go, and what cannot be a replica is refused, whatever it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.core.replica import Replica
from swarm_training.experts.replicas.replication import Replication, _load
from tests.worlds.experts import holder
from tests.worlds.virtual_time import at_once

CELLS = [(0, 0), (0, 1), (1, 1)]


class Trained:
    """As little of an expert as is sent."""

    num_steps, most_bytes = 3, 1 << 20

    def versioned_state(self) -> tuple[int, dict[str, torch.Tensor]]:
        return self.num_steps, {"weight": torch.ones(2)}

    def load(self, tensors: dict[str, torch.Tensor], num_steps: int) -> None:
        for tensor in tensors.values():
            torch.isfinite(tensor)


class Board:
    async def keepers(self) -> list[Any]:
        return [holder("keeper")]


class Calls:
    """``on_send``: what happens meanwhile."""

    def __init__(self, on_send: Callable[[], object]) -> None:
        self.sent: list[tuple[int, ...]] = []
        self._on_send = on_send

    async def send(self, _keeper: Any, replica: Replica, _data: bytes) -> None:
        self.sent.append(replica.cell)
        self._on_send()


def test_experts_may_come_and_go_while_replicas_are_sent() -> None:
    experts: dict[tuple[int, ...], Any] = {cell: Trained() for cell in CELLS}

    def change() -> None:
        experts[7, len(calls.sent)] = Trained()
        experts.pop(CELLS[0], None)

    calls: Any = Calls(change)
    config = ExpertServerConfig("demo", 8, (8, 8), replicas=1)
    replication = Replication(config, holder("own"), Board(), calls, None, at_once)  # type: ignore[arg-type]
    asyncio.run(replication.send(experts))
    assert calls.sent == CELLS


@pytest.mark.parametrize("dtype", ["F8_E8M0", "F8_E4M3", "no such type"])
def test_numbers_that_torch_cannot_use_are_no_replica(dtype: str) -> None:
    header = json.dumps({"weight": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(2)
    with pytest.raises(ValueError, match=r"it is no (file of tensors|state of an expert)"):
        _load(Trained(), Replica.of(CELLS[0], 3, data), data)  # type: ignore[arg-type]
