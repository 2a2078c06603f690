"""Keepers take experts whose server is gone, one of them each, and give up what another has as well."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.core.replica import Replica
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.replicas.replication import FoundReplica
from swarm_training.experts.search.keeping import in_rank
from swarm_training.experts.server.adopting import Adopter
from swarm_training.experts.server.announcing import Announcer
from tests.worlds.experts import MemoryBoard, holder
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)

CELLS = [(0, 1), (1, 1), (2, 2)]
CONFIG = ExpertServerConfig("demo", 8, grid=(3, 4), num_experts=1, adopt=2, adopt_after_s=60.0, lifetime_s=30.0)


class Board(MemoryBoard):
    async def keepers(self) -> list[ExpertHolder]:
        return [holder("a"), holder("b")]


class Replicas:
    """Stands for what is kept here, and for how it is loaded: no expert is anything."""

    replicas = tuple(Replica(cell, 1, 1, bytes(32)) for cell in CELLS)

    async def find(self) -> dict[tuple[int, ...], list[FoundReplica]]:
        return {replica.cell: [FoundReplica(replica, None)] for replica in self.replicas}

    async def load(self, cell: tuple[int, ...], expert: object, found: Sequence[FoundReplica], above: int) -> bool:
        return bool(found)


def adopter(board: Board, name: str) -> tuple[Adopter, Announcer]:
    announcer, replicas = Announcer(board, holder(name), CONFIG), Replicas()
    return Adopter(CONFIG, name, board, announcer, replicas, replicas), announcer  # type: ignore[arg-type]


async def test_the_first_in_rank_takes_an_expert_and_the_other_waits_longer() -> None:
    board = Board()
    await Announcer(board, holder("c"), CONFIG).publish([(0, 1)])
    firsts = {cell: in_rank("demo", cell, ["a", "b"])[0] for cell in CELLS[1:]}
    both = {name: adopter(board, name)[0] for name in "ab"}
    for own in both.values():
        assert await own.adopt([], object) == {}  # missing since now
    await asyncio.sleep(61)
    for name, own in both.items():
        assert (await own.adopt([], object)).keys() == {cell for cell, first in firsts.items() if first == name}
    await asyncio.sleep(30)  # nobody has announced anything: the other one thinks that the first is gone
    for name, own in both.items():
        await own.adopt(set(own.adopted), object)
        assert own.adopted == {(1, 1), (2, 2)}, name


async def test_no_more_are_taken_than_a_server_may() -> None:
    board = Board()
    own, _ = adopter(board, "a")
    await own.adopt([], object)
    await asyncio.sleep(1000)
    assert len(await own.adopt([], object)) == 2
    assert await own.adopt(own.adopted, object) == {}


async def test_of_two_that_adopted_one_expert_the_later_id_gives_it_up() -> None:
    board = Board()
    both = {name: adopter(board, name) for name in "ab"}
    for own, announcer in both.values():
        own.adopted.add((1, 1))
        await announcer.publish([(1, 1)])
    assert await both["a"][0].given_up() == set() and both["a"][0].adopted == {(1, 1)}
    assert await both["b"][0].given_up() == {(1, 1)} and both["b"][0].adopted == set()
