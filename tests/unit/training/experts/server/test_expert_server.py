"""A server of experts that cannot start leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_protocol.errors import PeerUnavailable
from swarm_training.experts.core.cells import Prefix
from swarm_training.experts.core.config import ServerConfig
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.server import expert_server
from swarm_training.experts.server.expert_server import ExpertServer
from tests.worlds.experts import MemoryBoard


class FailingBoard(MemoryBoard):
    """A DHT that answers no more once experts have been announced."""

    revocations = None

    async def publish(self, own: ExpertHolder, following: Mapping[Prefix, Iterable[int]], lifetime_s: float) -> bool:
        self.is_down = True
        return await super().publish(own, following, lifetime_s)

    async def keepers(self) -> list[ExpertHolder]:
        return []


def test_a_start_that_fails_withdraws_what_it_has_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_arguments: object) -> None:
        pass

    async def join(*_arguments: object) -> Any:
        return SimpleNamespace(close=nothing)

    async def start_service(*_arguments: object) -> Any:
        return SimpleNamespace(stop=nothing), 1

    board = FailingBoard()
    monkeypatch.setattr(expert_server, "DhtNodeOfExperts", SimpleNamespace(join=join))
    monkeypatch.setattr(expert_server, "DhtExpertRegistry", lambda *_arguments: board)
    monkeypatch.setattr(expert_server, "start_service", start_service)
    with pytest.raises(PeerUnavailable):
        ExpertServer(ServerConfig("demo", 8, (8, 8), num_experts=2))
    assert board.records and not any(after for holders in board.records.values() for after in holders.values())
