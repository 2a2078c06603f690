"""What counts at a peer, with the engine's own sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, nan

import pytest
import torch

from swarm_protocol.errors import PeerBusy
from swarm_training.optim.local_steps import LocalSteps, outer_optimizer
from swarm_training.run.state import TrainedState
from swarm_training.stages.engine.accumulator import Accumulator
from swarm_training.stages.peer.counting import Counting, StageDrift
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
    sums = Accumulator(Weights(), 8, torch.float64, 1 << 20)
    sums.clear(4)
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
    sums = Accumulator(Weights(), 8, torch.float64, 1 << 20)
    sums.clear(4)
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


@dataclass
class Local:
    """A peer with local steps of two micro-batches."""

    lr: float = 0.5
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        parameters = self.weights.parameters
        self.state = TrainedState(parameters, outer_optimizer(parameters), drifts=True)
        self.sums = Accumulator(self.weights, 8, torch.float64, 1 << 20)
        self.inner = torch.optim.SGD(parameters, self.lr, momentum=0.5)
        drift = StageDrift(self.sums, self.state, LocalSteps(self.inner, 2))
        self.counting = Counting(self.sums, at_once, frozenset().__contains__, lambda: None, drift, at_once)

    async def take(self, m: int, value: float) -> None:
        self.counting.add(0, m, "one", Gradient(value))
        assert await self.counting.commit(0, m, "one")
        self.counting.catch_up()  # as the next job of the compute thread does
        await self.counting.discard_failed()

    @property
    def weight(self) -> float:
        return float(self.weights.parameters[0][0, 0].detach())


async def test_local_steps_are_taken_as_batches_become_complete_and_with_what_is_left_at_the_end() -> None:
    made = Local()
    for m, (value, expected) in enumerate([(1.0, 0.0), (3.0, -1.0), (8.0, -1.0)]):
        await made.take(m, value)
        assert made.weight == expected
    # Momentum: 8 + 0.5 * 2. Then the drift 1 + 4.5, of three micro-batches.
    assert (await made.counting.vector(torch.float64)).tolist() == [3 * 5.5] * 6
    assert (await made.counting.vector(torch.float32)).tolist() == [3 * 5.5] * 6  # again, after a failed meeting
    assert made.weight == -5.5 and made.counting.done == {0, 1, 2}
    assert not made.sums.commit(0, 3, "one") and made.sums.commit(0, 0, "one")  # what was taken stays done


async def test_what_is_given_up_is_taken_back_and_a_step_of_the_run_keeps_the_inner_state() -> None:
    made = Local()
    for m in range(3):
        await made.take(m, 1.0)
    await made.counting.discard()
    assert (made.counting.done, made.sums.num_summed) == (frozenset(), 0) and made.counting.is_behind
    made.counting.add(0, 0, "one", Gradient(1.0))
    assert await made.counting.commit(0, 0, "one")  # counts, though the weights are still those of before
    made.counting.catch_up()
    assert made.weight == 0.0 and not made.inner.state and not made.counting.is_behind
    for m in range(1, 2):
        await made.take(m, 1.0)
    vector = await made.counting.vector(torch.float32)
    made.state.apply(vector / 2)
    made.counting.clear(1, is_next=True)
    assert made.weight == -0.5 and made.inner.state and made.sums.num_summed == 0
    made.counting.clear(1)
    assert not made.inner.state


@pytest.mark.parametrize("value", [inf, nan])
async def test_a_gradient_that_is_not_finite_moves_nothing(value: float) -> None:
    made = Local()
    for m, each in enumerate([value, 1.0, 1.0, 1.0]):
        await made.take(m, each)
    assert made.weight == -0.5 and made.counting.done == {0, 1, 2, 3}


@pytest.mark.parametrize("num_taken", [1, 2])
async def test_a_step_to_weights_that_are_not_finite_is_taken_back_with_all_that_counts_here(num_taken: int) -> None:
    made = Local(lr=1e38)
    for m in range(num_taken):
        await made.take(m, 100.0)
    assert not (await made.counting.vector(torch.float32)).any()
    assert (made.weight, made.counting.done, made.sums.num_summed) == (0.0, frozenset(), 0)


async def test_a_step_that_fails_is_taken_back_in_the_same_job_and_what_is_pending_then_does_not_count() -> None:
    made = Local(lr=1e38)
    for m in range(3):
        made.counting.add(0, m, "one", Gradient(100.0))
    for m in range(2):
        assert await made.counting.commit(0, m, "one")
    made.counting.catch_up()
    assert made.weight == 0.0  # before the event loop has heard of it: the next job computes with these weights
    assert await made.counting.commit(0, 2, "one")
    made.counting.catch_up()
    await made.counting.discard_failed()
    made.counting.catch_up()
    assert (made.weight, made.counting.done, made.sums.num_summed) == (0.0, frozenset(), 0)
    await made.counting.discard_failed()
    assert not made.counting.is_behind


async def test_an_error_in_a_local_step_leaves_the_weights_that_all_share() -> None:
    made = Local()
    await made.take(0, 1.0)

    def fail(*_: object) -> None:
        with torch.no_grad():
            made.weights.parameters[0].add_(1.0)
        raise MemoryError

    made.inner.register_step_pre_hook(fail)
    with pytest.raises(MemoryError):
        await made.take(1, 1.0)
    assert made.weight == 0.0 and made.counting.done == {0, 1}
    await made.counting.discard_failed()
    assert made.counting.done == frozenset()
