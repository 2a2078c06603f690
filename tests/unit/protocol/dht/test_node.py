"""A DHT node that does not start leaves no libp2p daemon behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_protocol.dht import node as module
from swarm_protocol.dht.node import Listening, start, stop
from swarm_protocol.errors import NoSwarm
from swarm_protocol.net.hivemind_parts import DHTNode, P2PDaemonError
from tests.worlds.identities import identity


class FakeDaemon:
    def __init__(self, control: Path) -> None:
        control.touch()
        self._daemon_listen_maddr = {"unix": str(control)}
        self.is_shut_down = False

    async def shutdown(self) -> None:
        await asyncio.sleep(0)
        self.is_shut_down = True


async def test_a_daemon_is_stopped_even_if_its_node_cannot_take_leave(tmp_path: Path) -> None:
    async def shutdown() -> None:
        raise ConnectionResetError

    daemon: Any = FakeDaemon(tmp_path / "control")
    daemon._child = SimpleNamespace(returncode=None)
    await stop(SimpleNamespace(p2p=daemon, shutdown=shutdown))
    assert daemon.is_shut_down


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (ValueError("a defect"), ValueError),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (TimeoutError(), NoSwarm),
        (P2PDaemonError("the daemon refuses a handler"), NoSwarm),
    ],
    ids=["failed", "cancelled", "late", "refused"],
)
async def test_the_daemon_of_a_node_that_does_not_start_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: BaseException, raised: type[BaseException]
) -> None:
    daemon = FakeDaemon(tmp_path / "control")

    async def start_daemon(*_: Any) -> FakeDaemon:
        return daemon

    async def create(**_: Any) -> None:
        raise failure

    monkeypatch.setattr(module, "_start_daemon", start_daemon)
    monkeypatch.setattr(DHTNode, "create", create)
    with pytest.raises(raised):
        await start(identity(0), Listening())
    assert daemon.is_shut_down and not (tmp_path / "control").exists()
