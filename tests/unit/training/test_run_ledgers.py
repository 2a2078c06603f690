"""The ledgers of simulated runs: sums of what the peers gave, whoever fails, joins, cannot be reached, or lies."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_training.averaging.group import Group
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.ledger.contributions import Contribution, countersign
from swarm_training.ledger.ledger import UserTotal
from swarm_training.ledger.signing import ContentKind, sign
from swarm_training.meeting.attending import Ballots
from swarm_training.pb import training_ledger_pb2 as ledger_pb
from swarm_training.pb import training_pb2 as pb
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.ledger.members import signed_rounds
from tests.unit.training.test_simulated_runs import merged
from tests.worlds.identities import identity
from tests.worlds.runs import CONFIG, SimulatedPeer, World, all_done, enter_all, simulate

pytestmark = IN_VIRTUAL_TIME

STEPS = 4
HEARD_S = 120.0  # in which a peer has asked all others for rounds, some of them several times


def train(peers: list[SimulatedPeer], until_step: int) -> list[asyncio.Task[Any]]:
    """At speeds of their own, with samples that tell them apart."""
    return [peer.spawn(peer.train(0.3 + 0.2 * (peer.number % 4), 4 + peer.number, until_step)) for peer in peers]


def expected(peers: list[SimulatedPeer]) -> dict[str, UserTotal]:
    """What they gave, counted at the peers themselves."""
    return {peer.peer_id: UserTotal(sum(peer.given.values()), len(peer.given)) for peer in peers if peer.given}


async def test_the_sum_is_what_all_peers_gave_also_those_who_join_and_those_behind_nat() -> None:
    world = World()
    peers = await enter_all(world, 3, target=40)
    hidden = SimulatedPeer.make(world, 3, target=40, config=TrainingConfig(client_mode=True, chunk_elements=4))
    await hidden.enter()
    tasks = train([*peers, hidden], STEPS)
    while peers[0].state.step < 2:
        await asyncio.sleep(0.1)
    joiner = SimulatedPeer.make(world, 4, target=40)
    await joiner.enter()
    everybody = [*peers, hidden, joiner]
    await all_done([*tasks, *train([joiner], STEPS)])
    await asyncio.sleep(HEARD_S)
    totals = expected(everybody)
    assert set(totals) == {peer.peer_id for peer in everybody} and totals[joiner.peer_id].rounds <= 2
    for peer in everybody:
        assert peer.peer.ledger.totals() == totals
    batches = sum(sum(peer.given.get(step, 0) for peer in everybody) for step in range(1, STEPS + 1))
    assert sum(total.samples for total in peers[0].peer.ledger.totals().values()) == batches


@pytest.mark.parametrize("seed", range(3))
async def test_two_leaders_of_one_step_credit_nobody_twice(seed: int) -> None:
    """The first tells one member of its decision and dies; the others hear of neither, and meet again."""
    world = World()
    peers = await enter_all(world, 5, target=60)
    await all_done(train(peers, 1))
    told: list[str] = []

    def strike(source: str, target: str, message: Any) -> None:
        if told or not isinstance(message, pb.MeetReply) or not message.HasField("commit"):
            return
        others = sorted(peer_id for peer_id in world.peers if peer_id != source)
        told.extend([source, others[seed]])
        world.cut |= {frozenset((source, other)) for other in others if other != told[1]}
        world.cut |= {frozenset((told[1], other)) for other in others if other != told[1]}
        asyncio.get_running_loop().call_later(0.2, world.kill, source)

    world.on_message = strike
    tasks = train(peers, STEPS)
    leader = lambda: next(peer for peer in peers if peer.peer_id == told[0])  # noqa: E731
    while not told or min(peer.state.step for peer in peers if peer.peer_id not in told) < 2:
        await asyncio.sleep(0.1)
    world.cut.clear()
    await all_done([tasks[peer.number] for peer in peers if peer is not leader()])
    await asyncio.sleep(1.0)
    of_step = [signed_rounds(world.peers[peer_id].peer.ledger)[1] for peer_id in (told[1], *world.peers.keys() - told)]
    assert len(set(of_step)) == 2
    totals = merged(peers, random.Random(seed))
    assert totals == merged(peers, random.Random(seed + 1))
    assert totals == expected(peers)


def entries_of(joins: Any) -> list[ledger_pb.SignedByPeer]:
    return [ledger_pb.SignedByPeer.FromString(join.contribution) for join in joins]


def at(step: int) -> Moment:
    return Moment(0, step)


def more_for_itself(joins: Any, leader: int) -> list[ledger_pb.SignedByPeer]:
    own = identity(leader)
    contents = [ledger_pb.Contribution.FromString(entry.content) for entry in entries_of(joins)]
    others = [entry for entry, of in zip(entries_of(joins), contents, strict=True) if of.peer_id != own.peer_id]
    return [*others, Contribution("toy", at(contents[0].step), own.peer_id, 100).signed(own)]


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda joins, _leader: [*entries_of(joins), entries_of(joins)[0]], "a round has a peer twice"),
        (more_for_itself, "the round credits peers with more samples than they had"),
        (lambda _joins, _leader: [], "the ledger lacks step|has credited this peer with 0 samples"),
    ],
)
def test_members_refuse_the_round_of_a_leader_that_lies_and_train_on(
    lie: Callable[[Any, int], list[ledger_pb.SignedByPeer]], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        peers = await enter_all(World(), 3, target=40)
        for peer in peers:
            peer.peer._book.crediting.countersign = lying(peer.number)
        await all_done(train(peers, 2))
        await asyncio.sleep(1.0)
        assert {size for peer in peers for size in peer.groups.values()} == {3}
        assert all(peer.peer.ledger.totals() == {} for peer in peers)

    def lying(number: int) -> Callable[[Any], bytes]:
        def sign_lie(joins: Any) -> bytes:
            step = ledger_pb.Contribution.FromString(entries_of(joins)[0].content).step
            return countersign("toy", at(step), lie(joins, number), 1.0, identity(number))

        return sign_lie

    simulate(scenario)
    assert re.search(reason, caplog.text)


def test_a_leader_takes_no_contribution_but_what_its_peer_joins_with(caplog: pytest.LogCaptureFixture) -> None:
    """More than it gives, of an earlier step, of another, noise; nor more than ``max_samples`` of who is honest."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        peers = await enter_all(World(), 6, target=40)
        limits = peers[0].peer.ledger.limits
        cheats: list[Callable[[int], bytes]] = [
            lambda samples: made(1, peers[1], samples + 1),
            lambda samples: made(2, peers[2], samples, step=0),
            lambda samples: made(3, peers[0], samples),
            lambda _samples: b"noise",
        ]
        for peer, cheat in zip(peers[1:5], cheats, strict=True):
            peer.peer._book.crediting.own = cheat
        tasks = train(peers[1:], 3)
        await peers[0].step(torch.ones(37), limits.max_samples + 5)
        await all_done([*tasks, *train(peers[:1], 3)])
        await asyncio.sleep(1.0)
        honest, other, first = peers[0], peers[5], peers[2]
        own = limits.max_samples + honest.given[2] + honest.given[3]
        assert honest.given[1] > limits.max_samples
        assert honest.peer.ledger.totals() == {
            honest.peer_id: UserTotal(own, 3),
            **expected([other]),
            first.peer_id: UserTotal(first.given[1], 1),  # of the first step it was right
        }

    def made(number: int, of: SimulatedPeer, samples: int, step: int | None = None) -> bytes:
        content = Contribution("toy", at(of.state.step if step is None else step), of.peer_id, samples)
        if of.number == number:
            return content.signed(identity(number)).SerializeToString()
        message = ledger_pb.Contribution(run="toy", step=content.moment.step, peer_id=of.peer_id, samples=samples)
        return sign(ContentKind.CONTRIBUTION, message, identity(number), b"").SerializeToString()

    simulate(scenario)
    for reason in ("samples, and it joins with", "that of another peer, run or step", "is not signed by the peer"):
        assert reason in caplog.text


async def test_a_peer_that_claims_16_million_samples_counts_as_far_as_the_run_allows() -> None:
    """Towards the batch, in the mean and in the ledger; whoever of them leads."""
    config = replace(CONFIG, max_samples=16)
    liar, *honest = await enter_all(World(), 4, target=40, config=config, optimizer=torch.optim.SGD)

    async def give(peer: SimulatedPeer, gradient: torch.Tensor, samples: int) -> None:
        await peer.step(gradient, samples)
        while peer.state.step < 1:
            await asyncio.sleep(0.3)
            await peer.drive(peer.share.report())

    lying = liar.spawn(give(liar, -torch.ones(37), 16_000_000))
    await asyncio.sleep(5.0)
    assert liar.state.step == 0  # it does not complete the batch
    await all_done([lying, *(peer.spawn(give(peer, torch.ones(37), 8)) for peer in honest)])
    await asyncio.sleep(HEARD_S)
    for peer in (liar, *honest):
        moved = peer.history[1] - peer.history[0]
        torch.testing.assert_close(moved, torch.full((37,), -0.1 * (3 * 8 - 16) / 40))
        credited = {each.peer_id: UserTotal(16 if each is liar else 8, 1) for each in (liar, *honest)}
        assert peer.peer.ledger.totals() == credited


def test_what_a_peer_has_given_is_what_is_behind_the_result_that_it_holds() -> None:
    """Through groups that take the result over, whatever it has gathered by then; nothing if it was in none before."""

    def group(name: str, ballot: int, continues: str = "") -> Group:
        return Group(name, 3, ballot, (), 1.0, continues, (1.0,), ("a",))

    member, newcomer = Ballots(), Ballots()
    member.accept(group("first", 1), b"digest", 5, torch.ones(1))
    for name, ballot, before in (("second", 2, "first"), ("third", 3, "second")):
        for ballots in (member, newcomer):
            ballots.accept(group(name, ballot, before), b"digest", 9, torch.ones(1))
        assert (member.given, newcomer.given) == (5, 0)
        assert member.accepted == newcomer.accepted and member.accepted.group == name


async def test_a_founder_that_trains_alone_is_not_credited() -> None:
    """Nobody else has seen it."""
    peers = await enter_all(World(), 1, target=10)
    await all_done(train(peers, 2))
    assert peers[0].given and peers[0].peer.ledger.totals() == {}


async def test_who_gives_wrong_rounds_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    peers = await enter_all(world, 2, target=20)
    await all_done(train(peers, 2))
    asked: list[str] = []

    async def lying(peer_id: str, _request: pb.RoundsRequest) -> pb.RoundsReply:
        asked.append(peer_id)
        rounds = [bytearray(data) for data in signed_rounds(peers[0].peer.ledger)]
        rounds[0][-20] ^= 1  # of a signature
        return pb.RoundsReply(rounds=map(bytes, rounds), has_more=True)

    for peer in peers:
        peer.peer.rounds = lying
    joiner = SimulatedPeer.make(world, 2, target=20)
    await joiner.enter()
    await asyncio.sleep(200.0)
    assert asked.count(joiner.peer_id) == 2  # each of them once
    assert joiner.peer.ledger.totals() == {} and "has given a wrong round: a signature of" in caplog.text


async def test_signatures_are_checked_for_others_no_faster_than_is_bearable() -> None:
    """Also if somebody sends more pages without end."""
    world = World()
    peers = await enter_all(world, 2, target=20)
    first, second = identity(0), identity(1)
    steps = range(200)
    peers[0].peer._standing.update(step=len(steps))
    entry = Contribution("toy", at(0), first.peer_id, 5)
    rounds = []
    for step in steps:
        entries = [replace(entry, moment=at(step)).signed(first)]
        rounds.append(countersign("toy", at(step), entries, 1.0, second))

    async def endless(_peer_id: str, request: pb.RoundsRequest) -> pb.RoundsReply:
        known = len(request.known) // 8
        return pb.RoundsReply(rounds=rounds[known : known + 20], has_more=True)

    peers[1].peer.rounds = endless
    began_s = asyncio.get_running_loop().time()
    while peers[0].peer.ledger.num_rounds < len(steps):
        await asyncio.sleep(0.1)
    assert asyncio.get_running_loop().time() - began_s >= 0.95 * 2 * len(steps) / 200
