"""Rows of keys and values grow where they are if they can, share what is equal, and never take more than they need."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.errors import PeerBusy
from swarm_server.kv import kv_rows
from swarm_server.kv.kv_cache import CacheBudget, Lease
from swarm_server.kv.kv_rows import GROWTH_TOKENS, KvRow, Page, PageLayout, grow, runs
from tests.unit.rows import LAYOUTS, WINDOW, read, write


@pytest.fixture
def budget() -> CacheBudget:
    return CacheBudget(1 << 20, 1)


def grown(rows: tuple[KvRow, ...], count: int, lease: Lease, layout: PageLayout, **options) -> tuple[KvRow, ...]:
    return grow(rows, rows, count, layout, lease, **options).rows


def pages(rows: Sequence[KvRow], group: int = 0) -> list[list[Page]]:
    return [[part.page for part in row.parts[group]] for row in rows]


def test_a_row_within_its_promise_stays_in_one_place(budget: CacheBudget) -> None:
    layout, lease = LAYOUTS["full"], budget.lease("")
    rows = (KvRow.empty(layout),) * 2
    for count in (3, 1, 1, 5):
        rows = grown(rows, count, lease, layout, reserved=10)
    (first,), (second,) = pages(rows)
    assert first is second and first.capacity == 10
    assert [len(run.parts) for run in runs(rows, 0, 0)] == [1]


def test_rows_side_by_side_are_read_at_once(budget: CacheBudget) -> None:
    layout, lease = LAYOUTS["full"], budget.lease("")
    rows = grown((KvRow.empty(layout),) * 3, 2, lease, layout, reserved=9)
    assert [run.rows for run in runs(rows, 0, first=5)] == [slice(5, 8)]
    swapped = (rows[1], rows[0], rows[2])
    assert [run.rows for run in runs(swapped, 0, first=5)] == [slice(5, 6), slice(6, 7), slice(7, 8)]


def test_what_was_cropped_is_filled_again(budget: CacheBudget) -> None:
    layout, lease = LAYOUTS["full"], budget.lease("")
    rows = grown((KvRow.empty(layout),), 6, lease, layout, reserved=8)
    taken = lease.charged
    for _ in range(20):
        cropped = tuple(row.crop(3, layout) for row in rows)
        rows = grow(rows, cropped, 4, layout, lease, reserved=8).rows
    assert lease.charged == taken and len(rows[0].parts[0]) == 1


def test_only_the_first_of_two_equal_rows_goes_on_in_their_page(budget: CacheBudget) -> None:
    layout, lease = LAYOUTS["full"], budget.lease("")
    (row,) = grown((KvRow.empty(layout),), 2, lease, layout, reserved=8)
    first, second = pages(grow((row,), (row, row), 1, layout, lease, reserved=8).rows)
    assert len(first) == 1 and len(second) == 2 and second[0] is first[0]


def test_too_many_parts_are_brought_together(budget: CacheBudget) -> None:
    layout, lease = LAYOUTS["full"], budget.lease("")
    rows = grown((KvRow.empty(layout),), 2, lease, layout)
    write(rows, layout, torch.tensor([[1.0, 2.0]]))
    for value in range(3, 40):
        rows = grow(rows, (*rows, rows[-1])[-2:], 1, layout, lease).rows
        write(rows, layout, torch.tensor([[value], [value]]))
        assert max(len(parts) for row in rows for parts in row.parts) <= kv_rows.MAX_PARTS + 1
    assert read(rows, layout) == [[list(range(1, 40))] * 2]


def test_a_window_refuses_to_go_back_to_what_it_dropped(budget: CacheBudget) -> None:
    layout, lease = LAYOUTS["sliding"], budget.lease("")
    rows = grown((KvRow.empty(layout),), 200, lease, layout)
    rows = grown(rows, 1, lease, layout)
    (row,) = rows
    first_kept = row.length - row.kept(0)
    assert row.crop(first_kept + WINDOW - 1, layout) is not None
    assert row.crop(first_kept + WINDOW - 2, layout) is None
    assert row.slice(first_kept - 1, row.length) is None


@given(
    layout=st.sampled_from(list(LAYOUTS.values())),
    num_rows=st.integers(1, 3),
    counts=st.lists(st.integers(1, GROWTH_TOKENS), min_size=1, max_size=20),
)
def test_what_was_promised_suffices(layout: PageLayout, num_rows: int, counts: list[int]) -> None:
    """A server may promise all it has: nothing more is taken while a session grows to what it reserved."""
    reserved = sum(counts)
    size_bytes = num_rows * layout.size_bytes(reserved)
    lease = CacheBudget(size_bytes, 1).lease("anna", size_bytes)
    rows = (KvRow.empty(layout),) * num_rows
    for count in counts:
        rows = grown(rows, count, lease, layout, reserved=reserved)


def test_growth_beyond_the_promise_makes_do_with_the_room_there_is() -> None:
    layout = LAYOUTS["full"]
    lease = CacheBudget(layout.size_bytes(10), 1).lease("anna")
    rows = grown((KvRow.empty(layout),), 9, lease, layout)
    rows = grown(rows, 1, lease, layout)
    with pytest.raises(PeerBusy):
        grown(rows, 1, lease, layout)
    assert rows[0].length == 10


def test_a_row_takes_half_of_the_room_that_it_would_like_before_it_grows_by_single_positions() -> None:
    layout = LAYOUTS["full"]
    lease = CacheBudget(layout.size_bytes(1100), 1).lease("anna")
    rows = grown((KvRow.empty(layout),), 1000, lease, layout)
    rows = grown(rows, 1, lease, layout)  # it would like 250
    assert [page.capacity for page in pages(rows)[0]] == [1000, 62]


def test_rows_that_find_no_room_are_as_they_were() -> None:
    """Whatever they had gained in some groups before another had no room."""
    layout = LAYOUTS["mixed"]
    lease = CacheBudget(layout.size_bytes(10) - 1, 1).lease("anna")
    rows = grown((KvRow.empty(layout),), 3, lease, layout, reserved=4)
    write(rows, layout, torch.tensor([[1.0, 2.0, 3.0]]))
    taken = lease.charged
    with pytest.raises(PeerBusy):
        grow(rows, tuple(row.crop(2, layout) for row in rows), 9, layout, lease)
    assert lease.charged == taken
    assert read(rows, layout) == [[[1.0, 2.0, 3.0]]] * 2
    rows = grown(rows, 1, lease, layout)
    assert len(rows[0].parts[0]) == 1
