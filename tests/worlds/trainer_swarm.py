"""Toy stages behind real gRPC on loopback, in one process, whose records are known at once.

They step together as soon as every micro-batch is in the sums of one peer of each stage.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.net.tls import ClientCredentials
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.net.channels import GrpcNetwork
from swarm_training.stages.rpc.room import StageLimits
from swarm_training.stages.rpc.service import StagesService
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.micro_batches import Content
from swarm_training.stages.trainer.recomputing import Recomputing
from swarm_training.stages.trainer.trainer import RunSource, StepReport, Trainer
from tests.worlds.identities import identity
from tests.worlds.toy_stages import RUN, ToyHost, ToyStage, bits_of, serving, tokens

MICRO_BATCHES, LOSS_SCALE = 8, 10.0
CONFIG = TrainerConfig(settle_s=10.0, least_deadline_s=60.0, poll_s=0.01)  # the machine may have much else to do


class ToyData:
    count, loss_scale = MICRO_BATCHES, LOSS_SCALE

    def at(self, step: int, number: int) -> Content:
        ids = tokens(step, number)
        return Content(ids, ids)


class LossyService(StagesService):
    """Loses requests before they are carried out, and answers after that.

    Attributes:
        dice: None: loses nothing.
        loss: the share that is lost, half of it before, half after.
    """

    dice: random.Random | None = None
    loss = 0.25

    def _is_lost(self) -> bool:
        return self.dice is not None and self.dice.random() < self.loss / 2

    async def Commit(self, request: Any, context: Any) -> Any:
        if self._is_lost():
            raise PeerUnavailable("the request is lost")
        reply = await super().Commit(request, context)
        if self._is_lost():
            raise PeerUnavailable("the answer is lost")
        return reply

    async def _serve(self, requests: Any, context: Any, *, is_backward: bool) -> None:
        if self._is_lost():
            raise PeerUnavailable("the request is lost")
        await super()._serve(requests, context, is_backward=is_backward)
        if self._is_lost():
            raise PeerUnavailable("the end of the answer is lost")


@dataclass(eq=False)
class Member:
    """A peer as a trainer sees it."""

    host: ToyHost
    record: Progress
    service: StagesService
    life: AsyncExitStack
    is_alive: bool = True
    holds: bool = False
    samples_per_s: float = 0.0
    skipped_batches: int = 0

    @property
    def peer_id(self) -> str:
        return self.record.peer_id

    @property
    def address(self) -> str:
        return self.record.address

    @property
    def is_reachable(self) -> bool:
        return self.record.is_reachable

    @property
    def tls_fingerprint(self) -> bytes:
        return self.record.tls_fingerprint

    @property
    def moment(self) -> Moment:
        return self.host.moment

    @property
    def micro_batches(self) -> bytes:
        return bits_of(self.host.sums.done)


@dataclass
class Swarm:
    """Attributes:
    history: by step, the sums of each stage.
    """

    stages: list[list[Member]]
    network: GrpcNetwork  # of peers that compute what another has said is not finite
    history: list[list[Tensor]] = field(default_factory=list)
    _number: int = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, *peers: int, **how: Any) -> AsyncIterator[Swarm]:
        """So many peers at each stage."""
        swarm = cls([[] for _ in peers], GrpcNetwork(ClientCredentials(identity(89))))
        stepping = asyncio.ensure_future(swarm._step_together())
        try:
            for stage, count in enumerate(peers):
                for _ in range(count):
                    await swarm.join(stage, **how)
            yield swarm
        finally:
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)
            for member in swarm.members():
                await member.life.aclose()
            await swarm.network.close()

    async def join(self, stage: int, limits: StageLimits | None = None, make: Any = LossyService) -> Member:
        host = ToyHost(ToyStage(stage, len(self.stages)), MICRO_BATCHES, Moment(0, len(self.history)))
        life = AsyncExitStack()
        recomputing = Recomputing(RUN, host, self.look, self.network, CONFIG, LOSS_SCALE)
        made = partial(make, is_finite=recomputing.is_finite)
        record, service = await life.enter_async_context(serving(host, self._number, limits, make=made))
        self._number += 1
        member = Member(host, record, service, life)
        self.stages[stage].append(member)
        return member

    def members(self) -> list[Member]:
        return [member for stage in self.stages for member in stage]

    def look(self) -> list[list[Member]]:
        return [sorted((m for m in stage if m.is_alive), key=lambda m: m.peer_id) for stage in self.stages]

    async def kill(self, member: Member) -> None:
        member.is_alive = False
        await member.life.aclose()

    async def _step_together(self) -> None:
        while True:
            await asyncio.sleep(0.002)
            stages = self.look()
            for stage in stages:
                for earlier, later in pairwise(stage):
                    if earlier.host.sums.done & later.host.sums.done:
                        later.host.sums.clear()  # nothing may count twice
            done = [set().union(*(member.host.sums.done for member in stage)) for stage in stages]
            if all(stages) and all(len(each) == MICRO_BATCHES for each in done):
                self.history.append([sum(m.host.sums.total for m in stage) for stage in stages])  # type: ignore[misc]
                for member in self.members():
                    member.host.clear(Moment(0, len(self.history)))


@asynccontextmanager
async def training(
    swarm: Swarm,
    *,
    number: int = 90,
    config: TrainerConfig = CONFIG,
    trainers: dict[str, int] | None = None,
    end: int | None = None,
    data: Any = None,
) -> AsyncIterator[tuple[asyncio.Task[None], list[StepReport]]]:
    """A trainer at work, as ``identity(number)``, and its reports."""
    own, reports = identity(number), list[StepReport]()
    network = GrpcNetwork(ClientCredentials(own))
    trainer = Trainer(
        own.peer_id,
        RunSource(RUN, swarm.look, lambda: {own.peer_id: 0} if trainers is None else trainers),
        network,
        data or ToyData(),
        config,
        reports.append,
        random.Random(number),
    )
    task = asyncio.ensure_future(trainer.train(end))
    try:
        yield task, reports
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await network.close()
