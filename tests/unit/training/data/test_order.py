"""Every sample once per epoch over all peers, in an order that only (run, epoch) decide; and orders that are random."""

from __future__ import annotations

import itertools
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_training.data.order import DataShard, PartCursor, SampleOrder, batch_of_step, derived_seed
from swarm_training.data.permutation import MAX_SIZE, Permutation

FROZEN = [5, 0, 6, 2, 1, 9, 4, 8, 3, 7]


@given(st.integers(1, 3000), st.binary(max_size=8))
def test_a_permutation_has_every_number_once(size: int, key: bytes) -> None:
    assert sorted(Permutation(size, key).at(np.arange(size))) == list(range(size))


@given(st.integers(1, MAX_SIZE), st.lists(st.integers(0, MAX_SIZE - 1), min_size=1, max_size=20, unique=True))
def test_elements_of_large_ones_are_computed_by_themselves(size: int, positions: list[int]) -> None:
    permutation = Permutation(size, b"key")
    chosen = np.array(sorted({position % size for position in positions}))
    together = permutation.at(chosen)
    assert len(set(together.tolist())) == len(chosen) and together.min() >= 0 and together.max() < size
    assert [permutation.at(chosen[i : i + 1])[0] for i in range(len(chosen))] == together.tolist()


def test_the_same_key_gives_the_same_permutation_on_every_machine_and_version() -> None:
    """Frozen: peers of two versions of this package would otherwise compute other batches."""
    assert Permutation(10, b"key").at(np.arange(10)).tolist() == FROZEN
    assert Permutation(10, b"other").at(np.arange(10)).tolist() != FROZEN


def test_all_orders_of_four_come_about_equally_often() -> None:
    """4800 keys over 24 orders: chi-square with 23 degrees of freedom is below 49.7 with probability 0.999."""
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    num_keys = 200 * factorial(4)
    for key in range(num_keys):
        counts[tuple(Permutation(4, str(key).encode()).at(np.arange(4)).tolist())] += 1
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 49.7


def test_a_number_is_found_at_every_place_and_neighbours_are_parted() -> None:
    """Over 600 keys: place of 0 among 100 (chi-square, 99 degrees: < 148.2 at 0.999), and of 1 relative to it."""
    rows = np.array([Permutation(100, str(key).encode()).at(np.arange(100)) for key in range(600)])
    places = np.argmin(rows, axis=1)
    after = (np.argmax(rows == 1, axis=1) - places) % 100
    for found, size in ((places, 100), (after[after > 0] - 1, 99)):
        counts = np.bincount(found, minlength=size)
        expected = 600 / size
        assert ((counts - expected) ** 2 / expected).sum() < 148.2


@given(st.integers(1, 50), st.integers(1, 6), st.integers(1, 7))
def test_over_all_parts_every_sample_comes_once_in_an_epoch(num_samples: int, num_parts: int, batch: int) -> None:
    """Of so many epochs that all parts are equally long."""
    order = SampleOrder("run", num_samples)
    total = num_samples * num_parts
    taken: list[tuple[int, int]] = []
    for index in range(num_parts):
        cursor, left = PartCursor(order, DataShard(index, num_parts)), total // num_parts
        while left:
            start, count = cursor.taken, min(batch, left)
            positions = index + num_parts * np.arange(start, start + count)
            taken += zip((positions // num_samples).tolist(), cursor.take(count).tolist(), strict=True)
            left -= count
    assert sorted(taken) == [(epoch, sample) for epoch in range(num_parts) for sample in range(num_samples)]


def test_epochs_and_runs_have_orders_of_their_own() -> None:
    first, second = np.split(SampleOrder("run", 100).samples(np.arange(200)), 2)
    other = SampleOrder("other run", 100).samples(np.arange(100))
    assert sorted(first) == sorted(second) == sorted(other) == list(range(100))
    assert (first == second).sum() < 10 and (first == other).sum() < 10


def test_a_resumed_cursor_goes_on_as_if_nothing_had_happened() -> None:
    whole = PartCursor(SampleOrder("run", 37), DataShard(1, 3)).take(100)
    before = PartCursor(SampleOrder("run", 37), DataShard(1, 3))
    head = before.take(41)
    after = PartCursor(SampleOrder("run", 37), DataShard(1, 3))
    after.load_state_dict(before.state_dict())
    assert np.array_equal(np.concatenate([head, after.take(59)]), whole)
    with pytest.raises(ValueError, match="is that of part 1 of 3: expected part 0 of 3"):
        PartCursor(SampleOrder("run", 37), DataShard(0, 3)).load_state_dict(before.state_dict())


def test_batches_of_steps_follow_one_another() -> None:
    order = SampleOrder("run", 12)
    batches = [batch_of_step(order, step, 4, 0, 4).tolist() for step in range(6)]
    assert sorted(itertools.chain(*batches[:3])) == sorted(itertools.chain(*batches[3:])) == list(range(12))
    shares = [batch_of_step(order, 4, 4, first, 2).tolist() for first in (0, 2)]
    assert list(itertools.chain(*shares)) == batches[4]
    with pytest.raises(ValueError, match="samples 3:5 of a batch of 4: expected some of 0:4"):
        batch_of_step(order, 0, 4, 3, 2)


def test_seeds_differ_wherever_parts_end() -> None:
    assert (
        len({derived_seed("a", "bc"), derived_seed("ab", "c"), derived_seed("abc"), derived_seed("a", "b", "c")}) == 4
    )
    assert derived_seed("1:a") != derived_seed("", "a")


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="the data set has no samples"):
        SampleOrder("run", 0)
    with pytest.raises(ValueError, match="part 2 of 2: expected a part of 0 to 1"):
        DataShard(2, 2)
    with pytest.raises(ValueError, match="a permutation of 0 numbers"):
        Permutation(0, b"")
