"""What counts at a peer, with the engine's own sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, nan

import pytest
import torch

from swarm_protocol.errors import PeerBusy, PeerMoved
from swarm_training.stages.engine.accumulator import Accumulator
from swarm_training.stages.peer.counting import Counting
from tests.worlds.virtual_time import at_once


@dataclass
class Weights:
    parameters: list[torch.nn.Parameter] = field(default_factory=lambda: [torch.nn.Parameter(torch.zeros(2, 3))])


@dataclass(frozen=True)
class Gradient:
    value: float
    loss_sum: float | None = None
    num_tokens: int | None = None

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [torch.full((2, 3), self.value)]


def counting(elsewhere: frozenset[int] = frozenset(), told: Callable[[], object] = lambda: None) -> Counting:
    sums = Accumulator(Weights(), 8, torch.float64, 1 << 20, step=4)
    return Counting(sums, at_once, elsewhere.__contains__, told)


async def test_a_micro_batch_counts_when_it_is_committed_and_once() -> None:
    told: list[str] = []
    made = counting(told=lambda: told.append("more"))
    made.add(4, 2, "one", Gradient(1.0))
    made.add(4, 2, "two", Gradient(1.0))
    made.add(4, 5, "one", Gradient(10.0))
    assert not made.done
    assert await made.commit(4, 2, "one") and await made.commit(4, 2, "one") and await made.commit(4, 2, "two")
    assert not await made.commit(4, 7, "one")  # never computed here
    assert made.done == {2}
    assert told == ["more"] and (await made.vector(torch.float64)).tolist() == [1.0] * 6


async def test_what_counts_at_another_peer_does_not_count_here() -> None:
    told: list[str] = []
    made = counting(frozenset({3}), lambda: told.append("more"))
    made.add(4, 3, "one", Gradient(1.0))
    assert await made.commit(4, 3, "one")
    assert not made.done
    assert not told and not (await made.vector(torch.float64)).any()


async def test_nothing_is_added_while_the_sums_are_averaged() -> None:
    made = counting()
    for m in (0, 1):
        made.add(4, m, "one", Gradient(1.0))
    await made.commit(4, 0, "one")
    with made.closed():
        assert await made.commit(4, 0, "one")
        with pytest.raises(PeerBusy, match="are being averaged"):
            await made.commit(4, 1, "one")
    assert await made.commit(4, 1, "one")
    assert (await made.vector(torch.float64)).tolist() == [2.0] * 6


async def test_another_step_is_refused_and_what_is_given_up_is_gone() -> None:
    made = counting()
    made.add(4, 0, "one", Gradient(1.0))
    with pytest.raises(PeerMoved, match="of step 3: this peer is at step 4"):
        await made.commit(3, 0, "one")
    await made.commit(4, 0, "one")
    await made.discard()
    assert not made.done
    assert not (await made.vector(torch.float64)).any()


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([], (0.0, 0)),
        ([(6.0, 3), (2.0, 1)], (2.0, 2)),
        ([(6.0, 3), (nan, 1)], (inf, 2)),
        ([(6.0, 3), (None, None)], (2.0, 1)),
    ],
)
async def test_the_loss_is_the_mean_over_tokens(
    losses: list[tuple[float | None, int | None]], expected: tuple[float, int]
) -> None:
    made = counting()
    for m, (loss_sum, num_tokens) in enumerate(losses):
        made.add(4, m, "one", Gradient(1.0, loss_sum, num_tokens))
        await made.commit(4, m, "one")
    assert made.loss() == expected


async def test_nothing_is_pending_of_what_counts_elsewhere() -> None:
    """Its trainer has asked another peer, and would leave no room here until the end of the step."""
    elsewhere: set[int] = set()
    sums = Accumulator(Weights(), 8, torch.float64, 1 << 20, step=4)
    made = Counting(sums, at_once, elsewhere.__contains__, lambda: None)
    for m in range(3):
        made.add(4, m, "one", Gradient(1.0))
    elsewhere.update({0, 1})
    assert await made.commit(4, 0, "one") and sums.waiting == {1, 2}
    async with made.changing:  # a thread holds the lock of the sums
        made.drop_moot()
        assert sums.waiting == {1, 2}
    made.drop_moot()
    assert sums.waiting == {2} and made.done == frozenset()
