"""Servers share the grid without asking each other."""

from __future__ import annotations

import pytest

from swarm_protocol.errors import SwarmError
from swarm_training.experts.core.config import ExpertServerConfig
from swarm_training.experts.server.announcing import Announcer
from tests.worlds.experts import MemoryBoard, holder

CONFIG = ExpertServerConfig("demo", 8, grid=(3, 4), num_experts=5)


def announcer(board: MemoryBoard, name: str) -> Announcer:
    return Announcer(board, holder(name), CONFIG)


async def test_each_takes_cells_that_nobody_has_until_the_grid_is_full() -> None:
    board, taken = MemoryBoard(), []
    for name in "ab":
        own = announcer(board, name)
        cells = await own.free_cells(5)
        await own.publish(cells)
        taken += cells
    assert len(set(taken)) == 10
    with pytest.raises(SwarmError, match=r"grid \(3, 4\) of demo has no 5 free cells"):
        await announcer(board, "c").free_cells(5)


async def test_wanted_cells_come_first_if_they_are_free() -> None:
    board = MemoryBoard()
    await announcer(board, "a").publish([(0, 1)])
    cells = await announcer(board, "b").free_cells(3, wanted=[(0, 1), (2, 2)])
    assert cells[0] == (2, 2) and (0, 1) not in cells and len(set(cells)) == 3


async def test_of_two_that_took_one_cell_at_once_the_later_id_moves() -> None:
    board = MemoryBoard()
    first, second = announcer(board, "a"), announcer(board, "b")
    await first.publish([(0, 1), (1, 1)])
    await second.publish([(0, 1), (0, 2)])
    assert await first.moves([(0, 1), (1, 1)]) == {}
    moves = await second.moves([(0, 1), (0, 2)])
    assert moves.keys() == {(0, 1)} and moves[0, 1] not in {(0, 1), (0, 2), (1, 1)}
    staying = {(x, y) for x in range(3) for y in range(4)} - {(0, 1), (0, 2), (1, 1), (2, 3)}
    assert await second.moves([(0, 1), (0, 2)], staying) == {(0, 1): (2, 3)}


async def test_what_is_announced_no_more_is_withdrawn() -> None:
    board = MemoryBoard()
    own = announcer(board, "a")
    await own.publish([(0, 1), (1, 1)])
    await own.publish([(0, 2)])
    assert board.records == {(0,): {holder("a"): {2}}, (1,): {holder("a"): set()}}
    await own.publish([])
    assert board.records == {(0,): {holder("a"): set()}, (1,): {holder("a"): set()}}
