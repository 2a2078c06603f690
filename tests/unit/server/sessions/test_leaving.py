"""A server that leaves: sessions are asked to move, and it does not wait for ever for clients that do not listen."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.sessions.host import SessionManager
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)


class Client:
    """Of a session."""

    def __init__(self, is_deaf: bool) -> None:
        self._is_deaf = is_deaf
        self.is_asked = False

    async def ask_to_move(self) -> None:
        if self._is_deaf:
            await asyncio.Event().wait()
        self.is_asked = True


async def test_a_client_that_does_not_read_delays_it_no_longer_than_others() -> None:
    services: Any = SimpleNamespace(budget=CacheBudget(100, 1))
    manager = SessionManager(services, 4)
    clients = [Client(is_deaf=True), Client(is_deaf=False)]
    manager._sessions.update({bytes([key]): client for key, client in enumerate(clients)})
    await manager.leave(7.0)
    assert asyncio.get_running_loop().time() == 7.0
    assert [client.is_asked for client in clients] == [False, True]
