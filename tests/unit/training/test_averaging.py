"""Spans, sums and repairs, each by its own definition."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.codecs.bitmap import from_bits, to_bits
from swarm_training.averaging import chunks as chunks_of_vectors
from swarm_training.averaging.attempt import DirectAttempt
from swarm_training.averaging.chunks import cut
from swarm_training.averaging.repair import repair
from swarm_training.averaging.rounds import Rounds
from swarm_training.averaging.sums import ChunkSum
from tests.unit.held import held_bytes
from tests.worlds.reducers import group_of, reduce_all
from tests.worlds.runs import World


@given(st.integers(0, 500), st.lists(st.floats(0, 10), min_size=1, max_size=8), st.integers(1, 64))
def test_chunks_cover_a_vector_once_and_spans_follow_the_shares(length: int, shares: list, most: int) -> None:
    if not sum(shares):
        return
    chunks = cut(length, shares, most)
    assert [index for chunk in chunks for index in range(chunk.start, chunk.stop)] == list(range(length))
    assert all(0 < chunk.stop - chunk.start <= most for chunk in chunks)
    for owner, share in enumerate(shares):
        owned = sum(chunk.stop - chunk.start for chunk in chunks if chunk.owner == owner)
        assert math.isclose(owned, length * share / sum(shares), abs_tol=1.01)
        assert share or not owned


def test_nobody_with_a_share_is_an_error() -> None:
    with pytest.raises(ValueError, match="share of the work"):
        cut(10, [0.0, 0.0], 4)


def test_every_version_of_python_cuts_a_vector_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Python 3.12, ``sum`` has smaller errors of rounding than before."""
    expected = cut(5, [0.1] * 10, 64)
    monkeypatch.setattr(chunks_of_vectors, "sum", math.fsum, raising=False)
    assert cut(5, [0.1] * 10, 64) == expected


@given(st.sets(st.integers(0, 40)), st.integers(41, 60))
def test_sets_of_chunks_survive_the_wire(numbers: set, size: int) -> None:
    assert from_bits(to_bits(numbers, size), size) == numbers
    with pytest.raises(ValueError, match="bytes"):
        from_bits(to_bits(numbers, size) + b"\0", size)


def test_a_sum_does_not_depend_on_the_order_of_arrival() -> None:
    parts = {member: torch.randn(100) * 10.0**member for member in range(4)}
    weights = {0: 3.0, 1: 5.0, 2: 1.0, 3: 7.0}
    total = torch.zeros(100)
    for member in range(4):
        total = parts[member] * weights[member] if member == 0 else total + parts[member] * weights[member]
    for order in itertools.permutations(range(4)):
        chunk = ChunkSum(weights)
        for member in order:
            assert not chunk.is_done
            chunk.put(member, parts[member])
        assert chunk.is_done and torch.equal(chunk.mean, total / 16.0)


def test_who_is_left_out_weighs_nothing_and_counts_once() -> None:
    chunk = ChunkSum({0: 1.0, 1: 2.0, 2: 4.0})
    chunk.put(2, torch.ones(2))
    chunk.leave_out(1)
    chunk.put(1, torch.full((2,), 100.0))
    chunk.put(2, torch.full((2,), 100.0))
    assert chunk.missing == {0}
    chunk.put(0, torch.full((2,), 6.0))
    assert torch.equal(chunk.mean, torch.full((2,), (6.0 + 4.0) / 5.0))


def test_a_sum_of_nothing_has_no_mean() -> None:
    chunk = ChunkSum({0: 1.0})
    chunk.leave_out(0)
    assert chunk.is_done and chunk.mean is None


async def turns_during(work: Awaitable[Any]) -> int:
    """How often others had their turn on the loop until the work was done."""
    task = asyncio.ensure_future(work)
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    task.result()
    return turns


async def test_heartbeats_have_their_turn_while_a_lone_owner_adds_up_all_there_is() -> None:
    """Its leader, itself as well, would take it for silent otherwise, at each attempt again."""
    group, _ = group_of([1.0], [1])
    # chunks: between two turns, one is added up and one is encoded
    assert await turns_during(reduce_all(World(), group, [torch.randn(400)])) >= 100


@pytest.mark.parametrize("late", [0, 2])
def test_heartbeats_have_their_turn_while_means_without_a_straggler_are_made(late: int) -> None:
    encoded: list[int] = []

    def encode(number: int, mean: torch.Tensor) -> bytes:
        encoded.append(number)
        return mean.numpy().tobytes()

    async def run() -> int:
        attempt = DirectAttempt(dict.fromkeys(range(50), 1), 1, {0: 1.0, 1: 3.0, 2: 1.0}, encode)
        for number, member in itertools.product(range(50), {0, 1, 2} - {late}):
            attempt.put(number, member, torch.full((2,), float(member)))
        assert not encoded
        attempt.end()
        assert not encoded  # all of them in one stretch

        async def collect() -> None:
            mean = torch.full((2,), (3.0 + (0 if late == 2 else 2)) / 4).numpy().tobytes()
            for number in range(50):
                assert await attempt.mean_of(number) == await attempt.mean_of(number) == mean

        return await turns_during(collect())

    assert asyncio.run(run()) >= 50 and encoded == list(range(50))


def test_what_somebody_has_is_fetched_and_the_rest_is_added_up_again() -> None:
    held = {0: {0, 1, 2}, 1: {0}, 2: {0, 1}}
    plan = repair(4, held, reachable={0, 1, 2}, shares=[1.0, 1.0, 1.0])
    assert plan.fetch.keys() == {1, 2} and plan.fetch[2] == 0 and plan.fetch[1] in (0, 2)
    assert plan.redo.keys() == {3} and not plan.lost
    hidden = repair(4, held, reachable={1}, shares=[0.0, 1.0, 0.0])
    assert not hidden.fetch and hidden.redo == {1: 1, 2: 1, 3: 1}
    assert repair(4, held, reachable=set(), shares=[0.0, 0.0, 0.0]).lost
    whole = repair(1, held, reachable={0}, shares=[1.0, 1.0, 1.0])
    assert not whole.fetch and not whole.redo and not whole.lost


async def test_the_rounds_of_a_result_that_a_peer_has_are_kept_however_many_fail_after() -> None:
    rounds = Rounds()
    for number in range(8):
        new: Any = SimpleNamespace(group=SimpleNamespace(id=f"group {number}"))
        await rounds.add(new, accepted="group 1" if number else "")
        await rounds.add(new, accepted="group 1" if number else "")  # another phase
    assert [len(rounds.of(f"group {number}")) for number in range(8)] == [0, 2, 0, 0, 0, 0, 2, 2]


async def test_once_a_step_is_taken_the_results_of_its_rounds_are_all_that_is_kept() -> None:
    """Until the next round: whoever lacks some of them can ask."""
    length = 10_000
    (group, _), rounds = group_of([1.0], [1]), Rounds()
    for step in range(3):
        (reducer,) = await reduce_all(World(), group, [torch.randn(length)], chunk_elements=1000)
        reducer.round.group = replace(group, id=f"group {step}")
        await rounds.add(reducer.round)
        assert 2 * 4 * length <= held_bytes(rounds) < 2.2 * 4 * length  # the vector too
        rounds.end_step()
        assert 4 * length <= held_bytes(rounds) < 1.2 * 4 * length
        kept = await rounds.find(f"group {step}", 0, 1.0)
        assert [chunk.data for chunk in kept.serve_fetch(range(10))] == list(reducer.round.results.values())
        del kept, reducer
