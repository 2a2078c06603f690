"""Members of one group that average over the simulated network, and do nothing else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch

from swarm_training.averaging.grid import needs_grid
from swarm_training.averaging.group import Group, GroupMember
from swarm_training.averaging.round import AveragingRound, VectorCoding
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.policy import rank
from tests.worlds.runs import SimulatedNetwork, World


class Reducer:
    """Attributes:
    tasks: what the network runs for it.
    """

    def __init__(self, world: World, group: Group, me: int, vector: torch.Tensor, **options: Any) -> None:
        peer_id = group.peer_ids[me]
        self.round = make_round(SimulatedNetwork(world, peer_id), group, me, vector, **options)
        self.tasks: list[asyncio.Task[Any]] = []
        self.peer = self
        world.peers[peer_id] = self  # type: ignore[assignment]

    async def reduce(self, caller: str, stream: Any) -> None:
        opening = (await stream.receive()).open
        await self.round.serve_reduce(self.round.group.peer_ids.index(caller), opening.attempt, stream)

    async def fetch(self, _caller: str, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]:
        for chunk in self.round.serve_fetch(request.chunks):
            yield chunk


def make_round(
    network: Any,
    group: Group,
    me: int,
    vector: torch.Tensor,
    codec: str = "fp32",
    chunk_elements: int = 4,
    encoder: ErrorFeedback | None = None,
) -> AveragingRound:
    return AveragingRound(network, group, me, 0, vector, VectorCoding(codec_of(codec), chunk_elements, encoder))


def group_of(shares: Sequence[float], weights: Sequence[int], step: int = 0) -> tuple[Group, list[int]]:
    """As a leader forms it, and the numbers of its members, in its order. Who has no share cannot be reached."""
    names = [f"peer{number}" for number in range(len(shares))]
    order = sorted(range(len(names)), key=lambda number: rank("toy", step, names[number]))
    members = tuple(
        GroupMember(
            Progress("toy", names[number], address="sim:1" if shares[number] else "", share=shares[number]),
            weights[number],
            shares[number],
        )
        for number in order
    )
    layout = tuple(member.share for member in members)
    return Group(f"group{step}", step, 1, members, 5.0, layout=layout, grid=needs_grid(layout)), order


async def reduce_all(world: World, group: Group, vectors: Sequence[torch.Tensor], **options: Any) -> list[Reducer]:
    """The first attempt of all members; vectors in the order of the group."""
    reducers = [Reducer(world, group, me, vector, **options) for me, vector in enumerate(vectors)]
    await asyncio.gather(*(reducer.round.first_attempt() for reducer in reducers))
    return reducers


class Traffic:
    """What passes a world, by peer.

    Attributes:
        opened: streams for parts and row means.
        sent, received: bytes of parts and means.
    """

    def __init__(self, world: World) -> None:
        self.opened: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        world.on_message = self._note

    def _note(self, source: str, target: str, message: Any) -> None:
        chunk = message if isinstance(message, pb.Chunk) else None
        if isinstance(message, pb.ReduceRequest):
            self.opened[source] += message.HasField("open")
            chunk = message.row.chunk if message.HasField("row") else message.chunk
        if chunk is not None:
            self.sent[source] += len(chunk.data)
            self.received[target] += len(chunk.data)
