"""Beam search beside brute force over all cells."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from swarm_training.experts.search.beam import BeamResult, beam_search

Cells = set[tuple[int, ...]]


class Reader:
    """Answers what follows a prefix, and notes what was asked."""

    def __init__(self, living: Cells) -> None:
        self._living = living
        self.asked: list[tuple[int, ...]] = []

    def run(self, scores: list[np.ndarray], k: int, beam: int) -> BeamResult:
        search = beam_search(scores, k, beam)
        try:
            wanted = next(search)
            while True:
                self.asked += wanted
                wanted = search.send({prefix: self._following(prefix) for prefix in wanted})
        except StopIteration as end:
            return end.value

    def _following(self, prefix: tuple[int, ...]) -> set[int]:
        return {cell[len(prefix)] for cell in self._living if cell[: len(prefix)] == prefix}


def score(scores: list[np.ndarray], row: int, cell: tuple[int, ...]) -> float:
    return sum(own[row, at] for own, at in zip(scores, cell, strict=True))


def brute_force(scores: list[np.ndarray], living: Cells, k: int) -> list[list[tuple[int, ...]]]:
    return [sorted(living, key=lambda cell: -score(scores, row, cell))[:k] for row in range(len(scores[0]))]


def found_cells(found: BeamResult) -> list[list[tuple[int, ...]]]:
    return [[tuple(cell) for cell in row if cell[0] >= 0] for row in found.cells.tolist()]


def random_case(grid: tuple[int, ...], share_alive: float, seed: int) -> tuple[list[np.ndarray], Cells]:
    random = np.random.default_rng(seed)
    scores = [random.normal(size=(20, size)) for size in grid]
    cells = itertools.product(*map(range, grid))
    return scores, {cell for cell in cells if random.random() < share_alive}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("grid", [(40,), (8, 8), (5, 9), (4, 3, 5), (2, 3, 2, 3)])
@pytest.mark.parametrize("share_alive", [1.0, 0.5, 0.05, 0.0])
def test_with_a_beam_for_all_prefixes_it_finds_what_brute_force_finds(
    grid: tuple[int, ...], share_alive: float, seed: int
) -> None:
    scores, living = random_case(grid, share_alive, seed)
    beam = max(4, int(np.prod(grid[:-1])))
    assert found_cells(Reader(living).run(scores, 4, beam)) == brute_force(scores, living, 4)


@pytest.mark.parametrize("grid", [(16, 16), (8, 8, 8)])
def test_with_a_beam_of_k_it_is_exact_where_all_cells_have_experts(grid: tuple[int, ...]) -> None:
    scores, living = random_case(grid, 1.0, 0)
    assert found_cells(Reader(living).run(scores, 4, 4)) == brute_force(scores, living, 4)


def test_prefixes_without_experts_do_not_take_room_in_the_beam() -> None:
    """Only the worst-scored row of the grid has an expert."""
    scores = [np.arange(8.0)[None], np.zeros((1, 8))]
    assert found_cells(Reader({(0, 3)}).run(scores, k=2, beam=2)) == [[(0, 3)]]


def test_only_the_best_prefixes_are_asked_for_and_none_twice() -> None:
    scores, living = random_case((32, 32), 1.0, 0)
    one_row = [own[:1] for own in scores]
    reader = Reader(living)
    reader.run(one_row, 4, 4)
    best = np.argsort(-one_row[0][0])[:4]
    assert sorted(reader.asked) == sorted((int(at),) for at in best)


def test_it_says_which_coordinates_have_living_experts() -> None:
    scores = [np.array([[3.0, 2.0, 1.0]]), np.array([[0.0, 1.0]])]
    found = Reader({(1, 1), (2, 1)}).run(scores, k=1, beam=1)
    # coordinate 0 was asked for in vain; of 2 nobody has asked
    assert found.living[0].tolist() == [False, True, True] and found.living[1].tolist() == [False, True]


def test_answers_outside_the_grid_are_ignored() -> None:
    scores = [np.zeros((1, 2)), np.zeros((1, 2))]
    assert found_cells(Reader({(0, 1), (1, 7)}).run(scores, 4, 4)) == [[(0, 1)]]
