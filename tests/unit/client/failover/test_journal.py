"""A journal reads back what every row was given, as a plain Python model says."""

from __future__ import annotations

import random

import pytest
import torch

from swarm_client.failover.journal import Journal
from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.block_input import BlockInput

HIDDEN = 3


def inputs(values: list[list[float]], positions: list[list[int]], mask: list[list[int]] | None = None) -> BlockInput:
    hidden = torch.tensor(values)[..., None].expand(-1, -1, HIDDEN)
    return BlockInput(hidden, None if mask is None else torch.tensor(mask), torch.tensor(positions))


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_what_they_were_given(seed):
    chance = random.Random(seed)
    rows: list[list[tuple[float, int]]] = [[] for _ in range(chance.randint(1, 3))]
    journal = Journal.empty(len(rows))
    for _ in range(700):  # more than the pool has chunks
        if rows[0] and chance.random() < 0.1:
            length = chance.randint(0, len(rows[0]))
            rows, journal = [row[:length] for row in rows], journal.cropped(length)
        if chance.random() < 0.1:
            indices = [chance.randrange(len(rows)) for _ in range(chance.randint(1, 4))]
            rows, journal = [list(rows[i]) for i in indices], journal.reordered(indices)
        new = [[(chance.random(), chance.randrange(99)) for _ in range(chance.choice([1, 1, 3]))] for _ in rows[:1]]
        new += [[(chance.random(), chance.randrange(99)) for _ in new[0]] for _ in rows[1:]]
        given = inputs([[v for v, _ in row] for row in new], [[p for _, p in row] for row in new])
        before, journal = journal, journal.appended(given)
        assert before.length == len(rows[0])  # a value
        rows = [row + added for row, added in zip(rows, new, strict=True)]
    start, end = sorted(chance.sample(range(len(rows[0]) + 1), 2))
    read = journal.read(start, end)
    values = torch.tensor([[v for v, _ in row[start:end]] for row in rows])
    assert torch.equal(read.hidden, values[..., None].expand(-1, -1, HIDDEN))
    assert read.position_ids.tolist() == [[p for _, p in row[start:end]] for row in rows]
    assert journal.pool.size < 3 * journal.entries.numel() + 3 * 512 * 4  # what no row has any more is forgotten


def test_positions_count_up_and_may_be_the_same_for_all_rows():
    journal = Journal.empty(2).appended(BlockInput(torch.zeros(2, 3, HIDDEN)))
    journal = journal.appended(BlockInput(torch.zeros(2, 1, HIDDEN), None, torch.tensor([[7]])))
    assert journal.read(0, 4).position_ids.tolist() == [[0, 1, 2, 7]] * 2


def test_additions_stay_where_they_are():
    added = torch.zeros(2, 4, 2, HIDDEN)
    added[0, 1:3] = torch.arange(1.0, 5).view(2, 2, 1)
    journal = Journal.empty(2).appended(BlockInput(torch.zeros(2, 3, HIDDEN)))
    journal = journal.appended(BlockInput(torch.zeros(2, 4, HIDDEN), additions=added))
    journal = journal.appended(BlockInput(torch.zeros(2, 1, HIDDEN))).reordered([1, 0, 0])
    for kept in (journal, journal.compacted(), journal.copy()):
        assert kept.num_added == 2
        assert kept.read(0, 4).additions is None  # neither in text
        assert kept.read(6, 8).additions is None  # nor after it
        assert torch.equal(kept.read(4, 7).additions, added[[1, 0, 0], 1:])
        assert kept.reordered([1]).read(5, 6).stacked[0, 0, :, 0].tolist() == [0, 3, 4]


def test_positions_of_pictures_have_axes():
    journal = Journal.empty(1).appended(BlockInput(torch.zeros(1, 2, HIDDEN)))
    picture = torch.tensor([[[2, 2, 2], [2, 2, 3], [2, 3, 2]]])
    journal = journal.appended(BlockInput(torch.zeros(1, 3, HIDDEN), None, picture))
    journal = journal.appended(BlockInput(torch.zeros(1, 1, HIDDEN), None, torch.tensor([[4]])))
    axes = [[0] * 3, [1] * 3, *picture[0].tolist(), [4] * 3]
    for kept in (journal, journal.compacted()):
        assert kept.read(0, 6).position_ids.tolist() == [axes]
        assert kept.read(0, 2).position_ids.tolist() == [[0, 1]]  # as without pictures


def test_what_attends_to_later_positions_is_kept():
    picture = torch.tensor([[0, 1, 1, 0], [2, 2, 0, 0]], dtype=torch.uint8)
    journal = Journal.empty(2).appended(BlockInput(torch.zeros(2, 4, HIDDEN), joined=picture))
    journal = journal.appended(BlockInput(torch.zeros(2, 2, HIDDEN)))
    for kept in (journal, journal.copy(), journal.compacted()):
        assert kept.reordered([1, 0, 1]).read(1, 5).joined.tolist() == [[2, 0, 0, 0], [1, 1, 0, 0], [2, 0, 0, 0]]
        assert kept.read(4, 6).joined is None


def test_a_run_is_not_cropped_in_the_middle():
    picture = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 0, 0]], dtype=torch.uint8)
    journal = Journal.empty(2).appended(BlockInput(torch.zeros(2, 5, HIDDEN), joined=picture))
    assert [journal.cropped(length).length for length in (0, 1, 4, 5)] == [0, 1, 4, 5]
    for length in (2, 3):
        with pytest.raises(RequestRejected, match=f"5 positions cannot be cropped to {length}"):
            journal.cropped(length)


def test_the_mask_is_the_last_that_was_given():
    journal = Journal.empty(2).appended(inputs([[1.0, 2.0]] * 2, [[0, 1]] * 2, [[0, 1], [1, 1]]))
    assert journal.read(0, 1).attention_mask.tolist() == [[0], [1]]
    journal = journal.appended(inputs([[3.0]] * 2, [[2]] * 2))  # none: what is new is attended to
    assert journal.read(0, 3).attention_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert journal.reordered([1, 0, 0]).read(1, 2).attention_mask.tolist() == [[1, 1], [0, 1], [0, 1]]
    assert journal.cropped(1).read(0, 1).attention_mask.tolist() == [[0], [1]]
    journal = journal.appended(inputs([[4.0]] * 2, [[3]] * 2, [[1] * 4] * 2))
    assert journal.read(0, 4).attention_mask is None


def test_what_becomes_of_the_inputs_later_changes_nothing():
    hidden = torch.ones(1, 2, HIDDEN, requires_grad=True)
    journal = Journal.empty(1).appended(BlockInput(hidden))
    with torch.no_grad():
        hidden.zero_()
    read = journal.read(0, 2).hidden
    assert not read.requires_grad and torch.equal(read, torch.ones(1, 2, HIDDEN))


def test_a_copy_goes_on_by_itself():
    journal = Journal.empty(1).appended(inputs([[1.0]], [[0]]))
    one = journal.copy().appended(inputs([[2.0]], [[1]]))
    assert journal.pool.size == 1  # it keeps nothing of what the copy is given
    other = journal.appended(inputs([[3.0]], [[1]]))
    assert one.read(0, 2).hidden[0, :, 0].tolist() == [1.0, 2.0]
    assert other.read(0, 2).hidden[0, :, 0].tolist() == [1.0, 3.0]
