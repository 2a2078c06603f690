"""A peer's part in rollbacks: what it asks others for."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

from swarm_training.averaging.group import Group
from swarm_training.core.config import RollbackPolicy
from swarm_training.core.record import MEETING, Progress
from swarm_training.core.signing import sign
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.policy import LocalView
from swarm_training.rollback.divergence import LossHistory
from swarm_training.rollback.kept import KeptCheckpoints
from swarm_training.rollback.rollbacks import Rollbacks
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.rollback.test_strangers import group
from tests.unit.training.test_records import record
from tests.worlds.identities import identity
from tests.worlds.runs import CONFIG
from tests.worlds.virtual_time import at_once

pytestmark = IN_VIRTUAL_TIME


async def test_a_checkpoint_that_is_not_needed_any_more_is_fetched_anew_when_it_is_needed_again() -> None:
    asked: list[str] = []
    gives = asyncio.Event()

    async def fetch(peer: Progress, digest: bytes) -> bytes:
        asked.append(peer.peer_id)
        await gives.wait()
        return b"state of " + digest

    config = replace(CONFIG, checkpoint_every=10, rollback=RollbackPolicy())
    orders: Any = SimpleNamespace(rollbacks_due=lambda _rollbacks: {}, take=lambda _orders: None)
    rollbacks = Rollbacks(config, orders, fetch, at_once, random.Random(0), KeptCheckpoints(10, 2, None))
    own, other = record(0, step=20), record(1, step=20, state=MEETING, loss=inf, loss_samples=1)
    evidence = sign(other, identity(1))
    wanted = Group.parse(group(pb.Rollback(step=10, state_digest=b"d" * 32, losses=[evidence])))

    async def checkpoint() -> bytes | None:
        return await rollbacks.checkpoint(wanted, own, [other.peer_id], LocalView(own))

    first = asyncio.ensure_future(checkpoint())
    await asyncio.sleep(1.0)
    rollbacks.took_over(LossHistory(), 0)
    await asyncio.wait([first])
    assert first.cancelled() and asked == [other.peer_id]
    gives.set()
    assert await checkpoint() == b"state of " + b"d" * 32
    assert asked == 2 * [other.peer_id]
