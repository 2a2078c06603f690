"""A trainer's presence waits for peers at every stage as long as its caller wants."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_protocol.errors import PeerUnavailable
from swarm_training.net.membership import RunMembership
from swarm_training.stages.peer.presence import WatchPresence
from swarm_training.stages.peer.watch import RunWatch
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.micro_batches import BlockMicroBatches
from swarm_training.stages.trainer.presence import train
from tests.worlds.identities import identity


def test_who_finds_a_stage_empty_waits_as_long_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave() -> None:
        pass

    async def enter(*_arguments: object) -> Any:
        watch = RunWatch.__new__(RunWatch)
        watch.view = lambda: SimpleNamespace(moment=None, stages=({"Qm": 1}, {}))  # type: ignore[method-assign]
        return SimpleNamespace(watch=watch, network=None, board=SimpleNamespace(node=None), leave=leave)

    async def trained() -> None:
        data: BlockMicroBatches = SimpleNamespace(count=1)  # type: ignore[assignment]
        async with asyncio.timeout(10.0):
            await train("toy", 2, RunMembership(identity(1)), data, TrainerConfig(), join_timeout_s=0.05)

    monkeypatch.setattr(WatchPresence, "enter", enter)
    with pytest.raises(PeerUnavailable, match="nobody is at stage 1"):
        asyncio.run(trained())
