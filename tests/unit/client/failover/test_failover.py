"""Failover decides what to do about hops that fail: told what happens, by hand and by chance, without a network."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swarm_client.failover.failover import CallProgress, FailoverState, decide
from swarm_client.failover.messages import (
    Abandon,
    AbandonNew,
    Ask,
    AskReplica,
    Blame,
    Connect,
    Connected,
    Event,
    Failed,
    FailoverHop,
    GiveUp,
    HopsAsked,
    HopsOpened,
    Instruction,
    NotConnected,
    OpenHops,
    ReplicaAsked,
    ReplicaLost,
    Resume,
    ServersFull,
    Splice,
    StartOver,
    UseReplica,
)
from swarm_client.failover.replay import HopProgress, Taken
from swarm_protocol.errors import PeerBusy, PeerUnavailable, SessionLost, SwarmError
from swarm_protocol.span import Span

GONE = PeerUnavailable("gone", "peer", Span(0, 2))
FULL = PeerBusy("full", "peer", Span(0, 2))
STEPS = (Taken(100, 10, 11), Taken(101, 11, 12))  # of a call that begins at position 10
CALL = CallProgress(STEPS, start=10, answered=99, past=(Taken(98, 0, 9), Taken(99, 9, 10)))
DONE = HopProgress(101, 12)


def chain(length: int) -> tuple[FailoverHop, ...]:
    """Hops of two blocks each, numbered from 0."""
    return tuple(FailoverHop(n, Span(2 * n, 2 * n + 2), f"peer {n}") for n in range(length))


def after(state: FailoverState, *events: Event) -> tuple[FailoverState, list[Instruction]]:
    """The last instructions."""
    for event in events:
        state, instructions = decide(state, event)
    return state, instructions


def others(state: FailoverState, *failed: int) -> HopsAsked:
    """All others have got through with everything."""
    return HopsAsked({link.number: DONE for link in state.links if link.number not in failed}, {})


def test_others_are_asked_and_the_one_before_is_held():
    _, instructions = after(FailoverState(CALL, chain(4)), Failed({2: GONE}))
    assert instructions == [Blame({2: GONE}, avoid=True), Ask((0, 1, 3), frozenset({1}))]


def test_the_first_hop_gets_everything_from_the_client():
    state = FailoverState(CALL, chain(3))
    state, instructions = after(state, Failed({0: GONE}), others(state, 0))
    assert instructions == [AskReplica(0)]
    state, (opening,) = after(state, ReplicaAsked(None))
    assert (opening.span, opening.instead, opening.after) == (Span(0, 2), 0, 1)
    assert (opening.replay.history, opening.replay.resend) == ((0, 10), STEPS)
    assert opening.replay.sent_number == 101  # the hop after it has everything already
    state, instructions = after(state, HopsOpened())
    assert instructions == [Connect(None, opening.replay, number=1)]
    new = FailoverHop(7, Span(0, 2), "peer 7")
    state, instructions = after(state, Connected((new,)))
    assert instructions == [Splice(range(1), GONE, 10, from_replica=False), Resume()]
    assert state.links == (new, *chain(3)[1:])


def test_neighbours_are_replaced_together_and_others_from_the_last_on():
    state = FailoverState(CALL, chain(5))
    failed = {number: GONE for number in (0, 2, 3)}
    state, (opening,) = after(state, Failed(failed), others(state, *failed))
    assert (opening.span, opening.instead, opening.after) == (Span(4, 8), 2, 4)
    state, (connect,) = after(state, HopsOpened())
    assert connect.before == 1
    state, (splice, then) = after(state, Connected((FailoverHop(8, Span(4, 8), "peer 8"),)))
    assert (splice.gap, then) == (range(2, 4), AskReplica(0))
    assert [link.number for link in state.links] == [0, 1, 8, 4]


def test_who_has_not_what_was_replayed_to_it_is_not_ready():
    links = chain(3)
    links = (*links[:2], replace(links[2], replayed_number=5, name="late"))
    state, (blame, _) = after(
        FailoverState(CALL, links), Failed({0: GONE}), HopsAsked({1: DONE, 2: HopProgress(4, 9)}, {})
    )
    assert isinstance(blame.errors[2], SessionLost) and str(blame.errors[2]) == "server late was not ready yet"
    assert state.failed.keys() == {0, 2}


class TestReplica:
    def asked(self, answer: ReplicaAsked, length: int = 3) -> tuple[FailoverState, list[Instruction]]:
        """About the replica of hop 1, whose neighbours have got through with everything."""
        state = FailoverState(CALL, chain(length))
        return after(state, Failed({1: GONE}), others(state, 1), answer)

    def test_one_that_has_all_takes_over_at_once(self):
        state, instructions = self.asked(ReplicaAsked(DONE, next_number=2))
        assert instructions == [UseReplica(2, reroute=False, resend=())]
        state, (connect,) = after(state, HopsOpened())
        assert (connect.before, connect.number, connect.replay.resend) == (0, 99, ())
        _, (splice, _) = after(state, Connected((FailoverHop(6, Span(2, 4), "peer 6"),)))
        assert (splice.from_replica, splice.replayed_tokens) == (True, 0)

    def test_it_is_sent_what_it_has_missed(self):
        state, _ = self.asked(ReplicaAsked(HopProgress(100, 11), next_number=2))
        _, (connect,) = after(state, HopsOpened())
        assert connect.replay.resend == STEPS[1:]

    def test_it_sends_on_what_the_failed_hop_did_not(self):
        state = FailoverState(CALL, chain(3))
        known = HopsAsked({0: DONE, 2: HopProgress(100, 11)}, {})
        _, instructions = after(state, Failed({1: GONE}), known, ReplicaAsked(DONE, next_number=2))
        assert instructions == [UseReplica(2, reroute=True, resend=(101,))]

    def test_it_is_rerouted_if_the_next_hop_is_another(self):
        _, instructions = self.asked(ReplicaAsked(DONE, next_number=5))
        assert instructions == [UseReplica(2, reroute=True, resend=())]

    @pytest.mark.parametrize(
        ("standing", "length"),
        [(HopProgress(50, 4), 3), (DONE, 2)],
        ids=["too-old", "outputs-that-the-client-never-got"],
    )
    def test_one_of_no_use_is_let_go(self, standing, length):
        _, (abandon, opening) = self.asked(ReplicaAsked(standing, next_number=2), length)
        assert abandon == AbandonNew() and opening.span == Span(2, 4)

    @pytest.mark.parametrize("limit", [1, 0])
    def test_one_position_always_fits(self, limit):
        _, instructions = self.asked(ReplicaAsked(HopProgress(98, 9), next_number=2, max_step_tokens=limit))
        assert isinstance(instructions[-1], UseReplica)

    def test_what_it_has_missed_must_fit_into_a_step(self):
        progress = replace(CALL, batch_size=3)
        state = FailoverState(progress, chain(3))
        answer = ReplicaAsked(HopProgress(98, 9), next_number=2, max_step_tokens=2)
        _, instructions = after(state, Failed({1: GONE}), others(state, 1), answer)
        assert [type(instruction) for instruction in instructions] == [AbandonNew, OpenHops]

    def test_others_take_over_if_it_is_lost(self):
        state, _ = self.asked(ReplicaAsked(DONE, next_number=5))
        state, (abandon, opening) = after(state, ReplicaLost())
        assert abandon == AbandonNew() and opening.span == Span(2, 4)
        _, (connect,) = after(state, HopsOpened())
        assert connect.number == 1 and connect.replay.history == (0, 10)


class TestEnds:
    def test_late(self):
        _, instructions = after(FailoverState(CALL, chain(3)), Failed({1: GONE}, is_late=True))
        assert instructions[-1] == GiveUp(Span(2, 4))

    def test_servers_without_room_have_time(self):
        _, instructions = after(FailoverState(CALL, chain(3)), Failed({1: FULL}, is_late=True))
        assert isinstance(instructions[-1], Ask)

    def test_outputs_that_only_the_failed_had(self):
        state = FailoverState(replace(CALL, starts_over=True), chain(3))
        _, instructions = after(state, Failed({1: GONE}))
        assert instructions[1:] == [Abandon((1,)), StartOver()]

    def test_no_room(self):
        state = FailoverState(CALL, chain(3))
        _, instructions = after(state, Failed({1: GONE}), others(state, 1), ReplicaAsked(None), ServersFull())
        assert instructions == [StartOver()]

    def test_steps_too_long_for_the_new_ones(self):
        state = FailoverState(CALL, chain(3))
        _, instructions = after(
            state, Failed({1: GONE}), others(state, 1), ReplicaAsked(None), HopsOpened(), NotConnected()
        )
        assert instructions == [AbandonNew(), StartOver()]


def test_nobody_is_blamed_if_all_fail_at_once():
    _, (blame, _) = after(FailoverState(CALL, chain(3)), Failed({number: GONE for number in range(3)}))
    assert not blame.avoid
    _, (blame, _) = after(FailoverState(CALL, chain(1)), Failed({0: GONE}))
    assert blame.avoid


class World:
    """Carries out instructions, with mishaps, and checks that they make sense."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.hops = list(chain(self.chance.randint(1, 5)))
        self.alive = {hop.number for hop in self.hops}
        self.new: list[FailoverHop] = []
        self.numbers = iter(range(100, 10**6))

    def run(self) -> Instruction:
        state, event = FailoverState(CALL, tuple(self.hops)), self.failure()
        for _ in range(1000):
            state, instructions = decide(state, event)
            for instruction in instructions:
                if isinstance(instruction, Resume | StartOver | GiveUp):
                    assert instruction is instructions[-1]
                    return instruction
                event = self.carry_out(instruction) or event
            assert [hop.number for hop in self.hops] == [link.number for link in state.links]
        raise AssertionError("no end")

    def failure(self) -> Failed:
        return Failed(self.kill(self.chance.sample(self.hops, self.chance.randint(1, len(self.hops)))))

    def kill(self, hops: list[FailoverHop]) -> dict[int, SwarmError]:
        self.alive -= {hop.number for hop in hops}
        return {hop.number: GONE for hop in hops}

    def links(self, span: Span) -> list[FailoverHop]:
        parts = [Span(start, start + 2) for start in range(span.start, span.end, 2)]
        hops = [FailoverHop(next(self.numbers), part, "new") for part in parts]
        self.alive |= {hop.number for hop in hops}
        return hops

    def unlucky(self) -> bool:
        return self.chance.random() < 0.15

    def carry_out(self, instruction: Instruction) -> Event | None:
        present = {hop.number: hop for hop in self.hops}
        match instruction:
            case Ask(hops, hold):
                assert hold <= set(hops) <= self.alive
                assert present.keys() - hops == present.keys() - self.alive
                errors = self.kill([present[number] for number in hops if self.unlucky()])
                numbers = {number: self.chance.choice([99, 100, 101]) for number in hops if number not in errors}
                return HopsAsked({hop: HopProgress(number, number - 89) for hop, number in numbers.items()}, errors)
            case AskReplica(of):
                assert of in present.keys() - self.alive
                if self.chance.random() < 0.5:
                    return ReplicaAsked(None)
                self.new = self.links(present[of].span)
                number = self.chance.choice([40, 98, 99, 100, 101])
                return ReplicaAsked(HopProgress(number, number - 89), self.chance.choice([*present, None]), 4)
            case UseReplica(after):
                assert self.new and (after is None or after in self.alive)
                return ReplicaLost() if self.unlucky() else HopsOpened()
            case OpenHops(span, instead, after):
                assert not self.new and instead in present.keys() - self.alive
                assert after is None or present[after].span.start == span.end
                if self.chance.random() < 0.02:
                    return ServersFull()
                self.new = self.links(span)
                return HopsOpened()
            case Connect(before):
                assert self.new and (before is None or present[before].span.end == self.new[0].span.start)
                if before is not None and self.unlucky():
                    return NotConnected(self.kill([present[before]]))
                return Connected(tuple(self.new))
            case Splice(gap):
                self.hops[gap.start : gap.stop], self.new = self.new, []
            case AbandonNew():
                self.alive -= {hop.number for hop in self.new}
                self.new = []
        return None


@pytest.mark.parametrize("seed", range(100))
def test_the_chain_is_whole_in_the_end(seed):
    world = World(seed)
    before = world.hops[0].span.start, world.hops[-1].span.end
    end = world.run()
    assert not world.new or isinstance(end, StartOver)
    if isinstance(end, Resume):
        assert {hop.number for hop in world.hops} <= world.alive
        assert (world.hops[0].span.start, world.hops[-1].span.end) == before
        assert all(a.span.end == b.span.start for a, b in zip(world.hops, world.hops[1:], strict=False))
