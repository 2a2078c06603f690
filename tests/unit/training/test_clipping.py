"""Ordinary runs with CenteredClip: what a minority of cheaters moves, beside the formula and beside the mean."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_training.averaging.attempt import DirectAttempt
from swarm_training.averaging.sums import ChunkClip, capped, clipped_mean
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.numerics.test_centered_clip import by_the_formula as fixed_point
from tests.worlds.runs import CONFIG, SimulatedPeer, World, all_done, enter_all

MEMBERS, CHEATERS = 10, 3


def gradients(scale: float = 1000.0, n: int = 2000) -> tuple[Tensor, Tensor]:
    """[members, n], the cheaters' last, and the mean of the honest; noise has half of the direction's norm."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.randn(n, generator=generator)
    parts = centre / centre.norm() + 0.5 * torch.randn(MEMBERS, n, generator=generator) / n**0.5
    parts[-CHEATERS:] *= -scale
    return parts, parts[:-CHEATERS].mean(0)


def by_the_formula(parts: Tensor, weights: list[float]) -> Tensor:
    """Where CenteredClip stops if τ is the median distance to the coordinates' medians, in float64."""
    middle = median(parts.double())
    return fixed_point(parts, torch.tensor(weights), float(median((parts - middle).norm(dim=1))))


def median(x: Tensor) -> Tensor:
    """The mean of the two in the middle, if their number is even."""
    return x.sort(0).values[(len(x) - 1) // 2 : len(x) // 2 + 1].mean(0)


def filled(parts: Tensor, weights: list[float], order: list[int]) -> ChunkClip:
    chunk = ChunkClip(dict(enumerate(weights)))
    for member in order:
        assert not chunk.is_done
        chunk.put(member, parts[member].clone())
    return chunk


@pytest.mark.parametrize("weights", [[1.0] * MEMBERS, [4.0, 5.0, 6.0, 7.0, 8.0, 5.0, 4.0, 6.0, 5.0, 7.0]])
def test_a_chunk_is_where_the_formula_stops(weights: list[float]) -> None:
    parts, honest = gradients()
    clipped = filled(parts, weights, list(range(MEMBERS))).clipped()
    assert clipped is not None
    torch.testing.assert_close(clipped.double(), by_the_formula(parts, weights), rtol=0, atol=1e-4)
    assert float((clipped - honest).norm()) < 0.35
    assert float((parts.mean(0) - honest).norm()) > 250


def test_the_order_of_arrival_does_not_matter() -> None:
    parts, _ = gradients(n=50)
    parts, weights = parts[[0, 1, 2, 9]], [3.0, 1.0, 2.0, 5.0]
    expected = filled(parts, weights, [0, 1, 2, 3]).clipped()
    for order in itertools.permutations(range(4)):
        assert torch.equal(filled(parts, weights, list(order)).clipped(), expected)


def test_nobody_outweighs_the_others_by_what_it_says() -> None:
    assert capped([5.0, 4.0, 6.0, 1e18]).tolist() == [5.0, 4.0, 6.0, 10.0]
    parts, honest = gradients()
    weights = [8.0] * (MEMBERS - CHEATERS) + [1e12] * CHEATERS
    clipped = filled(parts, weights, list(range(MEMBERS))).clipped()
    assert clipped is not None and float((clipped - honest).norm()) < 3.0


def test_what_is_left_out_or_not_finite_does_not_count() -> None:
    parts, _ = gradients()
    chunk = ChunkClip({member: 1.0 for member in range(MEMBERS)})
    for member in range(5):
        chunk.put(member, parts[member].clone())
    spoilt = parts[5].clone()
    spoilt[3] = torch.nan
    chunk.put(5, spoilt)
    assert chunk.missing == {6, 7, 8, 9}
    for member in sorted(chunk.missing):
        chunk.leave_out(member)
    chunk.put(9, parts[9])
    clipped = chunk.clipped()
    assert clipped is not None and torch.equal(clipped, clipped_mean(parts[:5], torch.ones(5)))
    nothing = ChunkClip({0: 1.0})
    nothing.put(0, spoilt)
    assert nothing.clipped() is None


def test_what_most_agree_on_to_the_bit_is_the_result() -> None:
    """Embeddings of words that nobody has seen have no gradient."""
    parts = torch.zeros(5, 8)
    parts[4] = 7.0
    assert torch.equal(clipped_mean(parts, torch.ones(5)), torch.zeros(8))


async def test_a_chunk_is_clipped_once_and_the_loop_goes_on_meanwhile() -> None:
    parts, _ = gradients(n=100)
    calls = []

    async def in_thread(function: Any) -> Any:
        calls.append(function)
        await asyncio.sleep(0)
        return function()

    attempt = DirectAttempt({7: 0}, 0, {0: 1.0, 1: 2.0}, lambda number, mean: mean.numpy().tobytes(), in_thread)
    waiting = [asyncio.ensure_future(attempt.mean_of(7)) for _ in range(3)]
    for member in (1, 0):
        attempt.put(7, member, parts[member].clone())
        attempt.leave_out(member)
    attempt.end()
    expected = clipped_mean(parts[:2], torch.tensor([1.0, 2.0])).numpy().tobytes()
    assert await asyncio.gather(*waiting) == [expected] * 3
    assert len(calls) == 1


@IN_VIRTUAL_TIME
async def test_a_run_trains_among_3_of_10_that_send_reversed_gradients() -> None:
    """To the point where ½|x − goal|² is least. With the mean it goes away from it."""
    goal, steps = torch.linspace(-1.0, 1.0, 37), 8
    world, config = World(), replace(CONFIG, aggregation="centered_clip")
    peers = await enter_all(world, MEMBERS, target=50, config=config, optimizer=torch.optim.SGD)

    async def train(peer: SimulatedPeer) -> None:
        generator = torch.Generator().manual_seed(peer.number)
        scale = -1000.0 if peer.number < CHEATERS else 1.0
        while peer.state.step < steps:
            await asyncio.sleep(0.3)
            noise = 0.1 * torch.randn(37, generator=generator)
            await peer.step(scale * (peer.parameter.detach() - goal + noise), 5)

    await all_done([peer.spawn(train(peer)) for peer in peers])
    for step in range(1, steps + 1):
        histories = [peer.history[step] for peer in peers if step in peer.history]
        assert all(torch.equal(histories[0], other) for other in histories)
    error = float((peers[-1].parameter.detach() - goal).norm())
    start = float((peers[-1].history[0] - goal).norm())
    assert error < 0.6 * start
