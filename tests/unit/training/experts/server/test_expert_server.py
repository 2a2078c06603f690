"""A server of experts that cannot start leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from swarm_protocol.errors import PeerUnavailable
from swarm_training.experts.core.cells import Prefix
from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.server import expert_server
from swarm_training.experts.server.expert_server import ExpertServer
from tests.worlds.experts import MemoryBoard


class FailingBoard(MemoryBoard):
    """A DHT that answers no more once experts have been announced."""

    revocations = None
    can_withdraw = True

    async def publish(self, own: ExpertHolder, following: Mapping[Prefix, Iterable[int]], lifetime_s: float) -> bool:
        if self.is_down and not self.can_withdraw:
            raise OSError("the daemon is gone")
        self.is_down = True
        return await super().publish(own, following, lifetime_s)

    async def keepers(self) -> list[ExpertHolder]:
        return []


@pytest.mark.parametrize("can_withdraw", [True, False])
def test_a_start_that_fails_withdraws_what_it_has_announced_and_ends_what_it_has_started(
    can_withdraw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, close = AsyncMock(), AsyncMock()

    async def join(*_arguments: object) -> Any:
        return SimpleNamespace(close=close)

    async def start_service(*_arguments: object) -> Any:
        return SimpleNamespace(stop=stop), 1

    board = FailingBoard()
    board.can_withdraw = can_withdraw
    monkeypatch.setattr(expert_server, "DhtNodeOfExperts", SimpleNamespace(join=join))
    monkeypatch.setattr(expert_server, "DhtExpertRegistry", lambda *_arguments: board)
    monkeypatch.setattr(expert_server, "start_service", start_service)
    with pytest.raises(PeerUnavailable):
        ExpertServer(ExpertServerConfig("demo", 8, (8, 8), num_experts=2))
    announced = any(after for holders in board.records.values() for after in holders.values())
    assert board.records and announced is not can_withdraw
    stop.assert_awaited_once()
    close.assert_awaited_once()
