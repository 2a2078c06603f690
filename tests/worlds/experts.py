"""Experts without a network: a directory in memory, and calls that go straight to modules."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from swarm_protocol.errors import PeerMoved, PeerUnavailable
from swarm_training.experts.core.cells import Cell, Prefix
from swarm_training.experts.core.expert import Expert
from swarm_training.experts.directory.board import Holders
from swarm_training.experts.directory.records import ExpertHolder


def holder(name: str) -> ExpertHolder:
    return ExpertHolder(name, f"{name}:1", b"\0" * 32)


class MemoryBoard:
    """The DHT of one mixture.

    Attributes:
        reads: prefixes that were asked for, in order.
    """

    def __init__(self) -> None:
        self.records: dict[Prefix, dict[ExpertHolder, set[int]]] = {}
        self.reads: list[Prefix] = []
        self.is_down = False

    async def read(self, prefixes: Iterable[Prefix]) -> dict[Prefix, Holders]:
        if self.is_down:
            raise PeerUnavailable("the DHT has not answered in time")
        found: dict[Prefix, Holders] = {}
        for prefix in prefixes:
            self.reads.append(prefix)
            found[prefix] = {}
            for each, following in sorted(self.records.get(prefix, {}).items()):
                for at in following:
                    found[prefix].setdefault(at, []).append(each)
        return found

    async def publish(self, own: ExpertHolder, following: Mapping[Prefix, Iterable[int]], lifetime_s: float) -> bool:
        for prefix, after in following.items():
            self.records.setdefault(prefix, {})[own] = set(after)
        return True


class LocalNetwork:
    """Stands for a client, and for servers: ``experts`` by the name of the server and the cell.

    Attributes:
        down: servers that refuse connections.
        silent: experts, or servers, that never answer; ``silent_backward`` only in backward passes.
        asked: how often each expert was called.
        batches: the number of rows of each call.
        unanswered: what each call waits for that a silent expert or server does not answer.
    """

    def __init__(self, servers: Mapping[str, Mapping[Cell, Expert]]) -> None:
        self.experts = {(name, cell): expert for name, own in servers.items() for cell, expert in own.items()}
        self.memory = MemoryBoard()
        self.down: set[str] = set()
        self.silent: set[Any] = set()
        self.silent_backward: set[Any] = set()
        self.asked: Counter[tuple[str, Cell]] = Counter()
        self.batches: list[int] = []
        self.unanswered: set[asyncio.Event] = set()
        self.announce()

    def announce(self) -> None:
        self.memory.records.clear()
        for name, cell in self.experts:
            for length in range(min(1, len(cell) - 1), len(cell)):
                record = self.memory.records.setdefault(cell[:length], {})
                record.setdefault(holder(name), set()).add(cell[length])

    @property
    def calls(self) -> LocalNetwork:
        return self

    def board(self, name: str, grid: Sequence[int], hidden: int) -> MemoryBoard:
        return self.memory

    async def forward(self, holder: ExpertHolder, name: str, cell: Cell, inputs: torch.Tensor) -> torch.Tensor:
        return (await self._expert(holder, cell, len(inputs), self.silent)).forward(inputs).clone()

    async def backward(
        self, holder: ExpertHolder, name: str, cell: Cell, inputs: torch.Tensor, grad_outputs: torch.Tensor
    ) -> torch.Tensor:
        silent = self.silent | self.silent_backward
        return (await self._expert(holder, cell, len(inputs), silent)).backward(inputs, grad_outputs)

    async def close(self) -> None:
        pass

    async def _expert(self, holder: ExpertHolder, cell: Cell, rows: int, silent: set[Any]) -> Expert:
        self.asked[holder.peer_id, cell] += 1
        self.batches.append(rows)
        if holder.peer_id in self.down:
            raise PeerUnavailable("no server answers", holder.peer_id)
        if cell in silent or holder.peer_id in silent:
            self.unanswered.add(answer := asyncio.Event())
            try:
                await answer.wait()
            finally:
                self.unanswered.remove(answer)
        if (holder.peer_id, cell) not in self.experts:
            raise PeerMoved("there is no such expert here")
        return self.experts[holder.peer_id, cell]
