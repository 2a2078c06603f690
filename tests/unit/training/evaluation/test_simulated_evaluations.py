"""Evaluations of runs: real peers in virtual time, beside the loss that one plain process computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm_training.core.moment import Moment
from swarm_training.evaluation.evaluation import Evaluation, Snapshot
from swarm_training.evaluation.policy import evaluators_of
from swarm_training.optim.local_steps import LocalSteps
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.runs import CONFIG, SimulatedPeer, World, all_done, enter_all

pytestmark = IN_VIRTUAL_TIME

HELD_OUT = torch.randn(20, 37, generator=torch.Generator().manual_seed(9))
SECONDS = 0.8  # that an evaluation takes; a step takes 0.2


class Distance(nn.Module):
    """A model whose loss is the mean squared distance of its parameters from a sample."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, samples: Tensor) -> Tensor:
        return ((samples - self.weight) ** 2).mean()


def losses(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    for batch in HELD_OUT.split(8):
        yield model(batch), len(batch)


def plain_loss(weight: Tensor) -> float:
    """What one process computes with these parameters, all samples at once."""
    return float(((HELD_OUT.double() - weight.double()) ** 2).mean())


@dataclass
class Threads:
    """Threads of which each evaluation takes a while.

    Attributes:
        begun: by moment, the peers that have begun to evaluate, in their order.
        on_begin: called with the moment and the peer.
    """

    begun: list[tuple[Moment, str]] = field(default_factory=list)
    on_begin: Callable[[Moment, str], None] = lambda moment, peer_id: None
    peers: list[SimulatedPeer] = field(default_factory=list)

    async def __call__(self, function: Callable[[], Any]) -> Any:
        held = getattr(function, "__self__", None)
        if isinstance(held, Snapshot):
            peer, moment = self._evaluating(held)
            self.begun.append((moment, peer.peer_id))
            self.on_begin(moment, peer.peer_id)
            await asyncio.sleep(SECONDS)
        return function()

    def _evaluating(self, held: Snapshot) -> tuple[SimulatedPeer, Moment]:
        for peer in self.peers:
            pending = peer.peer.evaluator._pending
            if pending is not None and pending.held is held:
                return peer, pending.moment
        raise AssertionError("nobody holds these parameters")


def evaluated(every: int, **numbers: Any) -> Callable[[nn.Parameter], Evaluation]:
    return lambda parameter: Evaluation(Distance(parameter), losses, every=every, **numbers)


async def enter(world: World, threads: Threads, count: int, **options: Any) -> list[SimulatedPeer]:
    peers = await enter_all(world, count, in_thread=threads, **options)
    threads.peers += peers
    while any(len(peer.peer.view().all) < count for peer in peers):
        await asyncio.sleep(0.1)
    return peers


def descent(parameter: nn.Parameter) -> LocalSteps:
    return LocalSteps(torch.optim.SGD([parameter], lr=0.05))


@pytest.mark.parametrize("local", [False, True])
async def test_if_the_evaluator_dies_another_finds_the_same_loss_while_all_train_on(local: bool) -> None:
    first, every, last = Moment(0, 6), 6, 14
    options: dict[str, Any] = {"local": descent} if local else {}
    world, threads = World(), Threads()
    peers = await enter(world, threads, 4, target=40, evaluation=evaluated(every), **options)
    order = evaluators_of("toy", first, [peer.peer_id for peer in peers])
    steps_at: list[int] = []

    def begin(moment: Moment, peer_id: str) -> None:
        if moment == first:
            steps_at.append(max(peer.state.step for peer in peers))
            if peer_id == order[0]:
                asyncio.get_running_loop().call_later(SECONDS / 2, world.kill, peer_id)

    threads.on_begin = begin
    await all_done([peer.spawn(peer.train(0.2, 10, last)) for peer in peers])
    assert [peer_id for moment, peer_id in threads.begun if moment == first] == list(order[:2])
    living = [peer for peer in peers if not peer.is_dead]
    assert len(living) == 3
    while any(peer.peer.evaluator.is_pending() for peer in living):
        await asyncio.sleep(0.1)
    records = {peer.peer_id: peer.peer.own.held_out for peer in living}
    found = records[order[1]]
    assert found is not None and found.samples == len(HELD_OUT)
    histories = [peer.peer.evaluator.history for peer in living]
    assert histories[0].losses and histories[1:] == histories[:-1]
    for loss in (*histories[0].losses, found):
        assert loss.loss == pytest.approx(plain_loss(living[0].history[loss.step]), rel=1e-6)
    assert histories[0].losses[0].moment == first, "the loss of the peer that died is lost"
    assert steps_at[1] > steps_at[0], "the others have waited"
    shown = {peer.peer.own.best_held_out for peer in living}
    assert shown == {histories[0].best} and histories[0].newest == living[0].peer.own.newest_held_out
    assert all(torch.equal(living[0].history[last], peer.history[last]) for peer in living)


async def test_the_run_ends_for_all_at_the_same_step_and_gives_the_last_state_to_who_is_late() -> None:
    """The gradients lead away from the held-out data, and one peer computes for long while the others end the run."""
    world, threads = World(), Threads()
    config = replace(CONFIG, straggler_s=1.0)

    async def train(peer: SimulatedPeer, is_late: bool) -> None:
        while not peer.peer.reason_of_end:
            await asyncio.sleep(8.0 if is_late and len(peer.peer.evaluator.history.losses) == 2 else 0.2)
            if not peer.peer.reason_of_end:
                await peer.step(HELD_OUT.mean(0) - peer.parameter.detach(), 10)
        await peer.peer.leave()
        world.kill(peer.peer_id)  # as a process that ends

    peers = await enter(world, threads, 4, target=30, config=config, evaluation=evaluated(3, patience=2))
    late = peers[3]
    await all_done([peer.spawn(train(peer, peer is late)) for peer in peers])
    last = {peer.state.moment for peer in peers}
    assert len(last) == 1 and len({peer.peer.reason_of_end for peer in peers}) == 1
    assert "the lowest is" in late.peer.reason_of_end and "of step 3" in late.peer.reason_of_end
    assert all(torch.equal(peer.parameter, peers[0].parameter) for peer in peers)
    assert len(peers[0].groups) > len(late.groups) + 1, "nobody was late"
    assert len(peers[0].peer.evaluator.history.losses) == 3


async def test_a_peer_that_cannot_compute_the_loss_leaves_it_to_the_next() -> None:
    world, threads = World(), Threads()

    def fails(_model: nn.Module) -> Iterator[tuple[float, int]]:
        raise RuntimeError("out of memory")

    peers = await enter(world, threads, 1, target=10, evaluation=evaluated(1))
    bad = SimulatedPeer.make(
        world,
        1,
        target=10,
        in_thread=threads,
        evaluation=lambda parameter: Evaluation(Distance(parameter), fails, every=1),
    )
    await bad.enter()
    threads.peers.append(bad)
    await all_done([peer.spawn(peer.train(2.0, 5, 8)) for peer in (*peers, bad)])
    while peers[0].peer.evaluator.is_pending():
        await asyncio.sleep(0.1)
    assert bad.peer.own.held_out is not None and bad.peer.own.held_out.samples == 0
    by_bad = {moment for moment, peer_id in threads.begun if peer_id == bad.peer_id}
    known = {loss.moment: loss.loss for loss in peers[0].peer.evaluator.known().losses}
    assert by_bad & known.keys()
    for moment, loss in known.items():
        assert loss == pytest.approx(plain_loss(peers[0].moments[moment]), rel=1e-6)
