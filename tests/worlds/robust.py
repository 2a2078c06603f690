"""Members of a robust run in one event loop with its own clock: the real code over a network that fails on command."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from swarm_protocol.errors import PeerUnavailable, RequestRejected
from swarm_training.core.robust_config import RobustConfig
from swarm_training.pb import training_robust_pb2 as pb
from swarm_training.robust.btard import Btard
from swarm_training.robust.roster import Rules
from swarm_training.robust_run.data import StepData
from swarm_training.robust_run.member import RobustMember, StepResult
from tests.worlds.identities import identity
from tests.worlds.virtual_time import at_once

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from btard_swarm import KINDS, Peer, noisy_gradients

__all__ = ["KINDS", "Peer", "RobustWorld", "make", "names", "noisy_gradients", "require_equal", "steps"]

CONFIG = RobustConfig()
SESSION = b"s" * 32
SIZE = 40


@dataclass
class RobustWorld:
    """Attributes:
    deliver: what a peer is told in place of a request; None: nothing, and the teller does not know.
    """

    latency_s: float = 0.01
    members: dict[str, RobustMember] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    deliver: Callable[[str, str, pb.TellRequest], pb.TellRequest | None] = lambda source, target, request: request

    def kill(self, peer_id: str) -> None:
        self.dead.add(peer_id)
        self.members[peer_id].close()


@dataclass
class SimulatedRobustNetwork:
    world: RobustWorld
    own: str

    async def _reach(self, peer_id: str) -> RobustMember:
        await asyncio.sleep(self.world.latency_s)
        if {peer_id, self.own} & self.world.dead or peer_id not in self.world.members:
            raise PeerUnavailable("connection refused")
        return self.world.members[peer_id]

    async def tell(self, peer_id: str, request: pb.TellRequest) -> None:
        member = await self._reach(peer_id)
        sent = self.world.deliver(self.own, peer_id, request)
        if sent is not None:
            await member.tell(self.own, sent)

    async def fetch(self, peer_id: str, digest: bytes, max_bytes: int) -> bytes:
        data = await (await self._reach(peer_id)).fetch(self.own, digest)
        await self._reach(peer_id)
        if len(data) > max_bytes:
            raise RequestRejected("too much")
        return data

    async def standings(self, peer_id: str) -> bytes:
        raise NotImplementedError


def names(count: int) -> list[str]:
    return [identity(number).peer_id for number in range(count)]


def make(
    world: RobustWorld,
    count: int,
    kinds: Mapping[int, type[Peer]] | None = None,
    rules: Rules | None = None,
    config: RobustConfig = CONFIG,
    gradient_of: Callable[[str, int], Tensor] | None = None,
    seed: int = 0,
) -> list[RobustMember]:
    """Founders 0 to count - 1; others than honest ones by their numbers."""
    kinds, rules = kinds or {}, rules or Rules()
    gradient_of = gradient_of or noisy_gradients(SIZE)
    founders = names(count)
    for number, name in enumerate(founders):
        bench = kinds.get(number, Peer)(name, SIZE, gradient_of, rules)
        bench.friends = frozenset(founders[other] for other in kinds)
        machine = Btard(name, founders, SIZE, rules)
        network = SimulatedRobustNetwork(world, name)
        chance = random.Random(f"{seed} {number}")
        data = StepData(bench, machine.num_elements, network, config, at_once)
        member = RobustMember(identity(number), SESSION, machine, data, network, config, random_bytes=chance.randbytes)
        member.broadcasts.set_peers(founders)
        world.members[name] = member
    return list(world.members.values())


async def steps(members: Sequence[RobustMember], count: int) -> list[list[StepResult]]:
    """By member, what each step gave; what it has raised ends it."""

    async def one(member: RobustMember) -> list[StepResult]:
        return [await member.finished() for _ in range(count)]

    return await asyncio.gather(*(one(member) for member in members))


def require_equal(results: Sequence[Sequence[StepResult]]) -> None:
    for first, *others in zip(*results, strict=True):
        for other in others:
            assert torch.equal(first.gradient, other.gradient)
            assert (first.step, first.workers, first.removed) == (other.step, other.workers, other.removed)
