"""Which cells a server takes, and who gives way."""

from __future__ import annotations

import itertools

import pytest

from swarm_training.experts.core.cells import check_grid, check_name, expert_name, is_in, numbered
from swarm_training.experts.search.placing import by_prefix, candidates, clashes


@pytest.mark.parametrize("grid", [(1,), (7,), (4, 6), (3, 3, 5)])
def test_each_cell_is_a_candidate_once(grid: tuple[int, ...]) -> None:
    assert sorted(candidates(grid, "a peer")) == sorted(itertools.product(*map(range, grid)))


def test_servers_begin_in_different_places() -> None:
    firsts = {next(iter(candidates((32, 32), f"peer {number}"))) for number in range(20)}
    assert len(firsts) > 15


def test_of_two_servers_in_one_cell_one_gives_way() -> None:
    others = {(0, 1): {"b"}, (0, 2): {"d"}, (0, 3): set[str]()}
    assert clashes(others, others, "c") == {(0, 1)}
    assert clashes([(0, 2)], {(0, 2): {"c"}}, "d") == {(0, 2)}


def test_records_stand_under_all_prefixes_but_the_empty_one() -> None:
    assert by_prefix([(1, 2, 3), (1, 2, 4), (1, 5, 0)]) == {(1,): {2, 5}, (1, 2): {3, 4}, (1, 5): {0}}
    assert by_prefix([(1, 2), (3, 4)]) == {(1,): {2}, (3,): {4}}
    assert by_prefix([(1,), (3,)]) == {(): {1, 3}}


def test_cells_have_numbers_and_names() -> None:
    assert [numbered(number, (2, 3)) for number in range(6)] == list(itertools.product(range(2), range(3)))
    assert expert_name("demo", (3, 7)) == "demo.3.7" and expert_name("demo", ()) == "demo"
    assert is_in((1, 2), (2, 3)) and not is_in((2, 0), (2, 3)) and not is_in((1,), (2, 3))


@pytest.mark.parametrize("name", ["", "a.b", "a b", "x" * 65])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected 1 to 64 letters"):
        check_name(name)


@pytest.mark.parametrize("grid", [(), (0, 3), (2, 2000), (2,) * 5])
def test_what_is_no_grid_is_refused(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected 1 to 4 sizes"):
        check_grid(grid)
