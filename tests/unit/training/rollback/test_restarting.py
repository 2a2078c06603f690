"""Where a run goes on after all of its peers have ended: at the newest checkpoint that they show."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from swarm_training.checkpoints.state_file import StateFile, UnreadableState
from swarm_training.core.moment import Moment
from swarm_training.core.record import HeldOutLoss, Kept
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.rollback.restarting import moment_of, newest_shown, offer_of
from swarm_training.run.transfer.receiving import OfferedState
from tests.marks import IN_VIRTUAL_TIME
from tests.worlds.runs import CONFIG, SimulatedPeer, World, all_done, enter_all

pytestmark = IN_VIRTUAL_TIME

WAITING = replace(CONFIG, restart_wait_s=10.0)


def offers(*moments: tuple[int, int], digest: bytes = b"") -> list[Kept]:
    return [offer_of(Moment(*moment), digest or repr(moment).encode()) for moment in moments]


@pytest.mark.parametrize(
    ("own", "others", "needs_half", "expected"),
    [
        ((0, 100), [], True, (0, 100)),
        ((0, 100), [(0, 200)], True, (0, 200)),
        ((0, 100), [(0, 50), (0, 100)], False, (0, 100)),
        ((0, 100), [(0, 100), (0, 200)], False, (0, 200)),
        ((0, 100), [(0, 100), (0, 200)], True, (0, 100)),  # one of three
        ((0, 100), [(0, 150), (0, 9999)], True, (0, 150)),  # two of three have come to 150, and one of them further
        ((0, 100), [(0, 100), (0, 200), (0, 300)], True, (0, 200)),
        ((2, 110), [(1, 200)], False, (2, 110)),  # the run has gone back since then
        ((1, 200), [(2, 110)], False, (2, 110)),
    ],
)
def test_the_newest_that_enough_peers_show_is_taken(
    own: tuple[int, int], others: list[tuple[int, int]], needs_half: bool, expected: tuple[int, int]
) -> None:
    (first,) = offers(own)
    assert moment_of(newest_shown(first, offers(*others), needs_half)) == Moment(*expected)
    assert newest_shown(first, list(reversed(offers(*others))), needs_half) == newest_shown(
        first, offers(*others), needs_half
    )


def test_of_different_states_of_one_moment_that_of_most_is_taken() -> None:
    (own,) = offers((0, 1))
    others = offers((0, 5), digest=b"a") * 2 + offers((0, 5), digest=b"b")
    assert newest_shown(own, others, needs_half=True).state_digest == b"a"
    same = offer_of(Moment(0, 1), b"other")
    assert newest_shown(own, [same, same], needs_half=True) is own


def history_of(step: int) -> EvaluationHistory:
    """The losses that a peer with the checkpoint of this step knows: one of each step."""
    return EvaluationHistory.of(HeldOutLoss(Moment(0, each), 1 / each, 7) for each in range(1, step + 1))


async def restarted(steps: list[int], lies: tuple[int, ...] = ()) -> tuple[list[SimulatedPeer], dict[int, StateFile]]:
    """Peers that come back with checkpoints of these steps; the first of them founds the run. ``lies``: who offers what
    it does not have."""
    truth = SimulatedPeer.make(World(), 0, target=10, config=WAITING)
    saved: dict[int, StateFile] = {}
    for step in range(max(steps) + 1):
        saved[step] = truth.state.snapshot()[1]
        truth.state.apply(torch.full((truth.state.length,), float(step + 1)))
    world, peers = World(), []
    for number, step in enumerate(steps):
        peers.append(SimulatedPeer.make(world, number, target=10, config=WAITING))
        peers[-1].state.load(Moment(0, step), saved[step])

    async def come_back(peer: SimulatedPeer, step: int) -> None:
        await asyncio.sleep(peer.number)
        await peer.peer.find_others()
        peer.peer.start()
        digest = b"0" * 32 if peer.number in lies else peer.state.digest()
        await peer.peer.offer_state(Moment(0, step), digest, history_of(step))
        while not peer.peer.own.state_digest:
            await peer.drive(peer.share.load())
        peer.peer.withdraw_offers()

    peers[0].peer.start()
    again = peers[0].share.found(Moment(0, steps[0]), [], history_of(steps[0]))
    tasks = [peers[0].spawn(peers[0].drive(again))]
    tasks += [peer.spawn(come_back(peer, step)) for peer, step in zip(peers[1:], steps[1:], strict=True)]
    await all_done(tasks)
    return peers, saved


@pytest.mark.parametrize(
    ("steps", "lies", "expected"),
    [
        ([2, 4], (), 4),
        ([2, 2, 4, 4], (), 4),
        ([3, 2], (), 3),
        ([2, 2, 4], (), 2),  # strangers could say that
        ([2, 3, 4], (2,), 3),  # half of those whose checkpoints are right
    ],
)
async def test_a_run_goes_on_from_the_newest_checkpoint_whoever_has_it(
    steps: list[int], lies: tuple[int, ...], expected: int
) -> None:
    peers, saved = await restarted(steps, lies)
    reference = SimulatedPeer.make(World(), 0, target=10, config=WAITING)
    reference.state.load(Moment(1, expected), saved[expected])
    for peer in peers:
        assert peer.state.moment == Moment(1, expected) and not peer.peer.own.offers
        assert peer.state.digest() == reference.state.digest()
        assert peer.peer.evaluator.history == history_of(expected)
    await all_done([peer.spawn(peer.train(0.5, 5, until_step=expected + 2)) for peer in peers])
    await asyncio.sleep(1.0)
    assert len({peer.state.digest() for peer in peers}) == 1


async def test_who_has_the_ledger_of_the_run_but_no_checkpoint_of_it_looks_for_one_before_it_founds_the_run() -> None:
    before = await enter_all(World(), 2, target=10)
    await all_done([peer.spawn(peer.train(0.5, 5, until_step=3)) for peer in before])
    ledger = before[0].peer.ledger
    assert ledger.newest is not None
    saved = before[1].state.snapshot()[1]
    world = World()
    founder, other = (SimulatedPeer.make(world, number, target=10, config=WAITING) for number in range(2))
    founder.peer.ledger = ledger
    founder.peer.start()
    founding = founder.spawn(founder.drive(founder.share.found(None, [], EvaluationHistory())))
    await asyncio.sleep(1.0)
    await other.peer.find_others()
    other.peer.start()
    other.state.load(Moment(0, 3), saved)
    await other.peer.offer_state(Moment(0, 3), other.state.digest())
    await all_done([founding])
    assert founder.state.moment == Moment(1, 3)
    assert founder.state.digest() == before[1].state.digest()


async def test_a_new_run_begins_at_once() -> None:
    founder = SimulatedPeer.make(World(), 0, target=10, config=WAITING)
    begun_s = asyncio.get_running_loop().time()
    await founder.drive(founder.share.found(None, [], EvaluationHistory()))
    assert founder.peer.own.state_digest
    assert asyncio.get_running_loop().time() - begun_s < WAITING.restart_wait_s


async def test_no_run_is_founded_on_a_state_that_was_taken_over_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = SimulatedPeer.make(World(), 0, target=10, config=WAITING)
    offered = OfferedState(Moment(0, 4), b"4" * 32, EvaluationHistory(), peer.state.snapshot()[1])

    def fails(*_: object) -> None:
        raise UnreadableState("the disk has failed")

    monkeypatch.setattr(peer.state, "load", fails)
    calls = peer.share.found(Moment(0, 1), [], EvaluationHistory())
    next(calls).close()  # the peer waits for offers
    calls.send(None).close()  # and asks for them
    with pytest.raises(UnreadableState, match="the disk has failed"):
        calls.send(offered)
